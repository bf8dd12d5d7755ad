"""Every check over every trajectory of a journal; what it found, as text and as an exit code.

Steps are read one after the other, so that memory does not grow with the run. Called by
`rayloom inspect --audit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.journal.record import JournalStep
from service.config.file import ConfigError
from service.inspect.audit.groups import check_groups
from service.inspect.audit.ledger import by_group, check_ledger
from service.inspect.audit.offence import Check, Offence
from service.inspect.audit.steps import Plan, missing_steps, steps_beyond
from service.inspect.audit.tokens import check_trajectory
from service.inspect.reader import OpenJournal, config_beside, is_refused
from service.inspect.surviving import Recorded, read_recorded
from service.visible import visible_text

_NO_DATABASE = "there is no rayloom.db beside the journal"
_NO_RULE = "not a function of the group's returns alone"
_SHAPED = "returns may be shaped; each is finite"
# The checks that need the run's database, and those that need advantages that depend only on
# returns.
_WITH_LEDGER = dict.fromkeys((Check.ADMITTED, Check.LEDGER, Check.BEGUN), _NO_DATABASE)
_WITH_RULE = dict.fromkeys((Check.ADVANTAGES, Check.ZERO_SUM), _NO_RULE) | {Check.BASELINE: _SHAPED}
# Steps that a note names.
_MAX_NAMED_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit.

    unchecked: why a check could not be made. missing_steps: recorded by the run and to be kept, but
    without a file. unrecorded_steps: with a file, but unfinished or interrupted. refused_steps:
    those whose update the trainer refused; nothing of them counts as trained.
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


class _Auditor:
    """The facts that are collected over all steps."""

    def __init__(self, journal: OpenJournal, recorded: Recorded | None) -> None:
        self._journal = journal
        self._recorded = set(recorded.steps) if recorded else set[int]()
        # Each rollout's newest event: the events are in order.
        self._newest = {each.rollout_id: each for each in recorded.events} if recorded else None
        self._groups = by_group(self._newest) if self._newest is not None else None
        self._trained_at: dict[str, int] = {}

    def check(self, step: JournalStep) -> Iterator[Offence]:
        for entry in step.entries:
            for offence in check_trajectory(step, entry):
                # An advantage that is no number may be why the update was refused.
                is_why = offence.check is Check.ADVANTAGES and is_refused(self._journal, entry)
                yield replace(offence, is_explained=is_why)
        yield from self._check_once(step)
        num_trained = sum(entry.num_trained for entry in step.entries)
        if num_trained != step.num_packed_trained:
            yield Offence(
                check=Check.PACKED,
                step=step.step,
                subject=f"step {step.step}",
                text=f"{step.num_packed_trained} trained tokens in the rows, {num_trained} handed "
                "out",
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
                yield _once(step, rollout_id, f"stands {count} times in the step")
        self._trained_at |= dict.fromkeys(trained, step.step)


def _once(step: JournalStep, rollout_id: str, text: str) -> Offence:
    return Offence(check=Check.ONCE, step=step.step, subject=rollout_id, text=text)


def audit(journal: OpenJournal) -> Audit:
    """Check a journal. Raises: ConfigError for a file that cannot be read."""
    recorded = None
    if journal.run_dir is not None and journal.has_database:
        recorded = read_recorded(journal.run_dir)
    auditor = _Auditor(journal, recorded)
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
        offences += steps_beyond(present, recorded.steps, plan)
        missing = missing_steps(present, recorded.steps, plan)
        unrecorded = tuple(sorted(set(present) - set(recorded.steps)))
    return Audit(
        num_steps=len(journal.files),
        num_trajectories=num_trajectories,
        num_sampled=num_sampled,
        num_trained=num_trained,
        offences=tuple(offences),
        unchecked=({} if recorded else _WITH_LEDGER) | ({} if has_rule else _WITH_RULE),
        missing_steps=missing,
        unrecorded_steps=unrecorded,
        refused_steps=tuple(refused),
    )


def _plan(journal: OpenJournal) -> Plan | None:
    try:
        run = config_beside(journal.run_dir).run if journal.run_dir else None
    except ConfigError:
        return None
    return None if run is None else Plan(steps=run.steps, keep_steps=run.journal_steps)


def describe(result: Audit, *, limit: int) -> list[str]:
    """Return a line for each check, with its offenders after it. limit: most offenders; 0: all."""
    lines = [
        f"{result.num_steps} steps, {result.num_trajectories} trajectories, "
        f"{result.num_sampled} sampled tokens, {result.num_trained} trained"
    ]
    for check in Check:
        found = [offence for offence in result.offences if offence.check is check]
        lines += _of_check(check, found, result.unchecked.get(check), limit=limit)
    lines += _note(result.missing_steps, "recorded by the run and without a journal file")
    lines += _note(result.unrecorded_steps, "not recorded by the run, so not held against it")
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
