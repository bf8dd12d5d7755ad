"""A correct journal step, and faults that the audit must find when a test plants them in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from actors.journal.files import JournalStep
from actors.trajectory_queue.ledger import EvictionReason
from service.inspect.audit import Check
from worlds.builders.chat_examples import branched, with_trained
from worlds.builders.journal_builders import group_of, one_group, step_of
from worlds.builders.trajectory_builders import linear_turns, make_trajectory

FIRST, SECOND = "g000000.0-0", "g000000.0-1"


def sound_step(number: int = 1) -> JournalStep:
    """Return a correct step with three groups; one trajectory has branched."""
    groups = [group_of(0, [1, 0, 0, 1]), group_of(1, [1, 0], version=number - 1)]
    again = one_group([branched(0), make_trajectory(linear_turns(1), rollout_id="g000003.0-1")])
    return step_of([*groups, again], number=number)


def with_entry(step: JournalStep, row: int, **changes: Any) -> JournalStep:
    entries = list(step.entries)
    entries[row] = replace(entries[row], **changes)
    return replace(step, entries=tuple(entries))


def with_sample(step: JournalStep, row: int, **changes: Any) -> JournalStep:
    """Return the step with changed fields in a trajectory's first sample."""
    trajectory = step.entries[row].trajectory
    samples = (replace(trajectory.samples[0], **changes), *trajectory.samples[1:])
    return with_entry(step, row, trajectory=replace(trajectory, samples=samples))


def with_advantages(step: JournalStep, row: int, values: np.ndarray) -> JournalStep:
    """Return the step with other advantages for a trajectory's first sample."""
    return with_entry(step, row, advantages=(values, *step.entries[row].advantages[1:]))


def advantages_of(step: JournalStep) -> np.ndarray:
    return step.entries[0].advantages[0]


def changed(values: np.ndarray, at: int, value: float) -> np.ndarray:
    copy = values.copy()
    copy[at] = value
    return copy


def of_version(step: JournalStep, row: int, version: int) -> JournalStep:
    """Return the step with a trajectory whose first sample has another policy version."""
    sample = step.entries[row].trajectory.samples[0]
    return with_sample(step, row, versions=np.where(sample.mask, version, -1).astype(np.int32))


def without_logprob(step: JournalStep, position: int) -> JournalStep:
    """Return the step without the log-probability of a sampled token."""
    sample = step.entries[0].trajectory.samples[0]
    versions = changed(sample.versions, position, -1)
    return with_sample(step, 0, logprobs=changed(sample.logprobs, position, 0), versions=versions)


def without_logprobs(step: JournalStep) -> JournalStep:
    """Return the step without any log-probability of a trajectory that counts as trained.

    No token of it can be trained, so its advantages are empty.
    """
    sample = step.entries[0].trajectory.samples[0]
    bare = with_sample(
        step,
        0,
        logprobs=np.zeros_like(sample.logprobs),
        versions=np.full_like(sample.versions, -1),
    )
    return with_advantages(bare, 0, np.empty(0, np.float32))


def with_again(step: JournalStep, **changes: Any) -> JournalStep:
    """Return the step with a copy of its first entry, whose tokens count as packed."""
    again = replace(step.entries[0], **changes)
    num_packed = step.num_packed_trained + again.num_trained
    return replace(step, entries=(*step.entries, again), num_packed_trained=num_packed)


def shaped(step: JournalStep) -> JournalStep:
    """Return the step without its group rule.

    A run with shaped rewards has none, because the group's returns do not determine its advantages.
    """
    return replace(step, group_rule=None)


# By name of the fault: the check that finds it, what the finding names, and how to plant it.
PLANTS: dict[str, tuple[Check, str, Callable[[JournalStep], JournalStep]]] = {
    "no log-probability": (Check.LOGPROBS, f"{FIRST}.a0", lambda s: without_logprob(s, 11)),
    "an observation that is trained": (
        Check.SAMPLED, f"{FIRST}.a0", lambda s: with_trained(s, 0, [16]),
    ),
    "a prompt token that is trained": (
        Check.SAMPLED, f"{SECOND}.a0", lambda s: with_trained(s, 1, [0]),
    ),
    "a sampled token left out": (
        Check.HANDED_OUT, f"{FIRST}.a0", lambda s: with_advantages(s, 0, advantages_of(s)[:-1]),
    ),
    "a sample left out": (
        Check.HANDED_OUT, "g000003.0-0.a0",
        lambda s: with_entry(s, 6, advantages=s.entries[6].advantages[:1]),
    ),
    "evicted and trained": (
        Check.HANDED_OUT, f"{FIRST}.a0", lambda s: with_entry(s, 0, reason=EvictionReason.MASKED),
    ),
    "rows that lack a token": (
        Check.PACKED, "step 1", lambda s: replace(s, num_packed_trained=s.num_packed_trained - 1),
    ),
    "older than the bound": (
        Check.AGE, f"{FIRST}.a0", lambda s: of_version(s, 0, -20),
    ),
    "one version older than the bound": (
        Check.AGE, f"{FIRST}.a0",
        lambda s: of_version(s, 0, s.trainer_version - s.max_policy_age - 1),
    ),
    "of a future version": (
        Check.AGE, f"{FIRST}.a0", lambda s: of_version(s, 0, 7),
    ),
    "another return in the baseline": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(s, 0, baseline_return=5.0),
    ),
    "trained outside of the baseline": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(s, 0, baseline_return=None),
    ),
    "one token with another advantage": (
        Check.ADVANTAGES, "g000000.0",
        lambda s: with_advantages(s, 0, changed(advantages_of(s), 3, 2)),
    ),
    "advantages that do not add up": (
        Check.ZERO_SUM, "g000000.0",
        lambda s: with_advantages(s, 0, advantages_of(s) * 2),
    ),
    "no log-probability of any token": (Check.LOGPROBS, f"{FIRST}.a0", without_logprobs),
    "trained without a trained token": (Check.HANDED_OUT, f"{FIRST}.a0", without_logprobs),
    "an entry twice": (Check.ONCE, FIRST, with_again),
    "another attempt of a rollout": (
        Check.ONCE, FIRST,
        lambda s: with_again(s, trajectory=replace(s.entries[0].trajectory, attempt=1)),
    ),
    "an entry twice with shaped rewards": (
        Check.ONCE, FIRST, lambda s: shaped(with_again(s)),
    ),
    "a return of NaN in the baseline": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(s, 0, baseline_return=math.nan),
    ),
    "a shaped return of NaN in the baseline": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(shaped(s), 0, baseline_return=math.nan),
    ),
    "a huge return in the baseline": (
        Check.BASELINE, "g000000.0", lambda s: with_entry(s, 0, baseline_return=1e308),
    ),
    "an advantage of NaN": (
        Check.ADVANTAGES, f"{FIRST}.a0",
        lambda s: with_advantages(shaped(s), 0, changed(advantages_of(s), 3, np.nan)),
    ),
    "infinite advantages": (
        Check.ADVANTAGES, f"{FIRST}.a0",
        lambda s: with_advantages(
            s, 0, changed(changed(advantages_of(s), 0, np.inf), 1, -np.inf)
        ),
    ),
    "evicted as zero variance with a signal": (
        Check.ADVANTAGES, "g000000.0",
        lambda s: with_entry(s, 0, reason=EvictionReason.ZERO_VARIANCE),
    ),
}  # fmt: skip
