"""Tests of the store's thread: the event loop is not blocked, and each write is made once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from worlds.builders.record_builders import step_record

from actors.metrics import Metrics
from service.run.recorder import RunRecorder
from service.store.errors import LeaseLost
from service.store.lineage import read_history
from service.store.run_store import RunStore
from service.worker_thread import WorkerThread

TICK_S = 0.02


async def begun(
    directory: Path, metrics: Metrics, thread: WorkerThread
) -> tuple[RunRecorder, RunStore]:
    store = RunStore(f"sqlite:///{directory / 'run.db'}")
    recorder = RunRecorder(store, metrics, thread=thread, num_steps=10)
    await recorder.begin_term(store.acquire_lease(owner="test"))
    return recorder, store


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the write lock of the database."""
    with closing(sqlite3.connect(directory / "run.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def test_the_event_loop_continues_while_the_database_is_locked(tmp_path: Path) -> None:
    recorder, store = await begun(tmp_path, Metrics(), WorkerThread("store"))
    with locked(tmp_path):
        writing = asyncio.create_task(recorder.step(step_record(1)))
        # The event loop runs at each of these pauses.
        for _ in range(20):
            await asyncio.sleep(TICK_S)
        assert not writing.done()
    await writing
    assert [step.step for step in read_history(store).steps] == [1]


async def test_a_write_whose_caller_is_cancelled_is_made_once_and_counted(tmp_path: Path) -> None:
    metrics, thread = Metrics(), WorkerThread("store")
    recorder, store = await begun(tmp_path, metrics, thread)
    with locked(tmp_path):
        steps = [asyncio.create_task(recorder.step(step_record(number))) for number in (1, 2)]
        await asyncio.sleep(TICK_S)
        for step in steps:
            step.cancel()
        await asyncio.wait(steps)
        assert all(step.cancelled() for step in steps)
    # The next term begins after both writes.
    await recorder.begin_term(await thread.call(store.acquire_lease, owner="next"))
    query = text("SELECT term, step FROM steps ORDER BY step")
    rows = store.read(lambda connection: connection.execute(query).all())
    assert rows == [(1, 1), (1, 2)]
    assert metrics.values.get_sample_value("rayloom_train_steps_total") == 2


async def test_a_failed_write_is_logged_only_if_its_caller_is_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, store = await begun(tmp_path, Metrics(), WorkerThread("store", expected=LeaseLost))
    store.acquire_lease(owner="another")
    with caplog.at_level(logging.DEBUG, logger="rayloom.store"):
        with pytest.raises(LeaseLost):
            await recorder.step(step_record(1))
        assert caplog.messages == []
        with locked(tmp_path):
            step = asyncio.create_task(recorder.step(step_record(1)))
            await asyncio.sleep(TICK_S)
            step.cancel()
            await asyncio.wait([step])
        async with asyncio.timeout(30.0):
            while not caplog.messages:
                await asyncio.sleep(TICK_S)
    [logged] = caplog.messages
    assert logged.startswith("LeaseLost: taken over by another")
