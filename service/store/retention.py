"""Retention of a run's rows: those that a resume, the report, the API and `inspect` still need.

Called after each committed checkpoint, in one fenced transaction. Sums are kept incrementally
(`service.telemetry.totals`), so that no sum changes when rows leave.

- Superseded rows leave at once.
- Queue snapshots are kept of the newest `run.keep_checkpoints` and the best `run.keep_best`
  checkpoints: a run can go back only to these.
- Step records: the first 5, the newest 256 or as many as the journal and the newest kept
  checkpoints reach back, those of the best, and of the older ones the first of each 2^k steps, with
  the smallest k that leaves at most 257. The same holds for evaluations.
- Ledger events: those after the earliest step that a kept checkpoint (including the best) can go
back to, and those of the journal's steps, which `inspect --audit` compares with them. The window
admits no group earlier than the bound on the policy's age allows, so the journal's events were
written after the step that is that many versions earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Table, delete, func, not_, select, update

from service.store import tables
from service.store.lineage import Checkpoint, Span, surviving_spans, within
from service.store.run_store import RunStore
from service.telemetry.summary import AVERAGED_STEPS

WHOLE_STEPS = 256
OLDER_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention settings of the run's configuration."""

    journal_steps: int
    """Newest steps whose trajectories `inspect` can show."""
    max_policy_age: int
    """Versions."""
    keep_checkpoints: int
    """How many of the kept checkpoints are kept because they are the newest."""


def forget(store: RunStore, *, term: int, kept: Sequence[Checkpoint], retention: Retention) -> None:
    """Remove the rows that nothing needs any more.

    kept: the checkpoints that the run can go back to from here on, newest first, at least one; the
    newest is of this term.
    Raises: LeaseLost, StoreError.
    """
    newest, oldest = kept[0].step, kept[-1].step
    oldest_new = kept[: retention.keep_checkpoints][-1].step
    journalled = newest - retention.journal_steps

    def remove(connection: Connection) -> None:
        _forget_superseded(connection, surviving_spans(connection))
        _forget_snapshots(connection, [commit.id for commit in kept])
        last_thinned = min(oldest_new, journalled, newest - WHOLE_STEPS)
        for table in (tables.steps, tables.evaluations):
            _thin(connection, table, last_step=last_thinned, spared=[each.step for each in kept])
        _forget_events(connection, last_step=min(oldest, journalled) - retention.max_policy_age - 1)

    store.write(term, remove)


def _forget_superseded(connection: Connection, spans: Sequence[Span]) -> None:
    ends = {span.term: span for span in spans}
    for table in (tables.steps, tables.evaluations, tables.events, tables.bindings, tables.results):
        column = table.c.term
        for term in connection.scalars(select(column).distinct()).all():
            rows = delete(table).where(column == term)
            if (span := ends.get(term)) is None:
                connection.execute(rows)
            elif table not in (tables.bindings, tables.results) and span.last_step is not None:
                connection.execute(rows.where(not_(within(table.c, span))))


def _forget_snapshots(connection: Connection, kept: Sequence[int]) -> None:
    """Forget queue snapshots. A row that a term continued from stays, because it shows the lineage.

    kept: ids.
    """
    table, leases = tables.checkpoints, tables.leases.c
    others = table.c.id.not_in(kept)
    joints = select(leases.parent_checkpoint).where(leases.parent_checkpoint.is_not(None))
    connection.execute(delete(table).where(others, table.c.id.not_in(joints)))
    connection.execute(
        update(table)
        .where(others, table.c.queue_snapshot.is_not(None))
        .values(queue_snapshot=None, totals=None, curriculum=None)
    )


def _thin(connection: Connection, table: Table, *, last_step: int, spared: Sequence[int]) -> None:
    """Keep the first five steps, and the first row of each 2^k steps up to last_step.

    spared: steps that stay as well.
    """
    stride, step = 1, table.c.step
    while last_step // stride > OLDER_STEPS:
        stride *= 2
    if stride == 1:
        return
    firsts = select(func.min(step)).where(step <= last_step).group_by(step // stride)
    connection.execute(
        delete(table).where(
            step > AVERAGED_STEPS,
            step <= last_step,
            step.not_in(firsts),
            step.not_in(spared),
        )
    )


def _forget_events(connection: Connection, *, last_step: int) -> None:
    """Forget the lineage's events, which are numbered without gaps, up to a step's last one."""
    events = tables.events.c
    last_seq = connection.scalar(select(func.max(events.seq)).where(events.step <= last_step))
    if last_seq is not None:
        connection.execute(delete(tables.events).where(events.seq <= last_seq))
