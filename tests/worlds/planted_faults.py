"""A sound step, and the faults that an audit must find in it: what is changed, and who is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from actors.journal.record import JournalStep
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import VersionSpan
from service.inspect.audit.offence import Check
from worlds.chat_examples import branched, with_trained
from worlds.journal_builders import group_of, one_group, step_of
from worlds.trajectory_builders import linear_turns, make_trajectory

FIRST, SECOND = "g000000.0-0", "g000000.0-1"


def sound_step(number: int = 1) -> JournalStep:
    """Two groups, and one trajectory that branched."""
    groups = [group_of(0, [1, 0, 0, 1]), group_of(1, [1, 0], version=number - 1)]
    again = one_group([branched(0), make_trajectory(linear_turns(1), rollout_id="g000003.0-1")])
    return step_of([*groups, again], number=number)


def with_entry(step: JournalStep, row: int, **changes: Any) -> JournalStep:
    entries = list(step.entries)
    entries[row] = replace(entries[row], **changes)
    return replace(step, entries=tuple(entries))


def with_turn(step: JournalStep, row: int, **changes: Any) -> JournalStep:
    """Changes a trajectory's first turn, after the merge has seen it."""
    trajectory = step.entries[row].trajectory
    turns = (replace(trajectory.turns[0], **changes), *trajectory.turns[1:])
    return with_entry(step, row, trajectory=replace(trajectory, turns=turns))


def with_sample(step: JournalStep, row: int, **changes: Any) -> JournalStep:
    samples = step.entries[row].samples
    return with_entry(step, row, samples=(replace(samples[0], **changes), *samples[1:]))


def changed(values: np.ndarray, at: int, value: float) -> np.ndarray:
    copy = values.copy()
    copy[at] = value
    return copy


def without_last(step: JournalStep) -> JournalStep:
    sample = step.entries[0].samples[0]
    names = ("positions", "token_ids", "logprobs", "versions", "advantages")
    return with_sample(step, 0, **{name: getattr(sample, name)[:-1] for name in names})


def of_version(step: JournalStep, row: int, version: int) -> JournalStep:
    """The step with a trajectory that another version sampled, by its turns and by its record."""
    trajectory, sample = step.entries[row].trajectory, step.entries[row].samples[0]
    turns = tuple(
        replace(turn, version_spans=(VersionSpan(version=version, start=0, end=turn.num_sampled),))
        for turn in trajectory.turns
    )
    moved = with_sample(step, row, versions=np.full_like(sample.versions, version))
    return with_entry(moved, row, trajectory=replace(trajectory, turns=turns))


def without_logprobs(step: JournalStep) -> JournalStep:
    """A trajectory called trained, of which nothing could be trained and nothing was."""
    trajectory, sample = step.entries[0].trajectory, step.entries[0].samples[0]
    turns = tuple(
        replace(turn, logprobs=np.full_like(turn.logprobs, np.nan)) for turn in trajectory.turns
    )
    names = ("positions", "token_ids", "logprobs", "versions", "advantages")
    empty = with_sample(step, 0, **{name: getattr(sample, name)[:0] for name in names})
    return with_entry(empty, 0, trajectory=replace(trajectory, turns=turns))


def with_again(step: JournalStep, **changes: Any) -> JournalStep:
    """The step with its first entry a second time, and with as many tokens packed."""
    again = replace(step.entries[0], **changes)
    num_packed = step.num_packed_trained + again.num_trained
    return replace(step, entries=(*step.entries, again), num_packed_trained=num_packed)


def shaped(step: JournalStep) -> JournalStep:
    """As a run writes it whose advantages are no function of its groups' returns alone."""
    return replace(step, group_rule=None)


PLANTS: dict[str, tuple[Check, str, Callable[[JournalStep], JournalStep]]] = {
    "no log-probability": (
        Check.LOGPROBS, f"{FIRST}.a0",
        lambda s: with_turn(
            s, 0, logprobs=changed(s.entries[0].trajectory.turns[0].logprobs, 2, np.nan)
        ),
    ),
    "a log-probability too few": (
        Check.LOGPROBS, f"{FIRST}.a0",
        lambda s: with_turn(s, 0, logprobs=s.entries[0].trajectory.turns[0].logprobs[:-1]),
    ),
    "a span that ends early": (
        Check.SPANS, f"{FIRST}.a0",
        lambda s: with_turn(s, 0, version_spans=(VersionSpan(version=0, start=0, end=3),)),
    ),
    "spans that overlap": (
        Check.SPANS, f"{FIRST}.a0",
        lambda s: with_turn(
            s, 0,
            version_spans=(
                VersionSpan(version=0, start=0, end=6), VersionSpan(version=0, start=2, end=3),
            ),
        ),
    ),
    "an observation that is trained": (
        Check.SAMPLED, f"{FIRST}.a0", lambda s: with_trained(s, 0, [16]),
    ),
    "a prompt token that is trained": (
        Check.SAMPLED, f"{SECOND}.a0", lambda s: with_trained(s, 1, [0]),
    ),
    "another log-probability": (
        Check.SIDE_DATA, f"{FIRST}.a0",
        lambda s: with_sample(s, 0, logprobs=changed(s.entries[0].samples[0].logprobs, 1, -9)),
    ),
    "another version": (
        Check.SIDE_DATA, f"{FIRST}.a0",
        lambda s: with_sample(s, 0, versions=changed(s.entries[0].samples[0].versions, 1, 7)),
    ),
    "another target": (
        Check.SIDE_DATA, f"{FIRST}.a0",
        lambda s: with_sample(s, 0, token_ids=changed(s.entries[0].samples[0].token_ids, 1, 0)),
    ),
    "a sampled token left out": (Check.MASK, f"{FIRST}.a0", without_last),
    "a mismatch that was forgotten": (
        Check.MERGE, "g000003.0-0.a0", lambda s: with_entry(s, 6, mismatches=()),
    ),
    "turns that were not merged so": (
        Check.MERGE, f"{FIRST}.a0", lambda s: with_sample(s, 0, turns=(1,)),
    ),
    "evicted and trained": (
        Check.EVICTED, f"{FIRST}.a0", lambda s: with_entry(s, 0, reason=EvictionReason.MASKED),
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
    "of a version to come": (
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
        lambda s: with_sample(s, 0, advantages=changed(s.entries[0].samples[0].advantages, 3, 2)),
    ),
    "advantages that do not add up": (
        Check.ZERO_SUM, "g000000.0",
        lambda s: with_sample(s, 0, advantages=s.entries[0].samples[0].advantages * 2),
    ),
    "no log-probability at all": (Check.LOGPROBS, f"{FIRST}.a0", without_logprobs),
    "trained without a trained token": (Check.MASK, f"{FIRST}.a0", without_logprobs),
    "an entry that stands twice": (Check.ONCE, FIRST, with_again),
    "another attempt of a rollout": (
        Check.ONCE, FIRST,
        lambda s: with_again(s, trajectory=replace(s.entries[0].trajectory, attempt=1)),
    ),
    "an entry that stands twice where rewards are shaped": (
        Check.ONCE, FIRST, lambda s: shaped(with_again(s)),
    ),
    "a return in the baseline that is no number": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(s, 0, baseline_return=math.nan),
    ),
    "a shaped return in the baseline that is no number": (
        Check.BASELINE, f"{FIRST}.a0", lambda s: with_entry(shaped(s), 0, baseline_return=math.nan),
    ),
    "a return in the baseline beyond all bounds": (
        Check.BASELINE, "g000000.0", lambda s: with_entry(s, 0, baseline_return=1e308),
    ),
    "an advantage that is no number": (
        Check.ADVANTAGES, f"{FIRST}.a0",
        lambda s: with_sample(
            shaped(s), 0, advantages=changed(s.entries[0].samples[0].advantages, 3, np.nan)
        ),
    ),
    "advantages without an end": (
        Check.ADVANTAGES, f"{FIRST}.a0",
        lambda s: with_sample(
            s, 0,
            advantages=changed(
                changed(s.entries[0].samples[0].advantages, 0, np.inf), 1, -np.inf
            ),
        ),
    ),
    "evicted as zero variance with a signal": (
        Check.ADVANTAGES, "g000000.0",
        lambda s: with_entry(s, 0, reason=EvictionReason.ZERO_VARIANCE),
    ),
}  # fmt: skip
