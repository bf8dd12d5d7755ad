"""Find settings that contradict each other; `file.py` calls this module.

All such checks are in this module and in `algorithm_checks.py`; components trust the settings that
they receive. The API uses `kept_tokens_problems` too, for evaluations that operators request.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.environment.settings import GROUP_REWARD, MIXTURE_PERIOD, KeptTokens, StructuredOutputs
from actors.types import SESSION, UPLOADED, Dtype
from actors.user_code import type_of
from service.config.algorithm_checks import ALGORITHM_CHECKS, check_schedules
from service.config.sections import EvaluationSetSettings, TasksSettings
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
    # Report a problem only once if the whole configuration and a part of the mixture both have it.
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
            f"{config.algorithm.rollouts_per_step} rollouts of one step; raise it, or "
            "remove the setting"
        )


def _check_weights(config: Config) -> Iterator[str]:
    inference = config.inference
    if inference.weight_backend != "collective":
        return
    if (config.trainer.device == "cpu") is not inference.is_on_cpu:
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
    """Yield a contradiction if vLLM's attention on CPU refuses the block size."""
    inference = config.inference
    tokens = inference.block_tokens
    # On a GPU the allowed sizes depend on the backend that vLLM chooses.
    if inference.is_on_cpu and tokens is not None and tokens % CPU_BLOCK_TOKENS:
        yield (
            f"inference.block_tokens is {tokens}, expected a multiple of {CPU_BLOCK_TOKENS} for "
            f"engines on CPU; set {max(1, tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS}, or "
            "remove the setting"
        )


def _check_adapters(config: Config) -> Iterator[str]:
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
    inference, trainer = config.inference, config.trainer
    if (trainer.device == "cuda") != (trainer.gpus_per_rank > 0):
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


def _check_tasks(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if tasks.file is not None and tasks.dataset is not None:
        yield (
            "tasks.file and tasks.dataset are both set; expected one of them: a file has tasks as "
            "they are, a data set columns of its own; remove one"
        )
    if tasks.dataset is None:
        for key, is_set in (
            ("columns", bool(tasks.columns)),
            ("subset", tasks.subset is not None),
            ("evaluation_split", tasks.evaluation_split is not None),
        ):
            if is_set:
                yield (
                    f"tasks.{key} is set without tasks.dataset, to which it belongs; expected "
                    "both; set tasks.dataset"
                )


def _check_mixture(config: Config) -> Iterator[str]:
    if not config.mixture:
        if not config.tasks.environment:
            yield (
                "tasks.environment is not set and there is no mixture; expected one of them; name "
                "an environment, such as guessing"
            )
        return
    if config.tasks != TasksSettings():
        yield (
            "tasks and mixture are both set; expected one of them: each part of a mixture has "
            "tasks of its own; move them to mixture.NAME.tasks"
        )
    if config.evaluation.sets:
        yield (
            "evaluation.sets is set with a mixture, whose parts are evaluated each as a set of its "
            "own; remove evaluation.sets, or make each set a part of the mixture"
        )
    if len(config.mixture) > MIXTURE_PERIOD:
        yield f"mixture has {len(config.mixture)} parts, expected at most {MIXTURE_PERIOD}"
    whole = sum(each.weight for each in config.mixture.values())
    for name, each in config.mixture.items():
        if each.weight / whole < 1 / MIXTURE_PERIOD:
            yield (
                f"mixture.{name}.weight is {each.weight:g} of {whole:g}, expected at least one in "
                f"{MIXTURE_PERIOD}; raise it"
            )
        if each.tasks.environment == SESSION:
            yield (
                f"mixture.{name}.tasks.environment is session, expected an environment: agents "
                "outside bring their own tasks, to any run of `rayloom serve`"
            )
        if name in (SESSION, UPLOADED):
            yield f"mixture.{name}: this name is taken by rollouts of clients; choose another"


def _check_curriculum(config: Config) -> Iterator[str]:
    settings = config.curriculum
    if not settings.is_on:
        return
    if settings.hopeless_to >= settings.solved_from:
        yield (
            f"curriculum.hopeless_to is {settings.hopeless_to:g}, expected less than "
            f"curriculum.solved_from ({settings.solved_from:g}); lower it"
        )
    tasks = config.tasks
    if not config.mixture and tasks.file is None and tasks.dataset is None and tasks.environment:
        yield (
            "curriculum is set, but the seed makes every task and none is repeated; expected "
            "tasks.file, tasks.dataset or a mixture; set one of these, or remove curriculum"
        )


def _check_evaluation(config: Config) -> Iterator[str]:
    named = {"evaluation": config.evaluation} | {
        f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()
    }
    for key, settings in named.items():
        if settings.samples > 1 and settings.temperature == 0:
            yield (
                f"{key}.samples is {settings.samples} with temperature 0, where all samples of a "
                "task are the same; expected a temperature above 0, or one sample; set one of them"
            )
        sampling = settings.sampling
        yield from kept_tokens_problems(key, sampling.kept, temperature=sampling.temperature)
    tasks = config.tasks
    scores_answers = any(tasks.options.get(name) for name in ("reward", "judges", "tools"))
    is_evaluated = tasks.evaluation_tasks > 0 or bool(config.evaluation.sets)
    if tasks.options.get(GROUP_REWARD) and not scores_answers and is_evaluated:
        yield (
            "tasks.options.group_reward is set without tasks.options.reward, and tasks are held "
            "out for evaluations, whose answers are in no group; expected a function that scores "
            "one answer, or no evaluation; set one of them, or tasks.evaluation_tasks to 0"
        )
    for name, each in config.evaluation.sets.items():
        yield from _check_set(config, f"evaluation.sets.{name}", each)


def _check_sessions(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if config.has_environment:
        return
    if tasks.evaluation_tasks:
        yield (
            f"tasks.evaluation_tasks is {tasks.evaluation_tasks} with tasks.environment session: "
            "nothing here can play them; expected 0; set it"
        )
    for given in ("file", "dataset", "options"):
        if not getattr(tasks, given):
            continue
        yield (
            f"tasks.{given} is set with tasks.environment session, whose tasks come with the "
            f"sessions; remove tasks.{given}"
        )


def _check_set(config: Config, key: str, settings: EvaluationSetSettings) -> Iterator[str]:
    if settings.file is not None and settings.dataset is not None:
        yield f"{key}.file and {key}.dataset are both set; expected one of them; remove one"
    of_data_set = ("subset", "split", "columns")
    is_of_data_set = any(getattr(settings, name) is not None for name in of_data_set)
    has_data_set = settings.dataset is not None or config.tasks.dataset is not None
    if is_of_data_set and (settings.file is not None or not has_data_set):
        yield (
            f"{key} names a subset, a split or columns without a dataset to which they belong; "
            "expected one there or in tasks, and no file; set a dataset, or remove them"
        )
    has_own = is_of_data_set or settings.file is not None or settings.dataset is not None
    if not has_own and not config.tasks.evaluation_tasks:
        yield (
            f"{key} names no tasks, and tasks.evaluation_tasks is 0, so that the set is empty; "
            "name a file, a dataset or a split, or raise tasks.evaluation_tasks"
        )
    if not config.has_environment:
        yield (
            f"{key} is set with tasks.environment session: nothing here can play it; remove the set"
        )


TASK_CHECKS = (
    _check_tasks,
    _check_mixture,
    _check_curriculum,
    _check_evaluation,
    _check_sessions,
)


def kept_tokens_problems(key: str, kept: KeptTokens, *, temperature: float) -> Iterator[str]:
    """Yield a sentence for each invalid setting of `KeptTokens`, such as top_p at temperature 0.

    key: name of the section with the settings, for messages; empty if there is no section.
    """
    prefix = f"{key}." if key else ""
    for name, value, is_off in (
        ("top_p", kept.top_p, kept.top_p == 1),
        ("top_k", kept.top_k, kept.top_k == 0),
        ("min_p", kept.min_p, kept.min_p == 0),
    ):
        if temperature == 0 and not is_off:
            yield (
                f"{prefix}{name} is {value:g} with temperature 0, which always takes the likeliest "
                f"token; expected a temperature above 0; set it, or remove {name}"
            )
    if kept.structured_outputs is not None:
        yield from _structured_problems(f"{prefix}structured_outputs", kept.structured_outputs)


def _structured_problems(key: str, structured: StructuredOutputs) -> Iterator[str]:
    # Import these here, because most configurations have no structured outputs.
    import regex
    from jsonschema import Draft202012Validator, SchemaError

    if len(structured.given) != 1:
        yield (
            f"{key} has {', '.join(structured.given) or 'nothing'}; expected one of json, regex, "
            "choice and grammar; set one of them"
        )
    try:
        regex.compile(structured.regex or "")
    except regex.error as error:
        yield f"{key}.regex {structured.regex!r} is not a regular expression ({error}); correct it"
    try:
        Draft202012Validator.check_schema(structured.json or {})
    except SchemaError as error:
        yield f"{key}.json is not a JSON schema ({error.message}); correct it"
