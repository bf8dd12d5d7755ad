"""A run's durable state behind one lease; SQLite by default, any SQLAlchemy URL.

Invariants: epochs only grow; a writer whose epoch is not the newest writes nothing; a checkpoint
row, the ledger it stands for and the lease check are one transaction. Called by the supervisor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select

from service.records import EvaluationRecord, StepRecord
from service.store import tables


class LeaseLost(Exception):
    """Another supervisor holds a newer epoch of this run; nothing was written."""


class StoreError(Exception):
    """The durable state cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One change of a rollout's ledger state. seq grows within an epoch."""

    seq: int
    rollout_id: str
    kind: str
    reason: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: where the weights lie and what the queue held."""

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
    """Open with a SQLAlchemy URL, such as sqlite:///RUN_DIR/rayloom.db."""

    def __init__(self, url: str) -> None:
        self._engine: Engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_immediate)
        tables.metadata.create_all(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def acquire_lease(self, *, holder: str) -> Lease:
        """Take the next epoch; whoever held an older one can write nothing from here on."""
        with self._engine.begin() as connection:
            epoch = _newest_epoch(connection) + 1
            parent = _newest_checkpoint(connection)
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

    def newest_checkpoint(self) -> Checkpoint | None:
        with self._engine.connect() as connection:
            return _newest_checkpoint(connection)

    def newest_directories(self, count: int) -> list[str]:
        """Where the newest committed checkpoints lie, at most `count`, newest first."""
        table = tables.checkpoints
        query = (
            select(table.c.directory)
            .group_by(table.c.directory)
            .order_by(func.max(table.c.id).desc())
            .limit(count)
        )
        with self._engine.connect() as connection:
            return [row.directory for row in connection.execute(query)]

    def add_step(
        self, record: StepRecord, *, epoch: int, new_events: Sequence[StoredEvent]
    ) -> None:
        """Raises: LeaseLost."""
        with self._fenced(epoch) as connection:
            _insert_events(connection, epoch, new_events)
            connection.execute(
                insert(tables.steps).values(
                    epoch=epoch, step=record.step, record=_finite(record.to_json())
                )
            )

    def add_evaluation(self, record: EvaluationRecord, *, epoch: int) -> None:
        """Raises: LeaseLost."""
        with self._fenced(epoch) as connection:
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
        new_events: Sequence[StoredEvent],
        last_event_seq: int,
    ) -> None:
        """From here on, what the snapshot's ledger calls trained is trained. Raises: LeaseLost."""
        with self._fenced(epoch) as connection:
            _insert_events(connection, epoch, new_events)
            connection.execute(
                insert(tables.checkpoints).values(
                    epoch=epoch,
                    step=step,
                    policy_version=policy_version,
                    directory=directory,
                    queue_snapshot=dict(queue_snapshot),
                    last_event_seq=last_event_seq,
                    committed_at=time.time(),
                )
            )

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            newest = _newest_epoch(connection)
            if newest != epoch:
                raise LeaseLost(
                    f"this supervisor holds epoch {epoch} of the run, but epoch {newest} has "
                    "taken over; it stops without writing"
                )
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            yield connection


def _newest_epoch(connection: Connection) -> int:
    return int(connection.execute(select(func.max(tables.leases.c.epoch))).scalar() or 0)


def _newest_checkpoint(connection: Connection) -> Checkpoint | None:
    newest = select(tables.checkpoints).order_by(tables.checkpoints.c.id.desc()).limit(1)
    row = connection.execute(newest).mappings().one_or_none()
    return None if row is None else checkpoint_of(row)


def checkpoint_of(row: Mapping[Any, Any]) -> Checkpoint:
    return Checkpoint(**{key: row[key] for key in Checkpoint.__dataclass_fields__})


def _insert_events(connection: Connection, epoch: int, new_events: Sequence[StoredEvent]) -> None:
    if new_events:
        connection.execute(
            insert(tables.events),
            [
                {
                    "epoch": epoch,
                    "seq": item.seq,
                    "rollout_id": item.rollout_id,
                    "kind": item.kind,
                    "reason": item.reason,
                    "step": item.step,
                }
                for item in new_events
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
