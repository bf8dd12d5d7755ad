"""What no single section of the configuration can see."""

from __future__ import annotations

from collections.abc import Iterator

from actors.outcomes import Disposition
from actors.types import TRUNCATIONS, Outcome
from service.config.critic import CriticConfig
from service.config.outcome_rules import disposition_of
from service.config.sections import Sections

CPU_BLOCK_TOKENS = 32
_OUT = frozenset({Disposition.MASK, Disposition.DROP})


def disagreements(config: Sections) -> Iterator[str]:
    """Yield a sentence for each, with got, expected and remedy; none for a sound tree."""
    checks = (
        _of_groups,
        _of_rules,
        _of_overlong,
        _of_ends,
        _of_refills,
        _of_scale,
        _of_critic,
        _of_reference,
        _of_budgets,
        _of_weights,
        _of_blocks,
        _of_gpus,
    )
    for check in checks:
        yield from check(config)


def _of_groups(config: Sections) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.baseline in ("mean", "leave_one_out") and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size is {algorithm.group_size} with a group baseline "
            f"('{algorithm.baseline}'): every advantage would be 0; expected at least 2; raise "
            "algorithm.group_size or set algorithm.baseline to none"
        )
    if algorithm.min_group_size > algorithm.group_size:
        yield (
            f"algorithm.min_group_size is {algorithm.min_group_size}, more than group_size "
            f"{algorithm.group_size}: no group could ever be trained; lower it"
        )
    if (algorithm.min_usable_samples or 0) > algorithm.group_size:
        yield (
            f"algorithm.min_usable_samples is {algorithm.min_usable_samples}, more than "
            f"group_size {algorithm.group_size}; lower it or leave it out"
        )
    if (algorithm.min_usable_samples or algorithm.group_size) < algorithm.min_group_size:
        yield (
            f"algorithm.min_usable_samples is {algorithm.min_usable_samples}, less than "
            f"min_group_size {algorithm.min_group_size}: groups would close too small to be "
            "trained; raise the first or lower the second"
        )
    if algorithm.turn_discount is not None and config.rollouts.max_turns == 1:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with rollouts.max_turns 1: "
            "there is no later turn to discount; leave it out, or allow more turns"
        )
    if algorithm.max_lag == 0 and algorithm.window > 1:
        yield (
            f"algorithm.window_groups is {algorithm.window} with max_lag 0; synchronous training "
            "takes the groups in order: leave window_groups out, or set max_lag to 1 or more"
        )


def _of_rules(config: Sections) -> Iterator[str]:
    for outcome, rule in config.rollouts.outcomes.items():
        disposition = rule.disposition
        if (disposition is Disposition.TRAIN_PENALISED) != (rule.penalty > 0):
            yield (
                f"rollouts.outcomes.{outcome.value} has penalty {rule.penalty:g} with disposition "
                f"{disposition.value}; expected more than 0 with train_penalised and 0 with every "
                "other one; set both"
            )
        if outcome is Outcome.REWARD_ERROR and disposition not in _OUT:
            yield (
                f"rollouts.outcomes.reward_error has disposition {disposition.value}: its return "
                "would be a 0 that no environment gave; expected drop or mask; choose one of them"
            )
        if outcome is Outcome.COMPLETED and rule.max_retries:
            yield (
                f"rollouts.outcomes.completed has max_retries {rule.max_retries}: what was played "
                "to its end would be thrown away and played again; expected 0; leave it out"
            )
        if outcome is Outcome.COMPLETED and disposition in _OUT:
            yield (
                f"rollouts.outcomes.completed has disposition {disposition.value}: nothing that "
                "goes well would ever be trained; expected one of those that train; choose one"
            )


def _of_overlong(config: Sections) -> list[str]:
    overlong, rollouts = config.algorithm.reward.overlong, config.rollouts
    if overlong is None:
        return []
    if overlong.cache_tokens > overlong.max_tokens:
        return [
            f"algorithm.reward.overlong.cache_tokens is {overlong.cache_tokens}, expected at most "
            f"overlong.max_tokens ({overlong.max_tokens}); lower it"
        ]
    free = overlong.max_tokens - overlong.cache_tokens
    most = rollouts.max_turns * rollouts.max_tokens_per_turn
    if free < most:
        return []
    return [
        f"algorithm.reward.overlong punishes from {free} tokens on, but a trajectory samples at "
        f"most {most} (rollouts.max_turns times max_tokens_per_turn): nothing would ever be "
        "punished; lower overlong.max_tokens"
    ]


def _of_ends(config: Sections) -> list[str]:
    penalty = config.algorithm.reward.missing_end_penalty
    cut_off = {disposition_of(config, outcome) for outcome in TRUNCATIONS}
    if not penalty or not cut_off <= _OUT:
        return []
    return [
        f"algorithm.reward.missing_end_penalty is {penalty:g}, but no trajectory that was cut off "
        "is in the loss; expected a rule that trains one; set rollouts.outcomes.truncated_tokens "
        "to {disposition: train}, or leave the penalty out"
    ]


def _of_refills(config: Sections) -> list[str]:
    algorithm = config.algorithm
    if not algorithm.max_variance_refills:
        return []
    got = f"algorithm.max_variance_refills is {algorithm.max_variance_refills} with "
    found = []
    if algorithm.baseline in ("none", "critic"):
        found.append(
            got + f"baseline {algorithm.baseline}, which trains groups of equal returns as well; "
            "expected 0; choose a group baseline or leave it out"
        )
    if algorithm.turn_discount is not None:
        found.append(
            got + "turn_discount: equal returns that fell to different turns are a signal there; "
            "expected one of the two; leave the other out"
        )
    return found


def _of_scale(config: Sections) -> Iterator[str]:
    """What divides advantages: statistics of a group."""
    algorithm = config.algorithm
    if algorithm.scale != "none" and algorithm.baseline in ("none", "critic"):
        yield (
            f"algorithm.scale is {algorithm.scale} with algorithm.baseline {algorithm.baseline}: "
            "it divides by the returns of a group, which needs a group baseline (mean or "
            "leave_one_out); expected none; set algorithm.scale to none, or choose a group baseline"
        )


def _of_critic(config: Sections) -> Iterator[str]:
    algorithm = config.algorithm
    critic = algorithm.critic
    if not algorithm.has_critic:
        if critic != CriticConfig():
            yield (
                f"algorithm.critic is set with algorithm.baseline {algorithm.baseline}: no critic "
                "would be trained; set algorithm.baseline to critic, or leave algorithm.critic out"
            )
        return
    if algorithm.turn_discount is not None:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with algorithm.baseline "
            "critic, which gives credit by token; leave turn_discount out, or choose a group "
            "baseline"
        )


def _of_reference(config: Sections) -> Iterator[str]:
    algorithm = config.algorithm
    is_asked = algorithm.reward.kl is not None or algorithm.loss.kl.coefficient > 0
    if algorithm.reference is not None and not is_asked:
        yield (
            f"algorithm.reference is {algorithm.reference}, but nothing is compared with it; set "
            "algorithm.loss.kl.coefficient above 0 or algorithm.reward.kl, or leave it out"
        )


def _of_budgets(config: Sections) -> Iterator[str]:
    rollouts, context = config.rollouts, config.model.max_context_tokens
    if rollouts.max_tokens_per_turn >= context:
        yield (
            f"rollouts.max_tokens_per_turn is {rollouts.max_tokens_per_turn}, expected less than "
            f"model.max_context_tokens ({context}), which also holds the prompt; lower the first "
            "or raise the second"
        )
    if config.max_queue_items < config.algorithm.rollouts_per_step:
        yield (
            f"queue.max_items is {config.max_queue_items}, expected at least the "
            f"{config.algorithm.rollouts_per_step} rollouts of one step; raise it or leave it out"
        )


def _of_weights(config: Sections) -> Iterator[str]:
    inference = config.inference
    if inference.weight_backend == "object_store":
        return
    if config.trainer.device == "cpu":
        yield (
            f"inference.weight_backend is {inference.weight_backend} with a trainer on "
            "cpu; expected object_store; nccl and ipc move weights between GPUs"
        )
    if inference.gpus_per_replica == 0:
        yield (
            f"inference.weight_backend is {inference.weight_backend} with "
            "inference.gpus_per_replica 0; expected object_store for engines on CPU; nccl and ipc "
            "move weights between GPUs"
        )


def _of_blocks(config: Sections) -> Iterator[str]:
    """What vLLM's attention on CPU takes; on a GPU it depends on the backend that it chooses."""
    inference = config.inference
    tokens = inference.block_tokens
    if inference.gpus_per_replica == 0 and tokens is not None and tokens % CPU_BLOCK_TOKENS:
        yield (
            f"inference.block_tokens is {tokens}, expected a multiple of {CPU_BLOCK_TOKENS} for "
            f"engines on CPU; set {max(1, tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS}, or "
            "leave it out"
        )


def _of_gpus(config: Sections) -> Iterator[str]:
    """Who is to compute on GPUs and is given none, or the other way round."""
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
    for key, share in (
        ("inference.gpus_per_replica", inference.gpus_per_replica),
        ("trainer.gpus_per_rank", trainer.gpus_per_rank),
    ):
        if share > 1 and not share.is_integer():
            yield (
                f"{key} is {share:g}, expected a fraction below 1 or a whole number, as Ray "
                "reserves GPUs; round it"
            )
