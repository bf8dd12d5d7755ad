"""The journal against the run's ledger: two records of one run, written by different parts.

The merge actor writes the journal before a step is trained, the supervisor the ledger's rows after
it. A step that the run has not recorded (it is unfinished, or the run was interrupted) is not
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from service.inspect.audit.offence import Check, Offence


def by_group(newest: Mapping[str, LedgerEvent]) -> dict[str, dict[str, LedgerEvent]]:
    """Return the admitted rollouts of each group. newest: each rollout's newest event."""
    groups: dict[str, dict[str, LedgerEvent]] = {}
    for rollout_id, event in newest.items():
        groups.setdefault(rollout_id.rpartition("-")[0], {})[rollout_id] = event
    return groups


def check_ledger(step: JournalStep, newest: Mapping[str, LedgerEvent]) -> Iterator[Offence]:
    """Check that each rollout of the step left in the same way in both, and none is in only one.

    newest: each rollout's newest event in the ledger.
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
            text = f"{_exit(event)} in the ledger, and not in the step's journal"
            yield Offence(check=Check.LEDGER, step=step.step, subject=rollout_id, text=text)


def _disagreement(entry: TrajectoryEntry, event: LedgerEvent | None, *, step: int) -> str:
    own = "trained" if entry.reason is None else f"evicted as {entry.reason.value}"
    if event is None:
        return f"{own} in the journal, and the ledger never admitted it"
    # A step whose every update was refused as not finite is known only after the journal is.
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
