"""Check which settings changed between a run and its resumption.

A resumed run plays the stored groups again under their old numbers, so settings that affect stored
groups may not change. All other settings may: `run.steps`, the learning rate, the numbers of ranks,
engines and actors.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.trainer.settings import LoraSettings
from service.config.tree import Config

# Sections of which no key may change: each affects the checkpoint or the order of the tasks.
FIXED_SECTIONS = ("model", "tasks", "mixture")


def refused_changes(before: Config, now: Config) -> list[str]:
    """Return a sentence for each refused change; the list is empty if the run can be resumed.

    A sentence says what is set now, what was expected, and why.
    """
    found = [
        f"section {section} differs from the run's own; expected the same, because the checkpoint "
        "and the task order depend on it"
        for section in FIXED_SECTIONS
        if getattr(before, section) != getattr(now, section)
    ]
    if before.run.seed != now.run.seed:
        found.append(
            f"run.seed is {now.run.seed}, the run began with {before.run.seed}; expected the same, "
            "because the tasks derive from it"
        )
    if before.trainer.lora_shape != now.trainer.lora_shape:
        found.append(
            f"trainer.lora is {_shown(now.trainer.lora_shape)}, the run has "
            f"{_shown(before.trainer.lora_shape)}; expected the same (only publish_merged may "
            "change), because the checkpoint holds the adapters"
        )
    return [*found, *_refused_of_algorithm(before, now)]


def _shown(lora: LoraSettings | None) -> str:
    if lora is None:
        return "null"
    targets = "null" if lora.targets is None else f"[{', '.join(lora.targets)}]"
    return f"{{rank: {lora.rank}, alpha: {lora.alpha:g}, targets: {targets}}}"


def refused_temperature(before: Config, now: Config, *, num_kept_samples: int) -> list[str]:
    """Return a sentence if the temperature changed while samples of the old temperature are stored.

    Stored turns and uploads are trained with the temperature at which they were sampled.

    Args: num_kept_samples: number of stored turns and uploads in the run's database.
    Returns: a list with one sentence, or an empty list if the run can be resumed.
    """
    own, new = before.rollouts.temperature, now.rollouts.temperature
    if new == own or not num_kept_samples:
        return []
    return [
        f"rollouts.temperature is {new:g}, the run has {own:g}; expected the same while "
        f"{num_kept_samples} stored turns of sessions or uploads wait, which were sampled at "
        f"{own:g}; change it once they are trained"
    ]


def _refused_of_algorithm(before: Config, now: Config) -> Iterator[str]:
    own, new = before.algorithm, now.algorithm
    if new.groups_per_step != own.groups_per_step:
        yield (
            f"algorithm.groups_per_step is {new.groups_per_step}, the run has "
            f"{own.groups_per_step}; expected the same, because admission counts its groups from "
            "the first step on, and the bound on the policy's age depends on this count"
        )
    if new.max_lag < own.max_lag:
        yield (
            f"algorithm.max_lag is {new.max_lag}, the run has {own.max_lag}; expected at least as "
            "many, because groups that were admitted so far ahead are played again and would be "
            "too old"
        )
    if new.has_critic != own.has_critic:
        yield (
            f"algorithm.baseline is {new.baseline}, the run has {own.baseline}; expected a critic "
            "in both or in neither, because the checkpoint has a critic's weights only if the run "
            "has a critic"
        )
    for key, began, is_now in (
        ("algorithm.reference", own.reference, new.reference),
        ("algorithm.critic.model", own.critic.model, new.critic.model),
    ):
        if is_now != began:
            yield (
                f"{key} is {is_now or 'null'}, the run began with {began or 'null'}; expected the "
                "same, because what was trained so far was measured by it"
            )
    if new.min_group_size > own.min_group_size:
        yield (
            f"algorithm.min_group_size is {new.min_group_size}, the run has {own.min_group_size}; "
            "expected at most as many, because tasks that wait may have been accepted with fewer "
            "rollouts"
        )
