"""Tests of a store that does not answer for a while: the run waits, and writes once."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, update
from worlds.builders.record_builders import step_record
from worlds.faults.breaking_proxy import breaking_proxy
from worlds.faults.mounts import fill, small_disk
from worlds.parts.submission_service import request
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer, postgresql

from service.store import tables
from service.store.database import PATIENCE_S
from service.store.errors import StoreError
from service.store.lineage import read_history
from service.store.place import schema_name
from service.store.read_only import ReadOnlyStore, has_run
from service.store.run_store import RunStore
from service.store.submissions import SubmissionStore, packed


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_a_run_waits_for_a_restart_of_postgresql_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with postgresql(tmp_path_factory.mktemp("restarted") / "server") as server:
        store = RunStore(server.store_url("rayloom-restarted"))
        term = store.acquire_lease(owner="elsewhere:1").term
        was_stopped, is_back = threading.Event(), threading.Event()

        def restart() -> None:
            was_stopped.set()
            server.stop(number)
            time.sleep(0.5)
            server.start()
            is_back.set()

        restarting = threading.Thread(target=restart)
        step = 0
        with caplog.at_level(logging.WARNING, logger="rayloom.store"):
            logging.getLogger("rayloom").propagate = True
            restarting.start()
            while not is_back.is_set() or step < 20:
                step += 1
                store.add_step(step_record(step), term=term, new_events=())
            restarting.join()
        assert [record.step for record in read_history(store).steps] == list(range(1, step + 1))
        assert "retrying for 60 s" in caplog.text and "answers again, after" in caplog.text
        assert PASSWORD not in caplog.text
        store.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_with_a_broken_connection_is_made_once(
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with breaking_proxy(postgresql_server.port) as proxy:
        place = postgresql_server.store_url(schema_name(str(tmp_path)))
        store = RunStore(
            place.replace(f":{postgresql_server.port}/", f":{proxy.port}/") + "&sslmode=disable"
        )
        term = store.acquire_lease(owner="elsewhere:1").term
        submissions = SubmissionStore(store)
        for name in ("a", "b", "c"):
            proxy.arm(when=when)
            [accepted] = submissions.add([packed(request(name))], term=term)
            proxy.arm(when=when)
            submissions.bind({f"group-{name}": name}, term=term)
            assert accepted.id == name
        assert proxy.num_broken == 6
        found = submissions.read()
        assert [item.id for item in found.submissions] == ["a", "b", "c"]
        assert len(found.bindings) == 3
        store.close()


@pytest.mark.proof
@pytest.mark.slow
def test_an_interrupted_read_is_repeated(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with breaking_proxy(postgresql_server.port) as proxy:
        place = postgresql_server.store_url(schema_name(str(tmp_path)))
        url = place.replace(f":{postgresql_server.port}/", f":{proxy.port}/") + "&sslmode=disable"
        store = RunStore(url)
        store.acquire_lease(owner="elsewhere:1")
        num_looks = 0

        def look(connection: Connection) -> int:
            nonlocal num_looks
            num_looks += 1
            connection.execute(select(tables.steps)).all()
            if num_looks == 1:
                proxy.cut()
                threading.Timer(1.0, proxy.mend).start()
            return len(connection.execute(select(tables.leases)).all())

        assert store.read(look) == 1 and num_looks == 2
        # A check of whether there is a run may wait for the server too.
        proxy.cut()
        with pytest.raises(StoreError):
            has_run(url, patience_s=0.0)
        threading.Timer(1.0, proxy.mend).start()
        assert has_run(url, patience_s=PATIENCE_S)
        store.close()


def test_a_run_waits_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, kib=1024):
        store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
        term = store.acquire_lease(owner="elsewhere:1").term
        filler = tmp_path / "filler"
        fill(filler)
        freeing = threading.Timer(1.0, filler.unlink)
        freeing.start()
        assert store.away_s == 0.0
        seen = watched(freeing, store)
        for step in range(1, 6):
            store.add_step(step_record(step), term=term, new_events=())
        freeing.join()
        # While the store waits, `away_s` shows for how long.
        assert max(seen()) > 0.3 and store.away_s == 0.0
        assert [record.step for record in read_history(store).steps] == [1, 2, 3, 4, 5]
        store.close()


def watched(timer: threading.Timer, store: RunStore) -> Callable[[], list[float]]:
    """Record `away_s` until the timer ends; return a function that returns the values."""
    found: list[float] = []

    def watch() -> None:
        while timer.is_alive():
            found.append(store.away_s)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()

    def seen() -> list[float]:
        watching.join()
        return found

    return seen


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_removed_moved_or_replaced_database_is_reported_at_once(tmp_path: Path, how: str) -> None:
    file = tmp_path / "run.db"
    store = RunStore(f"sqlite:///{file}")
    term = store.acquire_lease(owner="elsewhere:1").term
    store.add_step(step_record(1), term=term, new_events=())
    if how == "replaced":
        shutil.copy(file, tmp_path / "copy.db")
        (tmp_path / "copy.db").replace(file)
    elif how == "moved":
        file.rename(tmp_path / "moved.db")
    else:
        file.unlink()
    with pytest.raises(StoreError, match=r"run\.db was removed, moved or replaced .*put it back"):
        store.add_step(step_record(2), term=term, new_events=())
    if how == "moved":
        (tmp_path / "moved.db").rename(file)
        store.add_step(step_record(2), term=term, new_events=())
        assert [record.step for record in read_history(store).steps] == [1, 2]
    store.close()


def test_a_store_that_stays_unavailable_ends_the_wait_with_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path, kib=512):
        store = RunStore(f"sqlite:///{tmp_path / 'run.db'}", patience_s=1.5)
        term = store.acquire_lease(owner="elsewhere:1").term
        fill(tmp_path / "filler")
        words = r"could not be written for \d s .*; once it answers, resume the run with --resume$"
        with pytest.raises(StoreError, match=words):
            for step in range(1, 200):
                store.add_step(step_record(step), term=term, new_events=())
        # Later writes, which end the run, fail with the same error without waiting again. A read
        # works.
        assert store.newest_term() == term
        with pytest.raises(StoreError, match=words):
            store.write(term, partial(grow, num_bytes=1 << 20))
        (tmp_path / "filler").unlink()
        store.release(term)
        store.close()


def grow(connection: Connection, *, num_bytes: int) -> None:
    connection.execute(update(tables.leases).values(owner="x" * num_bytes))


def test_an_unreachable_server_is_reported_without_the_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, postgresql_server: PostgresqlServer
) -> None:
    monkeypatch.setenv("PGPASSWORD", "a wrong password")
    place = postgresql_server.store_url(schema_name(str(tmp_path)))
    for url, words in (
        (place, "password authentication failed"),
        (place.replace(f":{postgresql_server.port}/", ":1/"), "onnection refused"),
    ):
        with pytest.raises(StoreError, match=words) as refused:
            ReadOnlyStore(url)
        assert "expected a server that answers" in str(refused.value)
        assert "wrong password" not in str(refused.value)
