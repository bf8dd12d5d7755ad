"""Store the durable state of a run in SQLite or in PostgreSQL, under a lease.

Invariants: each new term has a greater number, and only the owner of the newest term writes. One
transaction checks the lease and stores a checkpoint with its ledger. One transaction takes a lease
and, if the caller requests it, checks that no earlier owner is alive.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, bindparam, func, insert, select, update

from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import QueueSnapshot
from service import VERSION
from service.intake.listing import FeedEntry
from service.intake.submission import RolloutResult
from service.store import tables
from service.store.database import PATIENCE_S
from service.store.errors import LeaseHeld, StoreError
from service.store.feed import add_entries, newest_number
from service.store.leases import Lease, check_kind, check_term, lost, newest_lease, process_of
from service.store.lineage import Checkpoint, committed_checkpoints, lineage_totals
from service.store.migrations import STEPS, Step
from service.store.place import check_local
from service.store.read_only import ReadOnlyStore, Result
from service.store.tables import RunKind
from service.telemetry.records import EvaluationRecord, StepRecord
from service.telemetry.totals import RunTotals

log = logging.getLogger("rayloom.store")

_ADD_EVENTS = (
    update(tables.event_totals)
    .where(
        tables.event_totals.c.kind == bindparam("of_kind"),
        tables.event_totals.c.reason == bindparam("of_reason"),
    )
    .values(count=tables.event_totals.c.count + bindparam("more"))
)


class RunStore(ReadOnlyStore):
    """A run's database, opened for writing by the run's supervisor.

    Several threads may call it. If the database does not answer, a call waits for up to
    `patience_s`, so that a restart of PostgreSQL, a lock, or a disk that is full for a moment does
    not end a run. Raises: StoreError if the database cannot be opened, is not a database, has
    another format, or is an SQLite file on a network or FUSE file system.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = PATIENCE_S,
        may_be_older: bool = False,
        steps: Mapping[int, Step] = STEPS,
        count_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Open a store for writing.

        Args: may_be_older: whether to accept an older format, which is otherwise refused. Until the
        caller takes the lease or calls `move_forward`, it may only use tables that no migration
        changes. count_failure: as for `Database`.
        """
        check_local(url)
        super().__init__(
            url,
            is_read_only=False,
            patience_s=patience_s,
            may_be_older=may_be_older,
            steps=steps,
            count_failure=count_failure,
        )

    def close(self) -> None:
        """End all connections; all data of an SQLite database is then in its main file."""
        self._database.close()

    def acquire_lease(
        self,
        *,
        owner: str,
        directory: str = "",
        kind: RunKind = RunKind.TRAIN,
        passed_over: Collection[str] = (),
        follows: int | None = None,
        unless_held: bool = False,
        replaces: str = "",
        returns_to: str = "",
    ) -> Lease:
        """Take a new lease of the run; the owners of older leases can then write nothing more.

        The number of the new lease, its term, is one higher than the newest term. A database of an
        older format is migrated in the same transaction (`move_forward`).
        Args: owner: HOST:PID of the caller. directory: the run directory. passed_over: directories
        of unusable checkpoints; the run continues from the newest other checkpoint. follows: term
        of the lease that the caller already has; None if the caller has no lease. unless_held:
        whether to refuse if the run's owner is alive. replaces: HOST:PID of an owner that is known
        to be dead. returns_to: directory of the checkpoint to continue from; everything committed
        after this checkpoint is undone. If the run can no longer return to this checkpoint, the
        newest usable checkpoint is used.
        Raises: LeaseHeld if `unless_held` is set and the owner is alive; LeaseLost if `follows` is
        not the newest term; StoreError if there are checkpoints but all are passed over, or if the
        stored run is of another kind than `kind`.
        """
        moved: list[int] = []

        def check_free(connection: Connection) -> None:
            if unless_held:
                self._check_free(connection, replaces=replaces)

        def acquire(connection: Connection) -> Lease:
            newest = newest_lease(connection)
            if follows is not None and (newest is None or newest.term != follows):
                raise lost(follows, newest)
            check_free(connection)
            check_kind(newest.kind if newest else None, kind)
            moved.append(self._move_after_copy(connection))
            parent = _newest_checkpoint(connection, passed_over)
            if returns_to:
                found = committed_checkpoints(connection)
                parent = next((each for each in found if each.directory == returns_to), parent)
            term = newest.term + 1 if newest else 1
            row = {
                "term": term,
                "owner": owner,
                "process": process_of(owner),
                "directory": directory,
                "kind": kind,
                "acquired_at": time.time(),
                "renewed_at": self._database.now(connection),
                "parent_checkpoint": parent.id if parent else None,
                "is_return": bool(returns_to and parent and parent.directory == returns_to),
            }
            _insert(connection, tables.leases, row)
            _insert(connection, tables.versions, {"term": term, "version": VERSION})
            columns = tables.checkpoints.c
            if parent is None:
                return Lease(term=term, parent=None, queue_snapshot=None)
            held = select(columns.queue_snapshot, columns.curriculum).where(columns.id == parent.id)
            snapshot, curriculum = connection.execute(held).one()
            return Lease(term=term, parent=parent, queue_snapshot=snapshot, curriculum=curriculum)

        # Check without a lock first, because a caller that waits for the owner's end repeats this.
        self.read(check_free)
        lease = self._database.write(acquire)
        self._log_move(moved[-1])
        return lease

    def move_forward(self) -> None:
        """Migrate the database to the current format, if no live process owns the run.

        An SQLite file is copied first. Raises: LeaseHeld; StoreError.
        """

        def move(connection: Connection) -> int:
            self._check_free(connection)
            return self._move_after_copy(connection)

        self._log_move(self._database.write(move))

    def _check_free(self, connection: Connection, *, replaces: str = "") -> None:
        """Raise LeaseHeld if a live process owns the run; `replaces` (HOST:PID) counts as dead."""
        held = self._live_owner(connection)
        if held is not None and held.name != replaces:
            raise LeaseHeld(
                f"the run is held by {held}; its last sign of life was {held.silent_s:.0f} s ago"
            )

    def _move_after_copy(self, connection: Connection) -> int:
        """Migrate a database of an older format; return the number of the previous format."""
        number = self._read_format(connection)
        if number < self._format:
            # This transaction excludes other writers and has written nothing: copy the file now.
            if self._file is not None:
                self._database.copy_to(self._copy_of(self._file, number))
            self._move_forward(connection)
        return number

    def _log_move(self, number: int) -> None:
        if number == self._format:
            return
        copy = "no copy was made before; if you have a dump, it has the old format"
        if self._file is not None:
            copy = f"the copy in the old format is {self._copy_of(self._file, number)}"
        log.warning(
            "the database %s was moved forward from format %d to %d by Rayloom %s; %s",
            *(self.location, number, self._format, VERSION, copy),
        )

    @staticmethod
    def _copy_of(file: Path, number: int) -> Path:
        return file.with_name(f"{file.name}.format-{number}.bak")

    def check_lease(self, term: int) -> None:
        """Check that `term` is the newest term.

        Raises: LeaseLost if there is a newer term; StoreError.
        """
        self.read(lambda connection: check_term(connection, term))

    def renew(self, term: int) -> None:
        """Record that the owner of `term` is alive; do nothing if the lease was released.

        Raises: LeaseLost, StoreError.
        """
        leases = tables.leases
        is_held = (leases.c.term == term) & leases.c.renewed_at.is_not(None)

        def renew(connection: Connection) -> None:
            now = self._database.now(connection)
            connection.execute(update(leases).where(is_held).values(renewed_at=now))

        self.write(term, renew)

    def release(self, term: int) -> None:
        """End the lease, so that the next supervisor may take the run.

        Raises: LeaseLost, StoreError.
        """
        leases = tables.leases
        ended = update(leases).where(leases.c.term == term).values(renewed_at=None)
        self.write(term, lambda connection: connection.execute(ended))

    def fence(self, term: int, reason: str) -> None:
        """Make the database refuse all later writes, even those of `term`.

        reason: message of the error that a refused writer receives. Raises: LeaseLost, StoreError.
        """
        self._database.fence(reason, check=lambda connection: check_term(connection, term))

    def unfence(self) -> None:
        """Undo `fence`, so that writes are allowed again. Raises: StoreError."""
        self._database.unfence()

    def write(self, term: int, body: Callable[[Connection], Result]) -> Result:
        """Call `body` in a transaction that first checks the term, and return the result.

        Args: term: must be the newest term. body: must only use the connection, because it may be
        called again after a failure.
        Raises: LeaseLost, StoreError.
        """

        def fenced(connection: Connection) -> Result:
            check_term(connection, term)
            return body(connection)

        return self._database.write(fenced)

    def write_of_no_term(self, body: Callable[[Connection], Result]) -> Result:
        """Call `body` in a transaction that checks no lease, and return the result.

        Use this method only for rows that belong to no term, such as the API keys of the run.
        Raises: StoreError.
        """
        return self._database.write(body)

    def add_step(
        self,
        record: StepRecord,
        *,
        term: int,
        new_events: Sequence[LedgerEvent],
        new_results: Sequence[RolloutResult] = (),
    ) -> RunTotals:
        """Store a step with its events and results; return the totals of all steps ever stored.

        Raises: LeaseLost.
        """
        table = tables.step_totals
        row = {"term": term, "step": record.step, "record": record}

        def store(connection: Connection) -> RunTotals:
            _insert_outcomes(connection, term, new_events, new_results)
            _insert(connection, tables.steps, row)
            before = connection.scalar(select(table.c.totals))
            totals = (before or RunTotals()).plus(record)
            if before is None:
                _insert(connection, table, {"id": 1, "totals": totals})
            else:
                connection.execute(update(table).values(totals=totals))
            return totals

        return self.write(term, store)

    def add_evaluation(self, record: EvaluationRecord, *, term: int) -> None:
        """Store the record of an evaluation. Raises: LeaseLost."""
        columns = tables.evaluations.c
        newest = select(func.max(columns.number)).where(
            columns.term == term, columns.step == record.step
        )

        def store(connection: Connection) -> None:
            number = 0 if record.is_charted else (connection.scalar(newest) or 0) + 1
            row = {"term": term, "step": record.step, "number": number, "record": record}
            _insert(connection, tables.evaluations, row)

        self.write(term, store)

    def commit_checkpoint(
        self,
        *,
        term: int,
        step: int,
        policy_version: int,
        directory: str,
        queue_snapshot: QueueSnapshot,
        curriculum: Mapping[str, tuple[float, ...]] | None = None,
        new_events: Sequence[LedgerEvent],
        last_event_seq: int,
        new_results: Sequence[RolloutResult] = (),
        new_entries: Sequence[FeedEntry] = (),
    ) -> Checkpoint:
        """Commit a checkpoint, from which a later term (a start or recovery) can continue.

        The later term does not repeat rollouts that the checkpoint's ledger records as trained.

        Args: directory: name in the run's directory of checkpoints. new_events: the ledger's events
        that are not stored yet. last_event_seq: number of the last event that `queue_snapshot`
        includes. new_entries: entries for the feed that clients read, about events up to
        last_event_seq.

        Raises: LeaseLost.
        """
        row: dict[str, Any] = {
            "term": term,
            "step": step,
            "policy_version": policy_version,
            "directory": directory,
            "last_event_seq": last_event_seq,
            "committed_at": time.time(),
        }

        def store(connection: Connection) -> Checkpoint:
            _insert_outcomes(connection, term, new_events, new_results)
            add_entries(connection, new_entries)
            content = {
                "queue_snapshot": queue_snapshot,
                "curriculum": curriculum,
                "totals": lineage_totals(connection, term, last_step=step),
                "feed_number": newest_number(connection),
            }
            inserted = connection.execute(insert(tables.checkpoints), row | content)
            assert inserted.inserted_primary_key is not None
            (number,) = inserted.inserted_primary_key
            return Checkpoint(id=number, **row)

        return self.write(term, store)

    def _open(self) -> None:
        self._database.prepare(self._is_ready, self._create_tables)

    def _is_ready(self, connection: Connection) -> bool:
        if not self._has_tables(connection):
            return False
        if self._read_format(connection) < self._format and not self._may_be_older:
            raise self._not_moved()
        return True

    def _create_tables(self, connection: Connection) -> None:
        if not self._is_ready(connection):
            tables.metadata.create_all(connection)
            connection.execute(insert(tables.formats).values(number=tables.FORMAT))


def _newest_checkpoint(connection: Connection, passed_over: Collection[str]) -> Checkpoint | None:
    found = committed_checkpoints(connection)
    usable = [checkpoint for checkpoint in found if checkpoint.directory not in passed_over]
    if found and not usable:
        raise StoreError(
            f"none of the run's {len(found)} checkpoints can be used, the newest is "
            f"{found[0].directory}; restore one of them from a copy, or start a new run"
        )
    return usable[0] if usable else None


def _insert_outcomes(
    connection: Connection,
    term: int,
    new_events: Sequence[LedgerEvent],
    new_results: Sequence[RolloutResult],
) -> None:
    # The fields are written out, because asdict would take longer than the insertion.
    events = (
        {
            "term": term,
            "seq": item.seq,
            "rollout_id": item.rollout_id,
            "kind": item.kind,
            "reason": item.reason,
            "step": item.step,
        }
        for item in new_events
    )
    _insert(connection, tables.events, *events)
    _count_events(connection, new_events)
    results = (
        {"term": term, "rollout_id": item.rollout_id, "attempt": item.attempt, "result": item}
        for item in new_results
    )
    _insert(connection, tables.results, *results)


def _count_events(connection: Connection, new_events: Sequence[LedgerEvent]) -> None:
    for (kind, reason), count in Counter((item.kind, item.reason) for item in new_events).items():
        row = {"of_kind": kind.value, "of_reason": reason.value if reason else "", "more": count}
        if connection.execute(_ADD_EVENTS, row).rowcount == 0:
            new = {"kind": row["of_kind"], "reason": row["of_reason"], "count": count}
            _insert(connection, tables.event_totals, new)


def _insert(connection: Connection, table: Table, *rows: Mapping[str, Any]) -> None:
    if rows:
        connection.execute(insert(table), list(rows))
