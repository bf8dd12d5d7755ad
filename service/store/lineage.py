"""Which of a run's stored rows survive: the newest epoch and, before it, what it went on from.

An epoch that starts from checkpoint c keeps, of c's epoch, the steps up to c and the events up to
c's; everything that epoch wrote later is superseded. Read by the report and by the proofs; the
metrics count every row, superseded or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Table, func, select

from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from service.store import tables
from service.store.run_store import RunStore, checkpoint_of
from service.telemetry.records import EvaluationRecord, StepRecord


class Readable(Protocol):
    """A run's database, whether it may be written or not."""

    def reading(self) -> AbstractContextManager[Connection]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What survives of one epoch; None means all of it."""

    epoch: int
    last_step: int | None
    last_event_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run along its surviving lineage, in order.

    earlier_wall_s: seconds of the surviving parts of epochs that other processes ran.
    """

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    events: tuple[LedgerEvent, ...]
    num_epochs: int
    earlier_wall_s: float = 0.0


def read_history(store: Readable, *, own_epochs_from: int = 1) -> History:
    """Read what survives. own_epochs_from: the first epoch of the process that asks."""
    with store.reading() as connection:
        stretches = surviving_stretches(connection)
        steps = {part: _steps(connection, part) for part in stretches}
        earlier = [part for part in stretches if part.epoch < own_epochs_from and steps[part]]
        acquired = {
            row.epoch: row.acquired_at
            for row in connection.execute(
                select(tables.leases.c.epoch, tables.leases.c.acquired_at)
            )
        }
        return History(
            steps=tuple(record for part in stretches for record in steps[part]),
            earlier_wall_s=sum(
                max(steps[part][-1].wall_time - acquired[part.epoch], 0.0) for part in earlier
            ),
            evaluations=tuple(
                record for part in stretches for record in _evaluations(connection, part)
            ),
            events=tuple(item for part in stretches for item in events_of(connection, part)),
            num_epochs=stretches[-1].epoch if stretches else 0,
        )


def newest_records(store: RunStore) -> tuple[StepRecord | None, EvaluationRecord | None]:
    """The newest step and the newest evaluation that survive; None where there is none."""
    with store.reading() as connection:
        stretches = surviving_stretches(connection)
        step = _newest(connection, tables.steps, stretches)
        evaluation = _newest(connection, tables.evaluations, stretches)
    return (
        None if step is None else StepRecord.from_json(step),
        None if evaluation is None else EvaluationRecord.from_json(evaluation),
    )


def all_steps(store: RunStore) -> Iterator[StepRecord]:
    """Every step that the run ever stored, superseded ones included, in order."""
    table = tables.steps
    query = select(table.c.record).order_by(table.c.epoch, table.c.step)
    with store.reading() as connection:
        for row in connection.execute(query):
            yield StepRecord.from_json(row.record)


def count_events(store: RunStore) -> dict[tuple[str, str | None], int]:
    """How many events the run ever stored, superseded ones included, by kind and reason."""
    table = tables.events
    by = (table.c.kind, table.c.reason)
    with store.reading() as connection:
        found = connection.execute(select(*by, func.count().label("number")).group_by(*by))
        return {(row.kind, row.reason): row.number for row in found}


def surviving_stretches(connection: Connection) -> list[Stretch]:
    leases = {row.epoch: row for row in connection.execute(select(tables.leases))}
    if not leases:
        return []
    found = [Stretch(epoch=max(leases), last_step=None, last_event_seq=None)]
    parent = leases[max(leases)].parent_checkpoint
    while parent is not None:
        row = connection.execute(
            select(tables.checkpoints).where(tables.checkpoints.c.id == parent)
        ).mappings()
        checkpoint = checkpoint_of(row.one())
        found.append(
            Stretch(
                epoch=checkpoint.epoch,
                last_step=checkpoint.step,
                last_event_seq=checkpoint.last_event_seq,
            )
        )
        parent = leases[checkpoint.epoch].parent_checkpoint
    return found[::-1]


def _newest(
    connection: Connection, table: Table, stretches: list[Stretch]
) -> Mapping[str, Any] | None:
    for part in reversed(stretches):
        query = select(table.c.record).where(table.c.epoch == part.epoch)
        if part.last_step is not None:
            query = query.where(table.c.step <= part.last_step)
        newest = connection.execute(query.order_by(table.c.step.desc()).limit(1)).scalar()
        if newest is not None:
            return dict(newest)
    return None


def _steps(connection: Connection, part: Stretch) -> list[StepRecord]:
    table = tables.steps
    query = select(table.c.record).where(table.c.epoch == part.epoch).order_by(table.c.step)
    if part.last_step is not None:
        query = query.where(table.c.step <= part.last_step)
    return [StepRecord.from_json(row.record) for row in connection.execute(query)]


def _evaluations(connection: Connection, part: Stretch) -> list[EvaluationRecord]:
    table = tables.evaluations
    query = select(table.c.record).where(table.c.epoch == part.epoch).order_by(table.c.step)
    if part.last_step is not None:
        query = query.where(table.c.step <= part.last_step)
    return [EvaluationRecord.from_json(row.record) for row in connection.execute(query)]


def events_of(connection: Connection, part: Stretch) -> list[LedgerEvent]:
    table = tables.events
    query = select(table).where(table.c.epoch == part.epoch).order_by(table.c.seq)
    if part.last_event_seq is not None:
        query = query.where(table.c.seq <= part.last_event_seq)
    return [
        LedgerEvent(
            seq=row.seq,
            rollout_id=row.rollout_id,
            kind=LedgerEventKind(row.kind),
            reason=None if row.reason is None else EvictionReason(row.reason),
            step=row.step,
        )
        for row in connection.execute(query)
    ]
