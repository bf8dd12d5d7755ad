"""Rows of a run's database for tests that need a run, whatever its contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection

from actors.trajectory_queue.ledger import LedgerEvent
from actors.trajectory_queue.messages import QueueSnapshot
from actors.trajectory_queue.state import QueueState
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore
from worlds.builders.queue_builders import make_settings

# A function that opens the store in a directory once more.
OpenStore = Callable[[Path], RunStore]


def queue_snapshot(step: int = 0) -> QueueSnapshot:
    """Return a snapshot of a queue without groups, different for each step."""
    return replace(QueueState(make_settings()).snapshot(), replacements={step: 1})


def committed(step: int, directory: str = "") -> Checkpoint:
    """Return a checkpoint without storing it. directory: name of its directory, else TERM-STEP."""
    return Checkpoint(
        id=step + 1, term=1, step=step, policy_version=step, directory=directory or f"1-{step}",
        last_event_seq=-1, committed_at=0.0,
    )  # fmt: skip


def commit(
    store: RunStore,
    *,
    term: int,
    step: int,
    directory: str | None = None,
    last_event_seq: int = -1,
    new_events: Sequence[LedgerEvent] = (),
) -> None:
    """Commit a checkpoint of step `step`. directory: name of its directory, else TERM-STEP."""
    store.commit_checkpoint(
        term=term,
        step=step,
        policy_version=step,
        directory=directory or f"{term}-{step}",
        queue_snapshot=queue_snapshot(step),
        new_events=new_events,
        last_event_seq=last_event_seq,
    )


@contextmanager
def write_under_way(store: RunStore) -> Iterator[Connection]:
    """Hold a write transaction of the store, which excludes all others; commit it at the end."""
    with store._database._writing_connection() as connection:
        yield connection
