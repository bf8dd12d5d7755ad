"""What clients submit, stored: accepted before it is answered, bound before it is played.

Every write carries the lease's epoch. Reading back keeps what lies along the surviving lineage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from actors.trajectory_queue.ledger import LedgerEvent
from actors.types import Task
from service.intake.submission import RolloutResult, Submission, Wanted, as_plain
from service.store import tables
from service.store.lineage import events_of, surviving_stretches
from service.store.run_store import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIntake:
    """All that is known of submissions. bindings: group id to submission id, newest epoch wins."""

    submissions: tuple[Submission, ...]
    bindings: Mapping[str, str]
    results: tuple[RolloutResult, ...]
    events: tuple[LedgerEvent, ...]


class SubmissionStore:
    """Tables `submissions`, `bindings` and `results` of a run's database."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def add(self, wanted: Sequence[Wanted], *, epoch: int) -> list[Submission]:
        """Accept all in one transaction; they are durable when this returns. Raises: LeaseLost."""
        accepted_at = time.time()
        with self._store.fenced(epoch) as connection:
            places = [_insert(connection, item, accepted_at) for item in wanted]
        return [
            Submission(wanted=item, place=place, accepted_at=accepted_at)
            for item, place in zip(wanted, places, strict=True)
        ]

    def bind(self, groups: Mapping[str, str], *, epoch: int) -> None:
        """groups: group id to submission id. Raises: LeaseLost."""
        rows = [
            {"epoch": epoch, "group_id": group_id, "submission_id": submission_id}
            for group_id, submission_id in groups.items()
        ]
        with self._store.fenced(epoch) as connection:
            connection.execute(insert(tables.bindings), rows)

    def cancel(self, submission_id: str, *, epoch: int) -> None:
        """Raises: LeaseLost."""
        table = tables.submissions
        with self._store.fenced(epoch) as connection:
            connection.execute(
                update(table).where(table.c.id == submission_id).values(is_cancelled=True)
            )

    def read(self) -> StoredIntake:
        """What survives: every submission, and of the rest what the newest epoch goes on from."""
        with self._store.reading() as connection:
            stretches = surviving_stretches(connection)
            epochs = [stretch.epoch for stretch in stretches]
            return StoredIntake(
                submissions=_submissions(connection),
                bindings=_bindings(connection, epochs),
                results=_results(connection, epochs),
                events=tuple(item for part in stretches for item in events_of(connection, part)),
            )


def _insert(connection: Connection, wanted: Wanted, accepted_at: float) -> int:
    row = {
        "id": wanted.task.task_id,
        "task": as_plain(wanted.task),
        "num_samples": wanted.num_samples,
        "min_usable_samples": wanted.min_usable_samples,
        "accepted_at": accepted_at,
    }
    key = connection.execute(insert(tables.submissions).values(row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def _submissions(connection: Connection) -> tuple[Submission, ...]:
    table = tables.submissions
    return tuple(
        Submission(
            wanted=Wanted(
                task=Task(**row.task),
                num_samples=row.num_samples,
                min_usable_samples=row.min_usable_samples,
            ),
            place=row.place,
            accepted_at=row.accepted_at,
            is_cancelled=row.is_cancelled,
        )
        for row in connection.execute(select(table).order_by(table.c.place))
    )


def _bindings(connection: Connection, epochs: Sequence[int]) -> dict[str, str]:
    table = tables.bindings
    query = select(table).where(table.c.epoch.in_(epochs)).order_by(table.c.epoch)
    return {row.group_id: row.submission_id for row in connection.execute(query)}


def _results(connection: Connection, epochs: Sequence[int]) -> tuple[RolloutResult, ...]:
    table = tables.results
    query = select(table).where(table.c.epoch.in_(epochs))
    rows = connection.execute(query.order_by(table.c.epoch, table.c.attempt))
    return tuple(RolloutResult(**row.result) for row in rows)
