"""Checks of one trajectory: its raw turns against what the trainer was handed.

Independent of the merge: the plain loop of `sampled.py` says which token was sampled, because a
fault of the merge would repeat itself in its own recomputation. `check_merge` alone runs the
merge's own functions again: it proves that the record belongs to these turns and this merge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from actors.journal.record import JournalStep, SampleEntry, TrajectoryEntry
from actors.merge.prefix import find_misalignment, merge_turns
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory
from service.inspect.audit.offence import Check, Offence
from service.inspect.sampled import Origin, origins, turn_origins


def check_trajectory(step: JournalStep, entry: TrajectoryEntry) -> Iterator[Offence]:
    """Every check of one trajectory."""
    name = entry.trajectory.trajectory_id
    for check, text in _findings(step, entry):
        yield Offence(check=check, step=step.step, subject=name, text=text)


def _findings(step: JournalStep, entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    trajectory = entry.trajectory
    yield from _check_turns(trajectory)
    yield from _check_rewards(entry, is_shaped=step.group_rule is None)
    found = [_placed(trajectory, sample) for sample in entry.samples]
    if entry.reason is not None and entry.num_trained:
        reason = entry.reason.value
        yield Check.EVICTED, f"evicted as {reason}, with {entry.num_trained} trained tokens"
    for number, (sample, placed) in enumerate(zip(entry.samples, found, strict=True)):
        for check, text in _check_sample(sample, placed):
            yield check, f"sample {number}: {text}"
    if entry.reason is None:
        yield from _check_mask(entry, found)
    yield from _check_age(step, entry)
    yield from check_merge(entry)


def _check_turns(trajectory: Trajectory) -> Iterator[tuple[Check, str]]:
    for index, turn in enumerate(trajectory.turns):
        own = turn_origins(turn, index)
        missing = [origin.offset for origin in own if not _is_finite(origin.logprob)]
        if missing:
            yield (
                Check.LOGPROBS,
                f"turn {index}: {len(missing)} of {len(own)} sampled tokens, the first is number "
                f"{missing[0]}",
            )
        extra = turn.logprobs.shape[0] - turn.num_sampled
        if extra > 0:
            yield Check.LOGPROBS, f"turn {index}: {extra} log-probabilities too many"
        uncovered = [origin.offset for origin in own if origin.version is None]
        beyond = [span for span in turn.version_spans if span.start < 0 or span.end > len(own)]
        if uncovered or beyond:
            yield (
                Check.SPANS,
                f"turn {index}: {len(uncovered)} sampled tokens under no span or several, "
                f"{len(beyond)} spans outside the {len(own)} sampled tokens",
            )


def _check_rewards(entry: TrajectoryEntry, *, is_shaped: bool) -> Iterator[tuple[Check, str]]:
    trajectory = entry.trajectory
    value = trajectory.episode_return
    if trajectory.outcome is Outcome.MALFORMED_TOOL_CALL and value > 0:
        yield Check.MALFORMED, f"ended as {trajectory.outcome.value} with a return of {value:g}"
    for index, turn in enumerate(trajectory.turns):
        if turn.is_malformed and turn.reward > 0:
            yield Check.MALFORMED, f"turn {index} is malformed and has a reward of {turn.reward:g}"
    brought = entry.baseline_return
    if entry.reason is None and brought is None:
        yield Check.BASELINE, "trained, and not in its group's baseline"
    if brought is not None and not math.isfinite(brought):
        yield Check.BASELINE, f"brought {brought:g} to the baseline, expected a finite number"
    elif not is_shaped and brought is not None and brought not in (value, min(value, 0.0)):
        yield (
            Check.BASELINE,
            f"brought {brought:g} to the baseline, its return is {value:g}; expected that, or at "
            "most 0",
        )


def _placed(trajectory: Trajectory, sample: SampleEntry) -> dict[int, Origin]:
    """Which sampled token stands where in a sample; nothing for one that names no turns."""
    if not sample.turns or not all(0 <= turn < len(trajectory.turns) for turn in sample.turns):
        return {}
    last = trajectory.turns[sample.turns[-1]]
    full = np.concatenate([last.prompt_token_ids, last.sampled_token_ids])
    found, faults = origins(trajectory, sample.turns, full)
    return {} if faults else found


def _check_sample(sample: SampleEntry, placed: dict[int, Origin]) -> Iterator[tuple[Check, str]]:
    positions = sample.positions.tolist()
    strangers = [position for position in positions if position not in placed]
    if strangers:
        yield (
            Check.SAMPLED,
            f"{len(strangers)} trained tokens that nobody sampled, the first at {strangers[0]}",
        )
    given = zip(
        positions,
        sample.token_ids.tolist(),
        sample.logprobs.tolist(),
        sample.versions.tolist(),
        strict=True,
    )
    wrong = [
        position
        for position, *side in given
        if (origin := placed.get(position)) is not None
        and tuple(side) != (origin.token_id, origin.logprob, origin.version)
    ]
    if wrong:
        yield Check.SIDE_DATA, f"{len(wrong)} trained tokens differ, the first at {wrong[0]}"
    num_bad = int(np.count_nonzero(~np.isfinite(sample.advantages)))
    if num_bad:
        yield Check.ADVANTAGES, f"{num_bad} trained tokens have an advantage that is not finite"


def _check_mask(
    entry: TrajectoryEntry, found: list[dict[int, Origin]]
) -> Iterator[tuple[Check, str]]:
    times = Counter(
        (origin.turn, origin.offset)
        for sample, placed in zip(entry.samples, found, strict=True)
        for position in sample.positions.tolist()
        if (origin := placed.get(position)) is not None
    )
    expected = {
        (origin.turn, origin.offset)
        for index, turn in enumerate(entry.trajectory.turns)
        for origin in turn_origins(turn, index)
        if _is_finite(origin.logprob)
    }
    if not entry.num_trained:
        yield Check.MASK, "trained, and without a trained token"
    elif (
        entry.num_trained != len(expected)
        or times.keys() != expected
        or max(times.values(), default=0) > 1
    ):
        left_out = len(expected - times.keys())
        yield (
            Check.MASK,
            f"{entry.num_trained} trained tokens, expected the {len(expected)} sampled ones with a "
            f"log-probability; {left_out} are left out",
        )


def _check_age(step: JournalStep, entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    ages = [step.trainer_version - v for each in entry.samples for v in each.versions.tolist()]
    bad = [age for age in ages if not 0 <= age <= step.max_policy_age]
    if bad:
        worst = max(bad, key=abs)
        yield (
            Check.AGE,
            f"{len(bad)} trained tokens outside 0 to {step.max_policy_age} versions behind the "
            f"trainer's {step.trainer_version}; the worst is {worst}",
        )


def check_merge(entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    """By the merge's own functions."""
    # Without its lineage: what the source said of it is what is to be checked.
    trajectory = replace(entry.trajectory, lineage=None)
    reason = find_misalignment(trajectory)
    if reason is not None:
        if entry.reason is not EvictionReason.TOKEN_MISALIGNED or entry.samples:
            yield Check.MERGE, f"its turns do not fit together ({reason}), and it was not put aside"
        return
    merged = merge_turns(trajectory)
    expected = [(each.turns, each.prompt_length, each.num_tokens) for each in merged.samples]
    got = [(each.turns, each.prompt_length, each.num_tokens) for each in entry.samples]
    if got != expected:
        yield Check.MERGE, f"{len(got)} samples of turns {_turns(got)}, expected {_turns(expected)}"
    if merged.mismatches != entry.mismatches:
        yield (
            Check.MERGE,
            f"{len(entry.mismatches)} mismatches recorded, expected {len(merged.mismatches)}, with "
            "turn, position and kind",
        )
    if entry.reason is not None or got != expected:
        return
    for number, (each, own) in enumerate(zip(entry.samples, merged.samples, strict=True)):
        if not np.array_equal(each.positions, np.flatnonzero(own.mask)):
            yield (
                Check.MERGE,
                f"sample {number}: the merge's mask says other tokens",
            )


def _turns(samples: list[tuple[tuple[int, ...], int, int]]) -> str:
    return " and ".join(str(list(turns)) for turns, _, _ in samples) or "none"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
