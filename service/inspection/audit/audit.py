"""Every check over every trajectory of a journal; what it found, as text and as an exit code.

Steps are read one after the other, so that memory does not grow with the run. Called by
`rayloom inspect --audit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.journal.record import JournalStep
from service.inspection.audit.groups import check_groups
from service.inspection.audit.ledger import by_group, check_ledger, fates_of
from service.inspection.audit.offence import Check, Offence
from service.inspection.audit.tokens import check_trajectory
from service.inspection.reader import OpenJournal

# What needs the run's database.
_WITH_LEDGER = frozenset({Check.ADMITTED, Check.LEDGER})
# What needs advantages that are a function of the group's returns alone.
_WITH_RULE = frozenset({Check.ADVANTAGES, Check.ZERO_SUM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """unchecked: why a check could not be made. missing_steps: recorded by the run, and without a
    file between the journal's first and last.
    """

    num_steps: int
    num_trajectories: int
    num_sampled: int
    num_trained: int
    offences: tuple[Offence, ...]
    unchecked: dict[Check, str]
    missing_steps: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        return all(offence.is_explained for offence in self.offences)


class _Auditor:
    """What is known over all steps."""

    def __init__(self, journal: OpenJournal) -> None:
        history = journal.history
        self._recorded = {record.step for record in history.steps} if history else set[int]()
        self._fates = fates_of(history.events) if history else None
        self._groups = by_group(self._fates) if self._fates is not None else None
        self._trained_at: dict[str, int] = {}

    def check(self, step: JournalStep) -> Iterator[Offence]:
        for entry in step.entries:
            yield from check_trajectory(step, entry)
            if entry.reason is None:
                yield from self._check_once(step, entry.trajectory.rollout_id)
        num_trained = sum(entry.num_trained for entry in step.entries)
        if num_trained != step.num_packed_trained:
            yield Offence(
                check=Check.PACKED,
                step=step.step,
                subject=f"step {step.step}",
                text=f"{step.num_packed_trained} trained tokens in the rows, {num_trained} handed "
                "out",
            )
        is_settled = step.step in self._recorded
        yield from check_groups(step, self._groups if is_settled else None)
        if self._fates is not None and is_settled:
            yield from check_ledger(step, self._fates)

    def _check_once(self, step: JournalStep, rollout_id: str) -> Iterator[Offence]:
        before = self._trained_at.setdefault(rollout_id, step.step)
        if before != step.step:
            text = f"trained in step {before} already"
            yield Offence(check=Check.ONCE, step=step.step, subject=rollout_id, text=text)


def audit(journal: OpenJournal) -> Audit:
    """Check a journal. Raises: ConfigError for a file that cannot be read."""
    auditor = _Auditor(journal)
    offences: list[Offence] = []
    num_trajectories = num_sampled = num_trained = 0
    has_rule = True
    for step in journal.steps():
        offences += auditor.check(step)
        num_trajectories += len(step.entries)
        num_sampled += sum(entry.trajectory.num_sampled for entry in step.entries)
        num_trained += sum(entry.num_trained for entry in step.entries)
        has_rule = has_rule and step.group_rule is not None
    unchecked: dict[Check, str] = {}
    if journal.history is None:
        unchecked |= dict.fromkeys(_WITH_LEDGER, "there is no rayloom.db beside the journal")
    if not has_rule:
        unchecked |= dict.fromkeys(_WITH_RULE, "not a function of the group's returns alone")
    return Audit(
        num_steps=len(journal.files),
        num_trajectories=num_trajectories,
        num_sampled=num_sampled,
        num_trained=num_trained,
        offences=tuple(offences),
        unchecked=unchecked,
        missing_steps=_missing(journal),
    )


def _missing(journal: OpenJournal) -> tuple[int, ...]:
    if journal.history is None or not journal.files:
        return ()
    present = {file.step for file in journal.files}
    first, last = min(present), max(present)
    recorded = [record.step for record in journal.history.steps]
    return tuple(step for step in recorded if first <= step <= last and step not in present)


def describe(result: Audit, *, limit: int) -> list[str]:
    """A line a check, its offenders below it. limit: offenders named of each; 0: all."""
    lines = [
        f"{result.num_steps} steps, {result.num_trajectories} trajectories, "
        f"{result.num_sampled} sampled tokens, {result.num_trained} trained"
    ]
    for check in Check:
        found = [offence for offence in result.offences if offence.check is check]
        lines += _of_check(check, found, result.unchecked.get(check), limit=limit)
    if result.missing_steps:
        steps = ", ".join(map(str, result.missing_steps[:8]))
        lines.append(f"  note   {len(result.missing_steps)} steps have no journal file: {steps}")
    num_offenders = sum(not offence.is_explained for offence in result.offences)
    lines.append("clean" if result.is_clean else f"{num_offenders} offenders")
    return lines


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
    lines += [f"           step {item.step}, {item.subject}: {item.text}" for item in named]
    if len(named) < len(found):
        lines.append(f"           and {len(found) - len(named)} more; --limit 0 names all")
    return lines
