"""Checks of one group: its statistics, computed again by plain loops.

Deliberately not the merge's own `group_advantages`: the formulas are written a second time, with
Python's sums, from the papers that docs/semantics.md names. A run whose advantages depend on more
than the group's returns (group_rule None) is checked for its baseline's members only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from actors.algorithm import Baseline, Scale
from actors.journal.record import GroupRule, JournalStep, TrajectoryEntry
from actors.limits import MAX_REWARD
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent
from service.inspect.audit.offence import Check, Offence

# Advantages are float32 in the batch; sums of rewards carry rounding.
_TOLERANCE = 1e-5
_EPSILON = 1e-6
_EQUAL = 1e-9
_WITHOUT_SIGNAL = (EvictionReason.ZERO_VARIANCE, EvictionReason.NEGATIVE_RETURN)


def check_groups(
    step: JournalStep, admitted: Mapping[str, Mapping[str, LedgerEvent]] | None
) -> Iterator[Offence]:
    """Check every group of a step. admitted: by group, the ledger's rollouts; None: not known."""
    groups: dict[str, list[TrajectoryEntry]] = {}
    for entry in step.entries:
        groups.setdefault(entry.trajectory.group_id, []).append(entry)
    for group_id, entries in groups.items():
        for check, text in _findings(entries, step.group_rule):
            yield Offence(check=check, step=step.step, subject=group_id, text=text)
        if admitted is not None:
            yield from _check_admitted(step, group_id, entries, admitted.get(group_id, {}))


def expected_advantages(returns: Sequence[float], rule: GroupRule) -> list[float] | None:
    """A_i = (r_i - b_i) / s by plain sums; None for a group without a signal.

    Example: [1, 0, 0, 0] with mean and std -> [1.499997, -.499999, -.499999, -.499999]
    """
    count, total = len(returns), math.fsum(returns)
    mean = total / count
    largest = max(abs(value) for value in returns)
    is_equal = max(returns) - min(returns) <= _EQUAL * max(1.0, largest)
    if is_equal and rule.baseline is not Baseline.NONE:
        return None
    if rule.scale is Scale.MEAN and min(returns) < 0:
        return None
    scale = 1.0
    if rule.scale is Scale.MEAN:
        scale = mean
    elif rule.scale is Scale.STD and not is_equal:
        spread = math.fsum((value - mean) ** 2 for value in returns) / (count - 1)
        scale = math.sqrt(spread) + _EPSILON
    if scale == 0:
        return None
    baselines = {
        Baseline.NONE: [0.0] * count,
        Baseline.MEAN: [mean] * count,
        Baseline.LEAVE_ONE_OUT: [(total - value) / max(count - 1, 1) for value in returns],
    }[rule.baseline]
    return [(value - base) / scale for value, base in zip(returns, baselines, strict=True)]


def _findings(
    entries: Sequence[TrajectoryEntry], rule: GroupRule | None
) -> Iterator[tuple[Check, str]]:
    returns = [entry.baseline_return for entry in entries if entry.baseline_return is not None]
    if rule is None or not returns:
        return
    # Written so that NaN is among them.
    bad = [value for value in returns if not abs(value) <= MAX_REWARD]
    if bad:
        text = f"a return of {bad[0]:g} is in the baseline, expected at most {MAX_REWARD:g} in size"
        yield Check.BASELINE, text
        return
    expected = expected_advantages(returns, rule)
    # By place, not by name: who stands twice counts twice.
    of_members = iter(expected or [0.0] * len(returns))
    wanted = [None if e.baseline_return is None else next(of_members) for e in entries]
    for entry, want in zip(entries, wanted, strict=True):
        yield from _check_member(entry, want or 0.0, rule, has_signal=expected is not None)
    members = [
        (entry, want) for entry, want in zip(entries, wanted, strict=True) if want is not None
    ]
    yield from _check_sum(members, rule)


def _check_member(
    entry: TrajectoryEntry, want: float, rule: GroupRule, *, has_signal: bool
) -> Iterator[tuple[Check, str]]:
    name = entry.trajectory.trajectory_id
    if entry.reason is None and not has_signal and not rule.trains_without_signal:
        yield Check.ADVANTAGES, f"{name} is trained, its group has no signal"
    if entry.reason in _WITHOUT_SIGNAL and has_signal:
        text = f"{name} is evicted as {entry.reason}, its group's returns give it an advantage"
        yield Check.ADVANTAGES, text
    if entry.reason is not None:
        return
    values = [value for of_sample in entry.advantages for value in of_sample.tolist()]
    wrong = [value for value in values if not _is_close(value, want)]
    if wrong:
        yield (
            Check.ADVANTAGES,
            f"{name} has {wrong[0]:.6g} on {len(wrong)} of {len(values)} tokens, the group's "
            f"returns give {want:.6g}",
        )


def _check_sum(
    members: Sequence[tuple[TrajectoryEntry, float]], rule: GroupRule
) -> Iterator[tuple[Check, str]]:
    """Holds for mean and leave-one-out, whatever the scale; who is not trained adds what the
    group's returns give it."""
    if rule.baseline is Baseline.NONE or all(e.reason is not None for e, _ in members):
        return
    values = [want if e.reason is not None else _first_advantage(e) for e, want in members]
    total = sum(values)
    is_small = abs(total) <= _TOLERANCE * max(1.0, sum(map(abs, values)))
    # Written so that NaN fails it.
    if not is_small:
        yield Check.ZERO_SUM, f"the advantages of {len(values)} members add up to {total:.6g}"


def _first_advantage(entry: TrajectoryEntry) -> float:
    values = [value for of_sample in entry.advantages for value in of_sample[:1].tolist()]
    return values[0] if values else 0.0


def _check_admitted(
    step: JournalStep,
    group_id: str,
    entries: Sequence[TrajectoryEntry],
    admitted: Mapping[str, LedgerEvent],
) -> Iterator[Offence]:
    """Check that every missing rollout left for a reason: the survivors form the group."""
    counted = {e.trajectory.rollout_id for e in entries if e.baseline_return is not None}
    missing = sorted(admitted.keys() - counted)
    if not missing or not counted:
        return
    reasons = {e.trajectory.rollout_id: e.reason for e in entries if e.reason is not None}
    why = {name: reasons.get(name) or admitted[name].reason for name in missing}
    shown = [f"{name} ({reason or 'no reason'})" for name, reason in why.items()]
    yield Offence(
        check=Check.ADMITTED,
        step=step.step,
        subject=group_id,
        text=f"{len(counted)} of {len(admitted)} admitted rollouts are in the statistics; missing: "
        f"{', '.join(shown[:4])}{', …' if len(shown) > 4 else ''}",
        is_explained=all(why.values()),
    )


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(1.0, abs(b))
