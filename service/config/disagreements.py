"""Find settings that contradict each other; `file.py` calls this module.

All such checks are in this module, `task_checks.py` and `algorithm_checks.py`; components trust the
settings that they receive.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.trainer.settings import Device, WeightBackend
from actors.types import Dtype
from actors.user_code import type_of
from service.config.algorithm_checks import ALGORITHM_CHECKS, check_schedules
from service.config.task_checks import TASK_CHECKS
from service.config.tree import Config
from service.inference.engine_args import engine_args_problems
from service.inference.settings import ADAPTER_RANKS, CPU_BLOCK_TOKENS


def disagreements(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction, with the remedy."""
    checks = (
        _check_model,
        *TASK_CHECKS,
        _check_audit,
        _check_completions,
        _check_template,
        *ALGORITHM_CHECKS,
        _check_budgets,
        _check_weights,
        _check_blocks,
        _check_adapters,
        _check_engine_args,
        _check_gpus,
    )
    # A problem of a part that the whole configuration also has is reported once, for the whole.
    said = set()
    for check in checks:
        for problem in check(config):
            said.add(problem)
            yield problem
    if not config.mixture:
        return
    for name, member in config.members.items():
        for check in checks:
            for problem in check(member):
                if problem not in said:
                    yield f"mixture.{name}: {problem}"


def trainer_disagreements(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction among the settings of model and trainer."""
    for check in (_check_model, check_schedules, _check_gpus):
        yield from check(config)


def _check_model(config: Config) -> Iterator[str]:
    model = config.model
    if (model.path is None) == (model.tiny is None):
        yield (
            "expected exactly one of model.path and model.tiny; got "
            f"{'neither' if model.path is None else 'both'}; set model.path to a directory or "
            "hub name, or model.tiny to {} for the built-in tiny model"
        )


def _check_audit(config: Config) -> Iterator[str]:
    audit = config.audit
    if audit.shadow is not None and not (audit.hacking and config.run.journal_steps):
        yield (
            f"audit.shadow is {audit.shadow}, and audit.hacking is {str(audit.hacking).lower()} "
            f"with run.journal_steps {config.run.journal_steps}; expected a journal that is "
            "read; set audit.hacking to true and run.journal_steps above 0, or remove audit.shadow"
        )


def _check_completions(config: Config) -> Iterator[str]:
    trackers = config.trackers
    if not trackers.completions:
        return
    if not config.run.journal_steps:
        yield (
            f"trackers.completions is {trackers.completions} with run.journal_steps 0; expected a "
            "journal, which holds the completions; set run.journal_steps above 0"
        )
    if not (trackers.jsonl or trackers.wandb or trackers.trackio or trackers.own):
        yield (
            f"trackers.completions is {trackers.completions}, but no tracker shows them; expected "
            "wandb, trackio, jsonl or own; set one of them, or trackers.completions to 0"
        )


def _check_template(config: Config) -> Iterator[str]:
    for name, value in config.rollouts.template_options.items():
        if not isinstance(value, bool | int | float | str | None):
            yield (
                f"rollouts.template_options.{name}: got {type_of(value)}, expected "
                "true, false, a number, a text or null; chat templates are given plain values"
            )


def _check_budgets(config: Config) -> Iterator[str]:
    rollouts, context = config.rollouts, config.model.max_context_tokens
    if rollouts.max_tokens_per_turn >= context:
        yield (
            f"rollouts.max_tokens_per_turn is {rollouts.max_tokens_per_turn}, expected less than "
            f"model.max_context_tokens ({context}), which also holds the prompt; lower the first "
            "or raise the second"
        )
    max_items = config.queue.max_items_with(config.algorithm)
    if max_items < config.algorithm.rollouts_per_step:
        yield (
            f"queue.max_items is {max_items}, expected at least the "
            f"{config.algorithm.rollouts_per_step} rollouts of one step; raise it or leave it out"
        )


def _check_weights(config: Config) -> Iterator[str]:
    inference = config.inference
    if inference.weight_backend is not WeightBackend.COLLECTIVE:
        return
    if (config.trainer.device is Device.CPU) is not inference.is_on_cpu:
        yield (
            f"inference.weight_backend is collective with a trainer on {config.trainer.device} and "
            f"inference.gpus_per_replica {inference.gpus_per_replica:g}; expected both on CPU or "
            "both on GPUs, or object_store"
        )
    elif not inference.is_on_cpu and inference.gpus_per_replica % 1:
        yield (
            f"inference.weight_backend is collective with inference.gpus_per_replica "
            f"{inference.gpus_per_replica:g}; expected whole GPUs, because NCCL refuses two "
            "members on one GPU; use object_store"
        )


def _check_blocks(config: Config) -> Iterator[str]:
    """Yield a contradiction if vLLM's attention on CPU refuses the block size.

    On a GPU the allowed sizes depend on the backend that vLLM chooses.
    """
    inference = config.inference
    tokens = inference.block_tokens
    if inference.is_on_cpu and tokens is not None and tokens % CPU_BLOCK_TOKENS:
        yield (
            f"inference.block_tokens is {tokens}, expected a multiple of {CPU_BLOCK_TOKENS} for "
            f"engines on CPU; set {max(1, tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS}, or "
            "leave it out"
        )


def _check_adapters(config: Config) -> Iterator[str]:
    """Yield a sentence for each reason why vLLM cannot serve the adapters."""
    lora = config.trainer.published_lora
    if lora is None:
        return
    if lora.rank > ADAPTER_RANKS[-1]:
        yield (
            f"trainer.lora.rank is {lora.rank}, expected at most {ADAPTER_RANKS[-1]}, the largest "
            "that vLLM serves; lower it, or set trainer.lora.publish_merged: true"
        )
    if not config.inference.is_on_cpu and config.model.dtype is Dtype.FLOAT32:
        yield (
            "trainer.lora with model.dtype float32: vLLM's kernels for adapters on GPUs compute in "
            "16 bits; expected bfloat16; set model.dtype and trainer.dtype to bfloat16, or "
            "trainer.lora.publish_merged: true"
        )


def _check_engine_args(config: Config) -> Iterator[str]:
    return engine_args_problems(config.inference.engine_args)


def _check_gpus(config: Config) -> Iterator[str]:
    """Yield a sentence for each kind of process that lacks GPUs, or does not use its GPUs."""
    inference, trainer = config.inference, config.trainer
    if (trainer.device is Device.CUDA) != (trainer.gpus_per_rank > 0):
        yield (
            f"trainer.device is {trainer.device} with trainer.gpus_per_rank "
            f"{trainer.gpus_per_rank:g}; expected more than 0 with cuda and 0 with cpu; a rank "
            "sees only the GPUs that are reserved for it: set gpus_per_rank to 1, or to 0 on cpu"
        )
    num_gpus = inference.tensor_parallel_size
    if num_gpus > 1 and inference.gpus_per_replica < num_gpus:
        yield (
            f"inference.tensor_parallel_size is {num_gpus} with inference.gpus_per_replica "
            f"{inference.gpus_per_replica:g}; expected at least as many GPUs; raise "
            "gpus_per_replica or set tensor_parallel_size to 1"
        )
    if trainer.num_ranks > 1 and 0 < trainer.gpus_per_rank < 1:
        yield (
            f"trainer.gpus_per_rank is {trainer.gpus_per_rank:g} with trainer.num_ranks "
            f"{trainer.num_ranks}: Ray would put two ranks on one GPU, which NCCL refuses; "
            "expected whole GPUs for more than one rank; set gpus_per_rank to 1, or num_ranks to 1"
        )
    for key, share in (
        ("inference.gpus_per_replica", inference.gpus_per_replica),
        ("trainer.gpus_per_rank", trainer.gpus_per_rank),
    ):
        if share > 1 and not share.is_integer():
            yield (
                f"{key} is {share:g}, expected a fraction below 1 or a whole number, as Ray "
                "reserves GPUs; round it"
            )
