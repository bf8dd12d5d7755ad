"""Find a run's surviving rows, which are those that no return to a checkpoint undid.

A term is the part of a run from a start, recovery or return to the next. A term may start from a
checkpoint of an earlier term. Then the earlier term's steps up to the checkpoint survive, and the
events that the checkpoint contains. The earlier term's later rows are superseded. The report and
`inspect` show surviving rows; the metrics count all rows that were ever stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    func,
    literal,
    or_,
    select,
)

from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from service.store import tables
from service.store.errors import Damaged
from service.store.tables import word_of
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.summary import History
from service.telemetry.totals import RunTotals, totals_of

if TYPE_CHECKING:
    from service.store.read_only import ReadOnlyStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint of a run, as its row in the table `checkpoints` describes it."""

    id: int
    """Number of the checkpoint (1, 2, 3, …) in the order of the commits."""
    term: int
    step: int
    policy_version: int
    directory: str
    """Name in the run's directory of checkpoints, without a path, because a run can be moved."""
    last_event_seq: int
    """Number of the term's last event that the checkpoint's ledger includes; -1 if none."""
    committed_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The steps and events of one term that no return to a checkpoint undid.

    A term is the part of a run from a start, recovery or return to the next. Steps survive up to
    `last_step`, and events up to `last_event_seq`. If a bound is None, all steps or all events of
    the term survive.
    """

    term: int
    last_step: int | None = None
    last_event_seq: int | None = None


def read_history(store: ReadOnlyStore) -> History:
    def read(connection: Connection) -> History:
        spans = surviving_spans(connection)
        return History(
            steps=_surviving(connection, tables.steps, spans),
            evaluations=_surviving(connection, tables.evaluations, spans),
            totals=lineage_totals(connection, spans[-1].term) if spans else RunTotals(),
            num_terms=spans[-1].term if spans else 0,
        )

    return store.read(read)


def read_events(store: ReadOnlyStore) -> tuple[LedgerEvent, ...]:
    """Return the ledger events that are still stored, in order.

    Events that a return to a checkpoint undid are left out.
    """
    return store.read(lambda connection: events_of(connection, surviving_spans(connection)))


def recorded_steps(store: ReadOnlyStore) -> tuple[int, ...]:
    """Return the numbers of the steps whose records are stored, in order.

    Steps that a return to a checkpoint undid are left out.
    """
    columns = tables.steps.c
    query = select(columns.step).order_by(columns.step)

    def read(connection: Connection) -> tuple[int, ...]:
        return tuple(
            step
            for span in surviving_spans(connection)
            for step in connection.scalars(query.where(within(columns, span)))
        )

    return store.read(read)


class RecordKind(StrEnum):
    """The subject of a stored record: a step, a scheduled evaluation, or a requested evaluation.

    Records of one kind are ordered by their position (`Place`). To find newer records, a reader
    keeps, for each kind, the position of the last record that it has read.
    """

    STEP = "step"
    EVALUATION = "evaluation"
    """An evaluation of the schedule."""
    ASKED_EVALUATION = "asked_evaluation"
    """An evaluation that an operator requested."""


Place = tuple[int, int, int]
"""Position of a record among those of its kind: term, step, and an evaluation's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """The record of a step or an evaluation, with its position among the records of its kind.

    Only surviving records are returned: those that no return to a checkpoint undid.
    """

    kind: RecordKind
    place: Place
    first_step: int
    """First step of the record's term; older terms' records of this and later steps are
    superseded."""
    record: StepRecord | EvaluationRecord


def records_after(store: ReadOnlyStore, places: Mapping[RecordKind, Place]) -> list[StoredRecord]:
    """Return the records after these positions, in the order in which they were made.

    Records that a return to a checkpoint undid are left out.
    places: the position for each kind of record; if a kind is missing, all its records are
    returned.
    """

    def read(connection: Connection) -> list[StoredRecord]:
        found: list[StoredRecord] = []
        # An evaluation before the first step has the step 0.
        first_step = 0
        for span in surviving_spans(connection):
            for kind in RecordKind:
                term, *behind = places.get(kind, (0, 0, 0))
                if term <= span.term:
                    rows = connection.execute(
                        _rows_behind(kind, span, *(behind if term == span.term else (-1, 0)))
                    )
                    found += [
                        StoredRecord(
                            kind=kind,
                            place=(span.term, step, number),
                            first_step=first_step,
                            record=record,
                        )
                        for step, number, record in rows
                    ]
            first_step = (span.last_step or 0) + 1
        # An evaluation at a step is played before the record of the step is written.
        return sorted(
            found, key=lambda each: (each.place[:2], each.kind is RecordKind.STEP, each.place)
        )

    return store.read(read)


def _rows_behind(kind: RecordKind, span: Span, step: int, number: int) -> Select[Any]:
    """Return a query for a span's records after the position (step, number).

    Each row of the result has a record's step, its number, and the record.
    """
    if kind is RecordKind.STEP:
        columns = tables.steps.c
        query = select(columns.step, literal(0), columns.record).where(columns.step > step)
    else:
        columns = tables.evaluations.c
        is_asked = kind is RecordKind.ASKED_EVALUATION
        query = select(columns.step, columns.number, columns.record).where(
            columns.number > 0 if is_asked else columns.number == 0,
            or_(columns.step > step, and_(columns.step == step, columns.number > number)),
        )
    return query.where(within(columns, span))


def newest_records(store: ReadOnlyStore) -> tuple[StepRecord | None, EvaluationRecord | None]:
    """Return the newest record of a step, and the newest record of a scheduled evaluation.

    Records that a return to a checkpoint undid are left out. A result is None if no record remains.
    """

    def read(connection: Connection) -> tuple[StepRecord | None, EvaluationRecord | None]:
        spans = surviving_spans(connection)
        return (
            _newest(connection, tables.steps, spans),
            _newest(connection, tables.evaluations, spans, tables.evaluations.c.number == 0),
        )

    return store.read(read)


def mean_returns(store: ReadOnlyStore, steps: Collection[int]) -> dict[int, tuple[bool, float]]:
    """Return the mean return at each step, in a form by which steps can be compared.

    Returns: a pair for each step: (True, mean of the scheduled evaluation), or (False, mean of the
    training rollouts) if the step has no such evaluation. The greatest pair belongs to the best
    step; any step with an evaluation counts as better than a step without one. A mean is divided by
    the best possible return if this is known. Steps without a known mean are left out.
    """

    def read(connection: Connection) -> dict[int, tuple[bool, float]]:
        found: dict[int, tuple[bool, float]] = {}
        spans = surviving_spans(connection)
        of_schedule = tables.evaluations.c.number == 0
        for table, conditions in ((tables.steps, ()), (tables.evaluations, (of_schedule,))):
            columns, is_evaluated = table.c, table is tables.evaluations
            query = select(columns.step, columns.record).where(columns.step.in_(steps), *conditions)
            for span in spans:
                for step, record in connection.execute(query.where(within(columns, span))):
                    if (mean := record.best_known_reward) is not None:
                        found[step] = (is_evaluated, mean)
        return found

    return store.read(read)


def is_named(commit: Checkpoint, name: str) -> bool:
    """Return whether `name` is this checkpoint's directory or the number of its step."""
    return name == commit.directory or (name.isdecimal() and int(name) == commit.step)


def stored_totals(store: ReadOnlyStore) -> RunTotals:
    """Return the totals of all steps ever stored.

    Steps that a return to a checkpoint undid are included.
    """
    query = select(tables.step_totals.c.totals)
    return store.read(lambda connection: connection.scalar(query)) or RunTotals()


def count_events(store: ReadOnlyStore) -> dict[tuple[LedgerEventKind, EvictionReason | None], int]:
    """Return the counts of all events ever stored, by kind and reason.

    Events that a return to a checkpoint undid are included.
    """

    def read(connection: Connection) -> dict[tuple[LedgerEventKind, EvictionReason | None], int]:
        rows = connection.execute(select(tables.event_totals))
        return {
            (
                word_of(LedgerEventKind, kind),
                word_of(EvictionReason, reason) if reason else None,
            ): count
            for kind, reason, count in rows
        }

    return store.read(read)


def totals_at(store: ReadOnlyStore, checkpoint: Checkpoint) -> RunTotals:
    """Return the totals of the steps that led to a checkpoint.

    If the run can no longer return to the checkpoint, these totals were deleted, and zeros are
    returned.
    """
    columns = tables.checkpoints.c
    query = select(columns.totals).where(columns.id == checkpoint.id)
    return store.read(lambda connection: connection.scalar(query)) or RunTotals()


def lineage_totals(connection: Connection, term: int, *, last_step: int | None = None) -> RunTotals:
    """Return the totals of the run's steps, without steps that a return to a checkpoint undid.

    term: the newest term, which is the part of the run since its last start, recovery or return.
    last_step: the last step that counts; None counts all steps.
    """
    commits, leases, steps = tables.checkpoints.c, tables.leases.c, tables.steps.c
    begun_at, parent = _row(
        connection,
        select(leases.acquired_at, leases.parent_checkpoint).where(leases.term == term),
        what=f"term {term}",
    )
    columns = select(commits.step, commits.totals)
    newest = columns.where(commits.term == term).order_by(commits.id.desc()).limit(1)
    base = connection.execute(newest).first()
    if base is None and parent is not None:
        base = _row(connection, columns.where(commits.id == parent), what=f"checkpoint {parent}")
    rest = select(steps.record).where(steps.term == term).order_by(steps.step)
    if base is not None:
        rest = rest.where(steps.step > base.step)
    if last_step is not None:
        rest = rest.where(steps.step <= last_step)
    return totals_of(
        connection.scalars(rest), base=None if base is None else base.totals, begun_at=begun_at
    )


def surviving_spans(connection: Connection) -> list[Span]:
    """Return, for each term, the steps and events that no return to a checkpoint undid.

    The terms are the newest term and the earlier terms that it continues, oldest first. The list is
    empty if the run has never started.
    """
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
    """Return the checkpoints to which a run can return, newest first.

    A checkpoint is left out if its queue snapshot was deleted (`retention`), if a return to an
    older checkpoint undid it, or if its directory was committed again later. A restart may skip
    newer checkpoints that cannot be read. They stay in the list until the run commits another
    checkpoint, because they may become readable again.
    """
    found = every_checkpoint(connection, only_usable=True)
    if not found:
        return []
    leases = tables.leases.c
    returned = connection.scalar(select(func.max(leases.term)).where(leases.is_return))
    ends = dict(_lineage(connection, max(found[0].term, returned or 0)))
    by_name: dict[str, Checkpoint] = {}
    for item in found:
        if item.term in ends and ((end := ends[item.term]) is None or item.id <= end.id):
            by_name.setdefault(item.directory, item)
    return list(by_name.values())


def newest_term(connection: Connection) -> int:
    """Return the newest term; 0 if no supervisor has ever had the lease."""
    return int(connection.scalar(select(func.max(tables.leases.c.term))) or 0)


def lease_digests(store: ReadOnlyStore) -> dict[int, str]:
    """Return a digest of each term, by which databases of the same run are recognized.

    A new term begins when the run starts, recovers or returns to a checkpoint. The digest covers
    which process ran the term, and since when. A copy of a database has the same digests for the
    terms before the copying. Terms that begin later have other digests in each copy.
    """
    leases = tables.leases.c
    query = select(leases.term, leases.owner, leases.process, leases.acquired_at)
    rows = store.read(lambda connection: connection.execute(query).all())
    return {row.term: blake2b(repr(tuple(row)).encode(), digest_size=8).hexdigest() for row in rows}


def events_of(connection: Connection, spans: list[Span]) -> tuple[LedgerEvent, ...]:
    columns = tables.events.c
    names = [field.name for field in fields(LedgerEvent)]
    query = select(*(columns[name] for name in names)).order_by(columns.seq)
    return tuple(
        LedgerEvent(**row)
        for span in spans
        for row in connection.execute(query.where(within(columns, span))).mappings()
    )


def within(columns: Any, span: Span) -> ColumnElement[bool]:
    """Return the SQL condition that a row of `events`, `steps` or `evaluations` is in a span."""
    last, ends = (
        (span.last_event_seq, columns.seq) if "seq" in columns else (span.last_step, columns.step)
    )
    is_of_term = columns.term == span.term
    return is_of_term if last is None else and_(is_of_term, ends <= last)


def _lineage(connection: Connection, term: int) -> list[tuple[int, Checkpoint | None]]:
    """Return `term` and the earlier terms that it continues, newest first, with their ends.

    An earlier term's end is the checkpoint from which the newer term in the list started.
    Example: term 3 started from checkpoint c of term 1 -> [(3, None), (1, c)]
    """
    leases = tables.leases.c
    parents = dict(connection.execute(select(leases.term, leases.parent_checkpoint)).all())
    by_id = {checkpoint.id: checkpoint for checkpoint in every_checkpoint(connection)}
    found: list[tuple[int, Checkpoint | None]] = [(term, None)]
    while True:
        newest = found[-1][0]
        if newest not in parents:
            raise Damaged(f"term {newest} is missing")
        if (parent := parents[newest]) is None:
            return found
        commit = by_id.get(parent)
        if commit is None or commit.term >= newest:
            raise Damaged(f"checkpoint {parent}, which term {newest} continued from, is missing")
        found.append((commit.term, commit))


def first_versions(connection: Connection) -> dict[int, int]:
    """Return, for each term of the run, the version of the policy with which the term started.

    A new term begins when the run starts, recovers or returns to a checkpoint. The version is 0 if
    a term did not start from a checkpoint. Terms that a return to a checkpoint undid are included.
    """
    leases, checkpoints = tables.leases, tables.checkpoints
    parent = checkpoints.c.id == leases.c.parent_checkpoint
    query = select(leases.c.term, checkpoints.c.policy_version).select_from(
        leases.outerjoin(checkpoints, parent)
    )
    return {term: version or 0 for term, version in connection.execute(query)}


def _row(connection: Connection, query: Select[Any], *, what: str) -> Any:
    if (row := connection.execute(query).first()) is None:
        raise Damaged(f"{what} is missing")
    return row


def every_checkpoint(connection: Connection, *, only_usable: bool = False) -> list[Checkpoint]:
    """Return all stored checkpoints, newest first, even those that were undone.

    only_usable: whether to leave out checkpoints whose queue snapshot was deleted.
    """
    columns = tables.checkpoints.c
    names = [field.name for field in fields(Checkpoint)]
    query = select(*(columns[name] for name in names)).order_by(columns.id.desc())
    if only_usable:
        query = query.where(columns.queue_snapshot.is_not(None))
    return [Checkpoint(**row) for row in connection.execute(query).mappings()]


def _surviving(connection: Connection, table: Table, spans: list[Span]) -> tuple[Any, ...]:
    return tuple(
        record
        for span in spans
        for record in connection.scalars(
            select(table.c.record).where(within(table.c, span)).order_by(*table.primary_key.columns)
        )
    )


def _newest(
    connection: Connection, table: Table, spans: list[Span], *conditions: ColumnElement[bool]
) -> Any:
    newest = (
        connection.scalar(
            select(table.c.record)
            .where(within(table.c, span), *conditions)
            .order_by(table.c.step.desc())
            .limit(1)
        )
        for span in reversed(spans)
    )
    return next((record for record in newest if record is not None), None)
