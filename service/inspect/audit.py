"""Audit a journal: check the invariants of every trajectory, group and step, and report the result.

Steps are read one after another, so that memory does not grow with the run. The command
`rayloom inspect --audit` uses this module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from actors.algorithm import Baseline, Scale
from actors.journal.files import GroupRule, JournalStep, TrajectoryEntry
from actors.limits import MAX_REWARD
from actors.policy_age import policy_ages
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from actors.types import NO_VERSION, Outcome, Sample
from service.config.file import ConfigError
from service.config.sections import RunSettings
from service.inspect.reader import OpenJournal, config_beside, is_refused, read_rows
from service.store.lineage import read_events, recorded_steps
from service.units import visible_text


class Check(StrEnum):
    """An invariant that the audit checks; the member's value is a sentence that states it."""

    LOGPROBS = "every sampled token has a finite log-probability"
    SAMPLED = "every trained token was sampled"
    HANDED_OUT = "each token in the loss has an advantage, and no other token has one"
    PACKED = "the packed rows train as many tokens as were handed out"
    MALFORMED = "no malformed trajectory has a positive reward"
    AGE = "no trained token is older than the policy-age bound"
    BASELINE = "a baseline has each member's return, capped or unchanged"
    ADVANTAGES = "advantages follow from the group's returns"
    ZERO_SUM = "the advantages of a group add up to 0"
    ADMITTED = "group statistics include every admitted rollout"
    LEDGER = "journal and ledger agree on the trained rollouts"
    BEGUN = "the run has begun every step"
    ONCE = "no rollout is trained twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offence:
    """A violation of an invariant that the audit has found.

    subject: name of the trajectory, group or step. is_explained: whether the violation has a known
    and allowed reason; it is then shown but does not fail the audit.
    """

    check: Check
    step: int
    subject: str
    text: str
    is_explained: bool = False


_NO_DATABASE = "there is no rayloom.db next to the journal"
_NO_RULE = "they do not depend only on the group's returns"
_SHAPED = "returns may be shaped; each is finite"
# The checks that need the run's database, and those that need advantages that depend only on
# returns.
_WITH_LEDGER = dict.fromkeys((Check.ADMITTED, Check.LEDGER, Check.BEGUN), _NO_DATABASE)
_WITH_RULE = dict.fromkeys((Check.ADVANTAGES, Check.ZERO_SUM), _NO_RULE) | {Check.BASELINE: _SHAPED}
# Number of steps that a note lists.
_MAX_NAMED_STEPS = 8
# Number of newest files whose steps may have no record: the current step, and the previous one
# while the engines load the version that the previous step made.
MAX_UNRECORDED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit.

    unchecked: the reason for each check that could not be made. missing_steps: recorded steps that
    should still have a journal file but have none. unrecorded_steps: steps that have a file, but
    are unfinished or were interrupted. refused_steps: steps that trained nothing because the
    trainer refused their updates.
    """

    num_steps: int
    num_trajectories: int
    num_sampled: int
    num_trained: int
    offences: tuple[Offence, ...]
    unchecked: dict[Check, str]
    missing_steps: tuple[int, ...] = ()
    unrecorded_steps: tuple[int, ...] = ()
    refused_steps: tuple[int, ...] = ()

    @property
    def is_clean(self) -> bool:
        return all(offence.is_explained for offence in self.offences)


def audit(journal: OpenJournal) -> Audit:
    """Check every step of a journal. Raises: ConfigError if a file cannot be read."""
    recorded, events = None, None
    if journal.run_dir is not None and journal.has_database:
        recorded = read_rows(journal.run_dir, recorded_steps)
        events = read_rows(journal.run_dir, read_events)
    auditor = _Auditor(journal, recorded or (), events)
    offences: list[Offence] = []
    num_trajectories = num_sampled = num_trained = 0
    refused: list[int] = []
    has_rule = True
    for step in journal.steps():
        offences += auditor.check(step)
        num_trajectories += len(step.entries)
        num_sampled += sum(entry.trajectory.num_sampled for entry in step.entries)
        kept = [entry for entry in step.entries if not is_refused(journal, entry)]
        num_trained += sum(entry.num_trained for entry in kept)
        if len(kept) < len(step.entries):
            refused.append(step.step)
        has_rule = has_rule and step.group_rule is not None
    present = [file.step for file in journal.files]
    missing: tuple[int, ...] = ()
    unrecorded: tuple[int, ...] = ()
    if recorded is not None:
        plan = _plan(journal)
        offences += steps_beyond(present, recorded, plan)
        missing = missing_steps(present, recorded, plan)
        unrecorded = tuple(sorted(set(present) - set(recorded)))
    return Audit(
        num_steps=len(journal.files),
        num_trajectories=num_trajectories,
        num_sampled=num_sampled,
        num_trained=num_trained,
        offences=tuple(offences),
        unchecked=({} if recorded is not None else _WITH_LEDGER) | ({} if has_rule else _WITH_RULE),
        missing_steps=missing,
        unrecorded_steps=unrecorded,
        refused_steps=tuple(refused),
    )


class _Auditor:
    """Checks steps of a journal against the steps and the ledger events in the run's database."""

    def __init__(
        self, journal: OpenJournal, recorded: Iterable[int], events: Sequence[LedgerEvent] | None
    ) -> None:
        self._journal = journal
        self._recorded = set(recorded)
        # Each rollout's newest event: the events are in order.
        self._newest = None if events is None else {each.rollout_id: each for each in events}
        self._groups = by_group(self._newest) if self._newest is not None else None
        self._trained_at: dict[str, int] = {}

    def check(self, step: JournalStep) -> Iterator[Offence]:
        for entry in step.entries:
            for offence in check_trajectory(step, entry):
                # An advantage that is not finite may be why the update was refused.
                is_why = offence.check is Check.ADVANTAGES and is_refused(self._journal, entry)
                yield replace(offence, is_explained=is_why)
        yield from self._check_once(step)
        num_trained = sum(entry.num_trained for entry in step.entries)
        if num_trained != step.num_packed_trained:
            yield Offence(
                check=Check.PACKED,
                step=step.step,
                subject=f"step {step.step}",
                text=f"the rows train {step.num_packed_trained} tokens, expected the {num_trained} "
                "that were handed out",
            )
        is_recorded = step.step in self._recorded
        yield from check_groups(step, self._groups if is_recorded else None)
        if self._newest is not None and is_recorded:
            yield from check_ledger(step, self._newest)

    def _check_once(self, step: JournalStep) -> Iterator[Offence]:
        times = Counter(entry.trajectory.rollout_id for entry in step.entries)
        trained = {e.trajectory.rollout_id for e in step.entries if e.reason is None}
        for rollout_id, count in times.items():
            before = self._trained_at.get(rollout_id)
            if before is not None:
                yield _once(step, rollout_id, f"trained in step {before} already")
            if count > 1:
                yield _once(step, rollout_id, f"is in the step {count} times")
        self._trained_at |= dict.fromkeys(trained, step.step)


def _once(step: JournalStep, rollout_id: str, text: str) -> Offence:
    return Offence(check=Check.ONCE, step=step.step, subject=rollout_id, text=text)


def check_trajectory(step: JournalStep, entry: TrajectoryEntry) -> Iterator[Offence]:
    """Yield the violations of the invariants that concern a single trajectory."""
    name = entry.trajectory.trajectory_id
    for check, text in _tokens_findings(step, entry):
        yield Offence(check=check, step=step.step, subject=name, text=text)


def _tokens_findings(step: JournalStep, entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
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
                f"turn {turn.index}: {missing.size} of {turn.num_sampled} sampled tokens have "
                f"none, the first is number {missing[0]}",
            )
    unsampled = np.flatnonzero((mask == 1) & ~is_sampled)
    if unsampled.size:
        yield (
            Check.SAMPLED,
            f"{unsampled.size} tokens are to be trained but were not sampled, the first at "
            f"position {unsampled[0]}",
        )


def _check_handed_out(entry: TrajectoryEntry) -> Iterator[tuple[Check, str]]:
    if entry.reason is not None:
        if entry.num_trained:
            reason = entry.reason.value
            text = f"evicted as {reason}, with {entry.num_trained} trained tokens"
            yield Check.HANDED_OUT, text
        return
    if not entry.num_trained:
        yield Check.HANDED_OUT, "recorded as trained, but without a trained token"
    expected = [sample.num_trained for sample in entry.trajectory.samples]
    found = [int(of_sample.shape[0]) for of_sample in entry.advantages]
    if found != expected:
        yield Check.HANDED_OUT, f"samples with {found} advantages, expected {expected}"
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
        yield Check.BASELINE, "trained, but not in its group's baseline"
    if brought is not None and not math.isfinite(brought):
        yield Check.BASELINE, f"counts as {brought:g} in the baseline, expected a finite number"
    elif not is_shaped and brought is not None and brought not in (value, min(value, 0.0)):
        lowest = worst_completed()
        if brought != min(value, 0.0, lowest):
            yield (
                Check.BASELINE,
                f"counts as {brought:g} in the baseline, its return is {value:g}; expected that "
                f"return, or the return capped at {min(0.0, lowest):g} (0, or the worst completed "
                "return of its group)",
            )


def _worst_completed(step: JournalStep, group: int) -> float:
    returns = [
        entry.trajectory.episode_return
        for entry in step.entries
        if entry.trajectory.group_number == group
        and entry.trajectory.outcome is Outcome.COMPLETED
        # Leave out an entry that does not fit the model. It has a `problem`; an entry without a
        # trained token has none.
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
            f"{bad.size} trained tokens are not 0 to {step.max_policy_age} versions older than the "
            f"trainer's version {step.trainer_version}; the worst is {worst}",
        )


# Advantages are float32 in the batch; sums of rewards carry rounding.
_TOLERANCE = 1e-5
_EPSILON = 1e-6
_EQUAL = 1e-9
_WITHOUT_SIGNAL = (EvictionReason.ZERO_VARIANCE, EvictionReason.NEGATIVE_RETURN)


def check_groups(
    step: JournalStep, admitted: Mapping[str, Mapping[str, LedgerEvent]] | None
) -> Iterator[Offence]:
    """Check the groups of a step, and yield each violation of an invariant that concerns a group.

    admitted: by group id, the newest event of each rollout; None if the ledger is not known.
    """
    groups: dict[str, list[TrajectoryEntry]] = {}
    for entry in step.entries:
        groups.setdefault(entry.trajectory.group_id, []).append(entry)
    for group_id, entries in groups.items():
        for check, text in _findings(entries, step.group_rule):
            yield Offence(check=check, step=step.step, subject=group_id, text=text)
        if admitted is not None:
            yield from _check_admitted(step, group_id, entries, admitted.get(group_id, {}))


def expected_advantages(returns: Sequence[float], rule: GroupRule) -> list[float] | None:
    """Return a group's advantages (return - baseline) / scale; None without a learning signal.

    The audit computes them with plain sums, independently of the code that trains.

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
    # The condition is written so that NaN is also bad.
    bad = [value for value in returns if not abs(value) <= MAX_REWARD]
    if bad:
        text = f"a return of {bad[0]:g} is in the baseline, expected at most {MAX_REWARD:g} in size"
        yield Check.BASELINE, text
        return
    expected = expected_advantages(returns, rule)
    # By position, not by name: a member that is listed twice counts twice.
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
        yield Check.ADVANTAGES, f"{name} is trained, but its group has no learning signal"
    if entry.reason in _WITHOUT_SIGNAL and has_signal:
        text = f"{name} is evicted as {entry.reason}, but its group's returns give it an advantage"
        yield Check.ADVANTAGES, text
    if entry.reason is not None:
        return
    values = [value for of_sample in entry.advantages for value in of_sample.tolist()]
    wrong = [value for value in values if not _is_close(value, want)]
    if wrong:
        yield (
            Check.ADVANTAGES,
            f"{name} has the advantage {wrong[0]:.6g} on {len(wrong)} of {len(values)} tokens, "
            f"expected {want:.6g} from the group's returns",
        )


def _check_sum(
    members: Sequence[tuple[TrajectoryEntry, float]], rule: GroupRule
) -> Iterator[tuple[Check, str]]:
    """Yield a problem if a group has a baseline but its advantages do not add up to 0.

    members: each with its expected advantage, which counts if the member was not trained.
    """
    if rule.baseline is Baseline.NONE or all(e.reason is not None for e, _ in members):
        return
    values = [want if e.reason is not None else _first_advantage(e) for e, want in members]
    # With the baselines mean and leave-one-out the sum is 0, whatever the scale.
    total = sum(values)
    is_small = abs(total) <= _TOLERANCE * max(1.0, sum(map(abs, values)))
    # This comparison is false for NaN, so that NaN is an offence.
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
    """Yield a violation if admitted rollouts are missing from a group's baseline.

    The violation is allowed (`is_explained`) if each missing rollout has a reason.
    admitted: the newest ledger event of each admitted rollout of the group.
    """
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
        text=f"{len(counted)} of {len(admitted)} admitted rollouts are in the baseline; missing: "
        f"{', '.join(shown[:4])}{', …' if len(shown) > 4 else ''}",
        is_explained=all(why.values()),
    )


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(1.0, abs(b))


def by_group(newest: Mapping[str, LedgerEvent]) -> dict[str, dict[str, LedgerEvent]]:
    """Return the events in `newest` by group id and rollout id. newest: events by rollout id."""
    groups: dict[str, dict[str, LedgerEvent]] = {}
    for rollout_id, event in newest.items():
        groups.setdefault(rollout_id.rpartition("-")[0], {})[rollout_id] = event
    return groups


def check_ledger(step: JournalStep, newest: Mapping[str, LedgerEvent]) -> Iterator[Offence]:
    """Yield a violation for each rollout of the step for which journal and ledger disagree.

    Args: newest: the newest ledger event of each rollout, by rollout id.
    """
    present = {entry.trajectory.rollout_id for entry in step.entries}
    for entry in step.entries:
        event = newest.get(entry.trajectory.rollout_id)
        text = _disagreement(entry, event, step=step.step)
        if text:
            name = entry.trajectory.trajectory_id
            yield Offence(check=Check.LEDGER, step=step.step, subject=name, text=text)
    for rollout_id, event in newest.items():
        if event.step == step.step and rollout_id not in present:
            text = f"{_exit(event)} in the ledger, but not in the step's journal"
            yield Offence(check=Check.LEDGER, step=step.step, subject=rollout_id, text=text)


def _disagreement(entry: TrajectoryEntry, event: LedgerEvent | None, *, step: int) -> str:
    own = "trained" if entry.reason is None else f"evicted as {entry.reason.value}"
    if event is None:
        return f"{own} in the journal, but not admitted in the ledger"
    # The journal is written before the trainer refuses all updates of a step as not finite.
    is_refused = event.reason is EvictionReason.NONFINITE_STEP
    is_same = _exit(event) == own or (entry.reason is None and is_refused)
    if not is_same:
        return f"{own} in the journal, {_exit(event)} in the ledger"
    if event.step != step:
        return f"finalised by step {event.step} in the ledger, by step {step} in the journal"
    return ""


def _exit(event: LedgerEvent) -> str:
    if event.kind is LedgerEventKind.EVICTED:
        return f"evicted as {event.reason}"
    return "trained" if event.kind is LedgerEventKind.TRAINED else "still in flight"


def _plan(journal: OpenJournal) -> RunSettings | None:
    """Return the section `run` of the run's configuration; None if it cannot be read."""
    try:
        return config_beside(journal.run_dir).run if journal.run_dir else None
    except ConfigError:
        return None


def missing_steps(
    present: Sequence[int], recorded: Sequence[int], plan: RunSettings | None
) -> tuple[int, ...]:
    """Return the recorded steps that should have a journal file but have none.

    recorded: steps in the database. plan: says how many journal files are kept; None if unknown.
    Example: of steps 1 to 4, the files of the newest three are kept; present [3] -> (2, 4)
    """
    first, last = min(present), max(present)
    if plan is not None and plan.journal_steps:
        last = max(last, *recorded) if recorded else last
        first = last - plan.journal_steps + 1
    found = set(present)
    return tuple(step for step in recorded if first <= step <= last and step not in found)


def steps_beyond(
    present: Sequence[int], recorded: Sequence[int], plan: RunSettings | None
) -> Iterator[Offence]:
    """Yield a violation for each journal file of a step that the run cannot have begun yet."""
    newest = max(recorded, default=0)
    bound = newest + MAX_UNRECORDED
    if plan is not None:
        # If run.steps was lowered, the recorded steps are done nevertheless.
        bound = min(bound, max(plan.steps, newest))
    for step in present:
        if step > bound:
            yield Offence(
                check=Check.BEGUN,
                step=step,
                subject=f"step {step}",
                text=f"the run has recorded steps up to {newest}, and cannot have begun one after "
                f"{bound}",
            )


def describe(result: Audit, *, limit: int) -> list[str]:
    """Return the result of an audit as lines: one for each check, followed by its violations.

    Args: limit: maximum number of violations to list for a check; 0 for all.
    """
    lines = [
        f"{result.num_steps} steps, {result.num_trajectories} trajectories, "
        f"{result.num_sampled} sampled tokens, {result.num_trained} trained"
    ]
    for check in Check:
        found = [offence for offence in result.offences if offence.check is check]
        lines += _of_check(check, found, result.unchecked.get(check), limit=limit)
    lines += _note(result.missing_steps, "recorded by the run and without a journal file")
    lines += _note(result.unrecorded_steps, "not recorded by the run, so not counted")
    lines += _note(result.refused_steps, "handed out, whose update was not finite and was refused")
    num_offenders = sum(not offence.is_explained for offence in result.offences)
    lines.append("clean" if result.is_clean else f"{num_offenders} offenders")
    return lines


def _note(steps: Sequence[int], what: str) -> Iterable[str]:
    if steps:
        named = ", ".join(map(str, steps[:_MAX_NAMED_STEPS]))
        rest = ", …" if len(steps) > _MAX_NAMED_STEPS else ""
        noun = "step" if len(steps) == 1 else "steps"
        yield f"  note   {len(steps)} {noun} {what}: {named}{rest}"


def _of_check(
    check: Check, found: Sequence[Offence], why_not: str | None, *, limit: int
) -> list[str]:
    if why_not is not None and not found:
        return [f"  -      {check.value}: not checked, {why_not}"]
    wrong = sum(not offence.is_explained for offence in found)
    if wrong:
        lines = [f"  WRONG  {check.value}: {wrong} offenders"]
    elif found:
        lines = [f"  note   {check.value}: {len(found)} that the rules allow"]
    else:
        return [f"  ok     {check.value}"]
    ordered = sorted(found, key=lambda offence: offence.is_explained)
    named = ordered[:limit] if limit else ordered
    lines += [
        visible_text(f"           step {item.step}, {item.subject}: {item.text}") for item in named
    ]
    if len(named) < len(found):
        lines.append(f"           and {len(found) - len(named)} more; --limit 0 names all")
    return lines
