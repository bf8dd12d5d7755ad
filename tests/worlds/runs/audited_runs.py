"""A run directory as the audit reads it: a journal, and the ledger's rows in the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actors.journal.files import JournalStep
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from service.inspect.audit import Audit, audit
from service.inspect.reader import open_journal
from service.launch.run_dir import RunDir
from service.store.run_store import RunStore
from worlds.builders.journal_builders import written
from worlds.builders.record_builders import step_record


def audited(run_dir: Path, *steps: JournalStep) -> Audit:
    return audit(open_journal(written(run_dir, *steps)))


def rows_of(step: JournalStep) -> list[LedgerEvent]:
    """Return the ledger's rows of a step that was finalised as its journal says."""
    kind = LedgerEventKind.ADMITTED
    admitted = [
        LedgerEvent(seq=0, rollout_id=entry.trajectory.rollout_id, kind=kind)
        for entry in step.entries
    ]
    left = [
        LedgerEvent(
            seq=0,
            rollout_id=entry.trajectory.rollout_id,
            kind=LedgerEventKind.EVICTED if entry.reason else LedgerEventKind.TRAINED,
            reason=entry.reason,
            step=step.step,
        )
        for entry in step.entries
    ]
    return [*admitted, *left]


def stored(run_dir: Path, rows: Sequence[LedgerEvent], *, steps: Sequence[int] = (1,)) -> None:
    """Write the run's database with these rows, as a supervisor writes them."""
    run_dir.mkdir(exist_ok=True)
    store = RunStore(RunDir(path=run_dir).database_url)
    store.acquire_lease(owner="test")
    events = [replace(row, seq=seq) for seq, row in enumerate(rows)]
    for step in steps:
        store.add_step(step_record(step), term=1, new_events=events if step == steps[0] else ())
    store.close()
