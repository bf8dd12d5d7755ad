"""A run's database behind one lease; SQLite by default, any SQLAlchemy URL.

Invariants: terms only grow; a writer whose term is not the newest writes nothing; a checkpoint
row, the ledger it stands for and the lease check are one transaction. `RunStore` is the
supervisor's; `ReadOnlyStore` is for those who look at a run that may be running, cut off or copied.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from sqlalchemy import (
    Connection,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import NullPool

from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import QueueSnapshot
from service.intake.submission import RolloutResult
from service.store import tables
from service.store.lineage import Checkpoint, committed_checkpoints, newest_term
from service.telemetry.records import EvaluationRecord, StepRecord

RENEW_EVERY_S = 3.0
# Also what the clocks of two machines may differ by.
TOLERANCE_S = 30.0
BUSY_S = 10.0


class LeaseLost(Exception):
    """Another supervisor has a newer term of this run; nothing was written."""


class StoreError(Exception):
    """The durable state cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write."""

    term: int
    parent: Checkpoint | None
    """The checkpoint that this term goes on from; None: a fresh start."""
    queue_snapshot: QueueSnapshot | None
    """What the queue held at the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """Who has the newest lease and is alive. Times: seconds since 1970."""

    name: str
    """HOST:PID of the supervisor."""
    acquired_at: float
    renewed_at: float


class RunStore:
    """Open with a SQLAlchemy URL, such as sqlite:///RUN_DIR/rayloom.db.

    Raises: StoreError for what cannot be opened, is no database, or is of another format.
    """

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_immediate)
        try:
            with self._engine.begin() as connection:
                if _has_tables(connection):
                    _check_format(connection, self._location)
                else:
                    tables.metadata.create_all(connection)
                    connection.execute(insert(tables.formats).values(number=tables.FORMAT))
        except (DatabaseError, StoreError) as error:
            self._engine.dispose()
            if isinstance(error, StoreError):
                raise
            raise self._unusable("opened", error) from error

    def check(self) -> None:
        """Look for damage, which opening need not meet. Raises: StoreError."""
        if self._engine.dialect.name != "sqlite":
            return
        with self.reading() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            raise StoreError(f"the database {self._location} is damaged ({found}); restore a copy")

    def close(self) -> None:
        self._engine.dispose()

    def acquire_lease(self, *, owner: str, passed_over: Collection[str] = ()) -> Lease:
        """Take the next term; the owner of an older one can write nothing from here on.

        It goes on from the newest checkpoint whose directory is not one of `passed_over`.
        Raises: StoreError when there are checkpoints, but none is left.
        """
        with self._engine.begin() as connection:
            term = newest_term(connection) + 1
            parent = _newest_checkpoint(connection, passed_over)
            _insert(
                connection,
                tables.leases,
                {
                    "term": term,
                    "owner": owner,
                    "acquired_at": time.time(),
                    "parent_checkpoint": parent.id if parent else None,
                },
            )
            columns = tables.checkpoints.c
            snapshot = (
                connection.scalar(select(columns.queue_snapshot).where(columns.id == parent.id))
                if parent
                else None
            )
        return Lease(term=term, parent=parent, queue_snapshot=snapshot)

    def newest_term(self) -> int:
        """0 where no supervisor has ever had the lease."""
        with self.reading() as connection:
            return newest_term(connection)

    def check_lease(self, term: int) -> None:
        """Raises: LeaseLost when `term` is not the newest."""
        with self.fenced(term):
            pass

    def renew(self, term: int) -> None:
        """Show that the owner of `term` is alive. Raises: LeaseLost, StoreError."""
        self._set_renewed(term, time.time())

    def release(self, term: int) -> None:
        """Leave the run to whoever comes next. Raises: LeaseLost, StoreError."""
        self._set_renewed(term, None)

    def live_owner(self, *, now: float) -> LeaseOwner | None:
        """The owner of the newest lease, None where it has ended. now: seconds since 1970."""
        leases = tables.leases.c
        query = select(leases.owner, leases.acquired_at, leases.renewed_at)
        with self.reading() as connection:
            row = connection.execute(query.where(leases.term == newest_term(connection))).first()
        if row is None or row.renewed_at is None:
            return None
        owner = LeaseOwner(name=row.owner, acquired_at=row.acquired_at, renewed_at=row.renewed_at)
        is_alive = _lives_here(owner)
        if is_alive is None:
            is_alive = now - owner.renewed_at < TOLERANCE_S
        return owner if is_alive else None

    def checkpoints(self) -> list[Checkpoint]:
        """What the run can go back to, newest first, each directory once."""
        with self.reading() as connection:
            return committed_checkpoints(connection)

    def add_step(
        self,
        record: StepRecord,
        *,
        term: int,
        new_events: Sequence[LedgerEvent],
        new_results: Sequence[RolloutResult] = (),
    ) -> None:
        """Raises: LeaseLost."""
        with self.fenced(term) as connection:
            _insert_outcomes(connection, term, new_events, new_results)
            _insert(connection, tables.steps, {"term": term, "step": record.step, "record": record})

    def add_evaluation(self, record: EvaluationRecord, *, term: int) -> None:
        """Raises: LeaseLost."""
        with self.fenced(term) as connection:
            row = {"term": term, "step": record.step, "record": record}
            _insert(connection, tables.evaluations, row)

    def commit_checkpoint(
        self,
        *,
        term: int,
        step: int,
        policy_version: int,
        directory: str,
        queue_snapshot: QueueSnapshot,
        new_events: Sequence[LedgerEvent],
        last_event_seq: int,
        new_results: Sequence[RolloutResult] = (),
    ) -> None:
        """From here on, what the snapshot's ledger calls trained is trained.

        directory: its name in the run's directory of checkpoints.
        Raises: LeaseLost.
        """
        with self.fenced(term) as connection:
            _insert_outcomes(connection, term, new_events, new_results)
            row = {
                "term": term,
                "step": step,
                "policy_version": policy_version,
                "directory": directory,
                "queue_snapshot": queue_snapshot,
                "last_event_seq": last_event_seq,
                "committed_at": time.time(),
            }
            _insert(connection, tables.checkpoints, row)

    @contextmanager
    def fenced(self, term: int) -> Iterator[Connection]:
        """A transaction that only the newest term gets. Raises: LeaseLost, StoreError."""
        try:
            with self._engine.begin() as connection:
                newest = newest_term(connection)
                if newest != term:
                    raise LeaseLost(
                        f"this supervisor has term {term} of the run, but term {newest} has "
                        "taken over; it stops without writing"
                    )
                yield connection
        except OperationalError as error:
            raise self._unusable("written", error) from error

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Raises: StoreError."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise self._unusable("read", error) from error

    def _set_renewed(self, term: int, renewed_at: float | None) -> None:
        leases = tables.leases
        with self.fenced(term) as connection:
            connection.execute(
                update(leases).where(leases.c.term == term).values(renewed_at=renewed_at)
            )

    @property
    def _location(self) -> str:
        url = self._engine.url
        return url.database or url.render_as_string(hide_password=True)

    def _unusable(self, what: str, error: DatabaseError) -> StoreError:
        return StoreError(
            f"the database {self._location} cannot be {what} ({error.orig}); expected a run's own, "
            "whole and writable, on a disk that is not full"
        )


class ReadOnlyStore:
    """An SQLite database that is neither made nor written, nor kept from its writer.

    Where a log lies beside the database, SQLite keeps its index of it (-shm) up to date.
    Raises: StoreError for what cannot be read, or is of another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._engine, "begin", lambda each: each.exec_driver_sql("BEGIN"))
        with self.reading() as connection:
            if _has_tables(connection):
                _check_format(connection, str(path))

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees one state of the database. Raises: StoreError."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise StoreError(
                f"the database {self._path} cannot be read ({error.orig}); expected a run's own, "
                "whole; restore a copy of it"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        wal = self._path.with_name(f"{self._path.name}-wal")
        is_whole = not wal.exists() or wal.stat().st_size == 0
        # Without a log all is in the file itself, and SQLite need make no index of a log beside it.
        mode = "mode=ro&immutable=1" if is_whole else "mode=ro"
        uri = f"file:{quote(str(self._path))}?{mode}"
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)


def own_name() -> str:
    """This process, as its lease names it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _lives_here(owner: LeaseOwner) -> bool | None:
    """Whether its process lives on this machine; None for one of another machine."""
    host, _, pid = owner.name.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        process = psutil.Process(int(pid))
        # Another process may have been given its number since.
        is_same = process.create_time() <= owner.acquired_at
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_tables(connection: Connection) -> bool:
    return bool(set(inspect(connection).get_table_names()) & tables.metadata.tables.keys())


def _check_format(connection: Connection, database: str) -> None:
    """Raises: StoreError."""
    has_number = inspect(connection).has_table(tables.formats.name)
    number = connection.scalar(select(tables.formats.c.number)) if has_number else 1
    if number is None:
        raise StoreError(f"the database {database} is damaged (no format number); restore a copy")
    if number != tables.FORMAT:
        raise StoreError(
            f"the run in {Path(database).parent} was written in format {number}, this Rayloom "
            f"reads format {tables.FORMAT}; finish it with the version that began it, or "
            "start a new run"
        )


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
    _insert(connection, tables.events, *({"term": term, **asdict(item)} for item in new_events))
    results = (
        {"term": term, "rollout_id": item.rollout_id, "attempt": item.attempt, "result": item}
        for item in new_results
    )
    _insert(connection, tables.results, *results)


def _insert(connection: Connection, table: Table, *rows: Mapping[str, Any]) -> None:
    if rows:
        connection.execute(insert(table), list(rows))


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver would open transactions by itself, too late for the lease check to be atomic.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_S * 1000:.0f}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
