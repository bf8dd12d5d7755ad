"""A run's durable state behind one lease; SQLite by default, any SQLAlchemy URL.

Invariants: epochs only grow; a writer whose epoch is not the newest writes nothing; a checkpoint
row, the ledger it stands for and the lease check are one transaction. Called by the supervisor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select
from sqlalchemy.exc import DatabaseError, OperationalError

from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import QueueSnapshot
from service.intake.submission import RolloutResult
from service.store import tables
from service.telemetry.records import EvaluationRecord, StepRecord

# What `Checkpoint.queue_snapshot` holds.
QUEUE_SNAPSHOT = TypeAdapter(QueueSnapshot)


class LeaseLost(Exception):
    """Another supervisor holds a newer epoch of this run; nothing was written."""


class StoreError(Exception):
    """The durable state cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """That a checkpoint counts. directory: its name, in the run's directory of checkpoints."""

    id: int
    epoch: int
    step: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: where the weights lie and what the queue held.

    directory: its name, in the run's directory of checkpoints, so that a run can be moved.
    """

    id: int
    epoch: int
    step: int
    policy_version: int
    directory: str
    queue_snapshot: Mapping[str, Any]
    last_event_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write; `parent` is the checkpoint that this epoch goes on from."""

    epoch: int
    parent: Checkpoint | None


class RunStore:
    """Open with a SQLAlchemy URL, such as sqlite:///RUN_DIR/rayloom.db.

    Raises: StoreError for what cannot be opened, or is no database.
    """

    def __init__(self, url: str) -> None:
        self._engine: Engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_immediate)
        try:
            tables.metadata.create_all(self._engine)
        except DatabaseError as error:
            self._engine.dispose()
            raise self._unusable("opened", error) from error

    def check(self) -> None:
        """Look for damage, which opening need not meet. Raises: StoreError."""
        if self._engine.dialect.name != "sqlite":
            return
        try:
            with self._engine.connect() as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        except DatabaseError as error:
            raise self._unusable("read", error) from error
        if found != "ok":
            raise StoreError(f"the database {self._place} is damaged ({found}); restore a copy")

    def close(self) -> None:
        self._engine.dispose()

    def acquire_lease(self, *, holder: str, passed_over: Collection[str] = ()) -> Lease:
        """Take the next epoch; whoever held an older one can write nothing from here on.

        It goes on from the newest commit whose directory is not one of `passed_over`.
        Raises: StoreError when there are commits, but none is left.
        """
        with self._engine.begin() as connection:
            epoch = _newest_epoch(connection) + 1
            parent = _newest_checkpoint(connection, passed_over)
            connection.execute(
                insert(tables.leases).values(
                    epoch=epoch,
                    holder=holder,
                    acquired_at=time.time(),
                    parent_checkpoint=parent.id if parent else None,
                )
            )
        return Lease(epoch=epoch, parent=parent)

    def newest_epoch(self) -> int:
        """0 where no supervisor has ever held the run."""
        with self._engine.connect() as connection:
            return _newest_epoch(connection)

    def check_lease(self, epoch: int) -> None:
        """Raises: LeaseLost when `epoch` is not the newest."""
        with self.fenced(epoch):
            pass

    def commits(self) -> list[Commit]:
        """What one can go back to, newest first, each directory once.

        Along the lineage of the newest commit: what an epoch committed beyond the checkpoint that
        a later one went back to is not among them.
        """
        with self._engine.connect() as connection:
            return _commits(connection)

    def add_step(
        self,
        record: StepRecord,
        *,
        epoch: int,
        new_events: Sequence[LedgerEvent],
        new_results: Sequence[RolloutResult] = (),
    ) -> None:
        """Raises: LeaseLost."""
        with self.fenced(epoch) as connection:
            _insert_events(connection, epoch, new_events)
            _insert_results(connection, epoch, new_results)
            connection.execute(
                insert(tables.steps).values(
                    epoch=epoch, step=record.step, record=_finite(record.to_json())
                )
            )

    def add_evaluation(self, record: EvaluationRecord, *, epoch: int) -> None:
        """Raises: LeaseLost."""
        with self.fenced(epoch) as connection:
            connection.execute(
                insert(tables.evaluations).values(
                    epoch=epoch, step=record.step, record=_finite(record.to_json())
                )
            )

    def commit_checkpoint(
        self,
        *,
        epoch: int,
        step: int,
        policy_version: int,
        directory: str,
        queue_snapshot: Mapping[str, Any],
        new_events: Sequence[LedgerEvent],
        last_event_seq: int,
        new_results: Sequence[RolloutResult] = (),
    ) -> None:
        """From here on, what the snapshot's ledger calls trained is trained. Raises: LeaseLost."""
        with self.fenced(epoch) as connection:
            _insert_events(connection, epoch, new_events)
            _insert_results(connection, epoch, new_results)
            connection.execute(
                insert(tables.checkpoints).values(
                    epoch=epoch,
                    step=step,
                    policy_version=policy_version,
                    directory=_name_of(directory),
                    queue_snapshot=dict(queue_snapshot),
                    last_event_seq=last_event_seq,
                    committed_at=time.time(),
                )
            )

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[Connection]:
        """A transaction that only the newest epoch gets. Raises: LeaseLost, StoreError."""
        try:
            with self._engine.begin() as connection:
                newest = _newest_epoch(connection)
                if newest != epoch:
                    raise LeaseLost(
                        f"this supervisor holds epoch {epoch} of the run, but epoch {newest} has "
                        "taken over; it stops without writing"
                    )
                yield connection
        except OperationalError as error:
            raise self._unusable("written", error) from error

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            yield connection

    @property
    def _place(self) -> str:
        return self._engine.url.database or self._engine.url.render_as_string(hide_password=True)

    def _unusable(self, what: str, error: DatabaseError) -> StoreError:
        return StoreError(
            f"the database {self._place} cannot be {what} ({error.orig}); expected a run's own, "
            "whole and writable, on a disk that is not full"
        )


def _newest_epoch(connection: Connection) -> int:
    return int(connection.execute(select(func.max(tables.leases.c.epoch))).scalar() or 0)


def _commits(connection: Connection) -> list[Commit]:
    table, leases = tables.checkpoints, tables.leases
    parents = {
        row.epoch: row.parent_checkpoint
        for row in connection.execute(select(leases.c.epoch, leases.c.parent_checkpoint))
    }
    query = select(table.c.id, table.c.epoch, table.c.step, table.c.directory)
    found: dict[str, Commit] = {}
    epoch: int | None = None
    for row in connection.execute(query.order_by(table.c.id.desc())):
        if epoch is None or row.id == parents[epoch]:
            epoch = row.epoch
        if row.epoch == epoch:
            name = _name_of(row.directory)
            commit = Commit(id=row.id, epoch=row.epoch, step=row.step, directory=name)
            found.setdefault(name, commit)
    return list(found.values())


def _newest_checkpoint(connection: Connection, passed_over: Collection[str]) -> Checkpoint | None:
    commits = _commits(connection)
    if not commits:
        return None
    newest = next((item for item in commits if item.directory not in passed_over), None)
    if newest is None:
        raise StoreError(
            f"none of the run's {len(commits)} checkpoints can be used, the newest is "
            f"{commits[0].directory}; restore one of them from a copy, or start a new run"
        )
    query = select(tables.checkpoints).where(tables.checkpoints.c.id == newest.id)
    return checkpoint_of(connection.execute(query).mappings().one())


def checkpoint_of(row: Mapping[Any, Any]) -> Checkpoint:
    fields = {key: row[key] for key in Checkpoint.__dataclass_fields__}
    return Checkpoint(**{**fields, "directory": _name_of(row["directory"])})


def _name_of(directory: str) -> str:
    """Databases of an older layout hold whole paths, of wherever the run was at that time."""
    return PurePath(directory).name


def _insert_events(connection: Connection, epoch: int, new_events: Sequence[LedgerEvent]) -> None:
    if new_events:
        connection.execute(
            insert(tables.events),
            [
                {
                    "epoch": epoch,
                    "seq": item.seq,
                    "rollout_id": item.rollout_id,
                    "kind": item.kind.value,
                    "reason": item.reason.value if item.reason else None,
                    "step": item.step,
                }
                for item in new_events
            ],
        )


def _insert_results(
    connection: Connection, epoch: int, new_results: Sequence[RolloutResult]
) -> None:
    if new_results:
        connection.execute(
            insert(tables.results),
            [
                {
                    "epoch": epoch,
                    "rollout_id": item.rollout_id,
                    "attempt": item.attempt,
                    "result": _finite(asdict(item)),
                }
                for item in new_results
            ],
        )


def _finite(tree: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a value that is not finite is stored as null."""
    return json.loads(json.dumps(tree), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver would open transactions by itself, too late for the lease check to be atomic.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
