"""Which of a run's stored rows survive: the newest term and, before it, what it went on from.

A term that starts from checkpoint c keeps, of c's term, the steps up to c and the events up to
c's; everything that term wrote later is superseded. Read by the report and by `inspect`; the
metrics count every row, superseded or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from sqlalchemy import Connection, Select, Table, func, select

from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from service.store import tables
from service.telemetry.records import EvaluationRecord, StepRecord


class Readable(Protocol):
    """A run's database, whether it may be written or not."""

    def reading(self) -> AbstractContextManager[Connection]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint."""

    id: int
    """1, 2, 3, … in the order of the commits."""
    term: int
    step: int
    policy_version: int
    directory: str
    """Its name in the run's directory of checkpoints, so that a run can be moved."""
    last_event_seq: int
    """Of its term's ledger events, the last one that its ledger contains; -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What survives of one term; None means all of it."""

    term: int
    last_step: int | None = None
    last_event_seq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run along its surviving lineage, in order."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    events: tuple[LedgerEvent, ...]
    spans: tuple[Span, ...]
    """What survives of which terms; empty for a run that never had a lease."""
    earlier_wall_s: float = 0.0
    """Seconds of the surviving parts of terms that other processes ran."""

    @property
    def num_terms(self) -> int:
        return self.spans[-1].term if self.spans else 0


def read_history(store: Readable, *, own_terms_from: int = 1) -> History:
    """Read what survives. own_terms_from: the first term of the process that asks."""
    leases = tables.leases
    with store.reading() as connection:
        spans = surviving_spans(connection)
        steps = {span: _records(connection, tables.steps, span) for span in spans}
        acquired = dict(connection.execute(select(leases.c.term, leases.c.acquired_at)).all())
        return History(
            steps=tuple(record for span in spans for record in steps[span]),
            evaluations=tuple(
                record
                for span in spans
                for record in _records(connection, tables.evaluations, span)
            ),
            events=events_of(connection, spans),
            spans=tuple(spans),
            earlier_wall_s=sum(
                max(steps[span][-1].wall_time - acquired[span.term], 0.0)
                for span in spans
                if span.term < own_terms_from and steps[span]
            ),
        )


def newest_records(store: Readable) -> tuple[StepRecord | None, EvaluationRecord | None]:
    """The newest step and the newest evaluation that survive; None where there is none."""
    with store.reading() as connection:
        spans = surviving_spans(connection)
        return (
            _newest(connection, tables.steps, spans),
            _newest(connection, tables.evaluations, spans),
        )


def all_steps(store: Readable) -> Iterator[StepRecord]:
    """Every step that the run ever stored, superseded ones included, in order."""
    table = tables.steps
    with store.reading() as connection:
        yield from connection.scalars(select(table.c.record).order_by(table.c.term, table.c.step))


def count_events(store: Readable) -> dict[tuple[LedgerEventKind, EvictionReason | None], int]:
    """How many events the run ever stored, superseded ones included, by kind and reason."""
    table = tables.events
    by = (table.c.kind, table.c.reason)
    with store.reading() as connection:
        rows = connection.execute(select(*by, func.count()).group_by(*by))
        return {(kind, reason): count for kind, reason, count in rows}


def surviving_spans(connection: Connection) -> list[Span]:
    """The spans of the newest term's lineage, the oldest first."""
    newest = newest_term(connection)
    if newest == 0:
        return []
    return [
        Span(term=term, last_step=end.step, last_event_seq=end.last_event_seq)
        if end
        else Span(term=term)
        for term, end in reversed(_lineage(connection, newest))
    ]


def committed_checkpoints(connection: Connection) -> list[Checkpoint]:
    """What a run can go back to, newest first, each directory once.

    Along the lineage of the newest checkpoint: what a term committed beyond the checkpoint that a
    later one went back to is not among them.
    """
    found = _all_checkpoints(connection)
    if not found:
        return []
    ends = dict(_lineage(connection, found[0].term))
    by_name: dict[str, Checkpoint] = {}
    for item in found:
        if item.term in ends and ((end := ends[item.term]) is None or item.id <= end.id):
            by_name.setdefault(item.directory, item)
    return list(by_name.values())


def newest_term(connection: Connection) -> int:
    """0 where no supervisor has ever had the lease."""
    return int(connection.scalar(select(func.max(tables.leases.c.term))) or 0)


def events_of(connection: Connection, spans: list[Span]) -> tuple[LedgerEvent, ...]:
    columns = tables.events.c
    names = [field.name for field in fields(LedgerEvent)]
    found: list[LedgerEvent] = []
    for span in spans:
        query = select(*(columns[name] for name in names)).where(columns.term == span.term)
        if span.last_event_seq is not None:
            query = query.where(columns.seq <= span.last_event_seq)
        rows = connection.execute(query.order_by(columns.seq)).mappings()
        found += (LedgerEvent(**row) for row in rows)
    return tuple(found)


def _lineage(connection: Connection, term: int) -> list[tuple[int, Checkpoint | None]]:
    """`term` and what it descends from, newest first.

    Returns: each term with its checkpoint that the next one went on from; None for `term` itself.
    """
    leases = tables.leases.c
    parents = dict(connection.execute(select(leases.term, leases.parent_checkpoint)).all())
    by_id = {checkpoint.id: checkpoint for checkpoint in _all_checkpoints(connection)}
    found: list[tuple[int, Checkpoint | None]] = [(term, None)]
    while (parent := parents[found[-1][0]]) is not None:
        found.append((by_id[parent].term, by_id[parent]))
    return found


def _all_checkpoints(connection: Connection) -> list[Checkpoint]:
    """Of every lineage, newest first."""
    columns = tables.checkpoints.c
    names = [field.name for field in fields(Checkpoint)]
    query = select(*(columns[name] for name in names)).order_by(columns.id.desc())
    return [Checkpoint(**row) for row in connection.execute(query).mappings()]


def _within(table: Table, span: Span) -> Select[Any]:
    query = select(table.c.record).where(table.c.term == span.term)
    return query if span.last_step is None else query.where(table.c.step <= span.last_step)


def _records(connection: Connection, table: Table, span: Span) -> list[Any]:
    return list(connection.scalars(_within(table, span).order_by(table.c.step)))


def _newest(connection: Connection, table: Table, spans: list[Span]) -> Any:
    newest = (
        connection.scalar(_within(table, span).order_by(table.c.step.desc()).limit(1))
        for span in reversed(spans)
    )
    return next((record for record in newest if record is not None), None)
