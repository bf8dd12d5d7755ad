"""Checks of one trajectory: what was sampled, against what the trainer was handed.

That samples are what the rule makes of the turns is a property test of the builder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.policy_age import policy_ages
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import NO_VERSION, Outcome, Sample
from service.inspect.audit.offence import Check, Offence


def check_trajectory(step: JournalStep, entry: TrajectoryEntry) -> Iterator[Offence]:
    """Run every check of one trajectory."""
    name = entry.trajectory.trajectory_id
    for check, text in _findings(step, entry):
        yield Offence(check=check, step=step.step, subject=name, text=text)


def _findings(step: JournalStep, entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    for number, sample in enumerate(entry.trajectory.samples):
        for check, text in _check_sample(sample):
            yield check, f"sample {number}: {text}"
    yield from _check_handed_out(entry)
    yield from _check_rewards(
        entry,
        is_shaped=step.group_rule is None,
        worst_completed=lambda: _worst_completed(step, entry.trajectory.group_number),
    )
    if entry.reason is None:
        yield from _check_age(step, entry)


def _check_sample(sample: Sample) -> Iterator[tuple[Check, str]]:
    mask = sample.mask
    is_sampled = np.zeros(sample.num_tokens, np.bool_)
    for turn in sample.turns:
        is_sampled[turn.tokens] = True
        missing = np.flatnonzero(mask[turn.tokens] == 0)
        if missing.size:
            yield (
                Check.LOGPROBS,
                f"turn {turn.index}: {missing.size} of {turn.num_sampled} sampled tokens, the "
                f"first is number {missing[0]}",
            )
    unsampled = np.flatnonzero((mask == 1) & ~is_sampled)
    if unsampled.size:
        yield (
            Check.SAMPLED,
            f"{unsampled.size} tokens to be trained that nobody sampled, the first at "
            f"{unsampled[0]}",
        )


def _check_handed_out(entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    if entry.reason is not None:
        if entry.num_trained:
            reason = entry.reason.value
            text = f"evicted as {reason}, with {entry.num_trained} trained tokens"
            yield Check.HANDED_OUT, text
        return
    if not entry.num_trained:
        yield Check.HANDED_OUT, "trained, and without a trained token"
    expected = [sample.num_trained for sample in entry.trajectory.samples]
    found = [int(of_sample.shape[0]) for of_sample in entry.advantages]
    if found != expected:
        yield Check.HANDED_OUT, f"advantages of {found} tokens by sample, expected {expected}"
    num_bad = sum(int(np.count_nonzero(~np.isfinite(each))) for each in entry.advantages)
    if num_bad:
        yield Check.ADVANTAGES, f"{num_bad} trained tokens have an advantage that is not finite"


def _check_rewards(
    entry: TrajectoryEntry, *, is_shaped: bool, worst_completed: Callable[[], float]
) -> Iterator[tuple[Check, str]]:
    trajectory = entry.trajectory
    value = trajectory.episode_return
    if trajectory.outcome is Outcome.MALFORMED_TOOL_CALL and value > 0:
        yield Check.MALFORMED, f"ended as {trajectory.outcome.value} with a return of {value:g}"
    for turn in trajectory.turns:
        if turn.is_malformed and turn.reward > 0:
            text = f"turn {turn.index} is malformed and has a reward of {turn.reward:g}"
            yield Check.MALFORMED, text
    brought = entry.baseline_return
    if entry.reason is None and brought is None:
        yield Check.BASELINE, "trained, and not in its group's baseline"
    if brought is not None and not math.isfinite(brought):
        yield Check.BASELINE, f"brought {brought:g} to the baseline, expected a finite number"
    elif not is_shaped and brought is not None and brought not in (value, min(value, 0.0)):
        lowest = worst_completed()
        if brought != min(value, 0.0, lowest):
            yield (
                Check.BASELINE,
                f"brought {brought:g} to the baseline, its return is {value:g}; expected that, or "
                f"at most {min(0.0, lowest):g}: 0, or the worst return of its group that completed",
            )


def _worst_completed(step: JournalStep, group: int) -> float:
    """Return the lowest return of a group's completed members; infinity: none has completed."""
    returns = [
        entry.trajectory.episode_return
        for entry in step.entries
        if entry.trajectory.group_number == group
        and entry.trajectory.outcome is Outcome.COMPLETED
        # An entry that does not fit the model has a problem; one with no token to train has none.
        and not (entry.reason is EvictionReason.TOKEN_MISALIGNED and entry.problem)
    ]
    return min(filter(math.isfinite, returns), default=math.inf)


def _check_age(step: JournalStep, entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    of_samples = [sample.versions for sample in entry.trajectory.samples]
    versions = np.concatenate([np.empty(0, np.int32), *of_samples])
    ages = policy_ages(versions[versions != NO_VERSION], step.trainer_version)
    bad = ages[(ages < 0) | (ages > step.max_policy_age)]
    if bad.size:
        worst = bad[np.argmax(np.abs(bad))]
        yield (
            Check.AGE,
            f"{bad.size} trained tokens outside 0 to {step.max_policy_age} versions behind the "
            f"trainer's {step.trainer_version}; the worst is {worst}",
        )
