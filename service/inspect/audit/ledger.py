"""The journal against the run's ledger: two records of one run, written by different parts.

The merge actor writes the journal before a step is trained, the supervisor the ledger's rows after
it. A step that the run has not recorded (it is in hand, or the run was cut short) is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from actors.journal.record import JournalStep, TrajectoryEntry
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from service.inspect.audit.offence import Check, Offence


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The newest that the ledger knows of a rollout. step: that finalised it."""

    kind: LedgerEventKind
    reason: EvictionReason | None = None
    step: int | None = None

    def __str__(self) -> str:
        if self.kind is LedgerEventKind.EVICTED:
            return f"evicted as {self.reason}"
        return "trained" if self.kind is LedgerEventKind.TRAINED else "still in flight"


def fates_of(events: Iterable[LedgerEvent]) -> dict[str, Fate]:
    """By rollout, of the events along the surviving lineage in their order."""
    return {
        event.rollout_id: Fate(kind=event.kind, reason=event.reason, step=event.step)
        for event in events
    }


def by_group(fates: Mapping[str, Fate]) -> dict[str, dict[str, Fate]]:
    """The admitted rollouts of each group."""
    groups: dict[str, dict[str, Fate]] = {}
    for rollout_id, fate in fates.items():
        groups.setdefault(rollout_id.rpartition("-")[0], {})[rollout_id] = fate
    return groups


def check_ledger(step: JournalStep, fates: Mapping[str, Fate]) -> Iterator[Offence]:
    """Each rollout of the step under the same verdict in both, none in one of them alone."""
    present = {entry.trajectory.rollout_id for entry in step.entries}
    for entry in step.entries:
        fate = fates.get(entry.trajectory.rollout_id)
        text = _disagreement(entry, fate, step=step.step)
        if text:
            name = entry.trajectory.trajectory_id
            yield Offence(check=Check.LEDGER, step=step.step, subject=name, text=text)
    for rollout_id, fate in fates.items():
        if fate.step == step.step and rollout_id not in present:
            text = f"{fate} in the ledger, and not in the step's journal"
            yield Offence(check=Check.LEDGER, step=step.step, subject=rollout_id, text=text)


def _disagreement(entry: TrajectoryEntry, fate: Fate | None, *, step: int) -> str:
    own = "trained" if entry.reason is None else f"evicted as {entry.reason.value}"
    if fate is None:
        return f"{own} in the journal, and the ledger never admitted it"
    # A step whose every update was refused as not finite is known only after the journal is.
    is_refused = fate.reason is EvictionReason.NONFINITE_STEP
    is_same = str(fate) == own or (entry.reason is None and is_refused)
    if not is_same:
        return f"{own} in the journal, {fate} in the ledger"
    if fate.step != step:
        return f"finalised by step {fate.step} in the ledger, by step {step} in the journal"
    return ""
