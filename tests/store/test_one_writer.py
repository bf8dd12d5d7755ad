"""Tests of the lease, on either database: a run has one writer, and readers do not wait."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update
from worlds.builders.record_builders import step_record
from worlds.builders.store_builders import OpenStore, write_under_way
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service.store import tables
from service.store.errors import LeaseHeld, LeaseLost, StoreError
from service.store.lineage import read_history
from service.store.place import schema_name
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore
from service.store.tables import RunKind

HOUR_S = 3600.0


def test_exactly_one_of_several_hosts_gets_a_free_run(tmp_path: Path, opened: OpenStore) -> None:
    stores = [opened(tmp_path) for _ in range(4)]
    at_once = threading.Barrier(len(stores))

    def take(number: int) -> str:
        at_once.wait()
        try:
            stores[number].acquire_lease(owner=f"host-{number}:1", unless_held=True)
        except LeaseHeld as held:
            return str(held)
        return ""

    with ThreadPoolExecutor(len(stores)) as pool:
        answers = list(pool.map(take, range(len(stores))))
    assert answers.count("") == 1
    winner = f"host-{answers.index('')}:1"
    assert all(f"held by {winner} (term 1, since" in each for each in answers if each)
    assert stores[0].newest_term() == 1


def test_an_owner_known_to_be_dead_can_be_replaced(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    store.acquire_lease(owner="elsewhere:1")
    with pytest.raises(LeaseHeld, match="last sign of life was 0 s ago"):
        store.acquire_lease(owner="here:2", unless_held=True)
    assert store.acquire_lease(owner="here:2", unless_held=True, replaces="elsewhere:1").term == 2


def test_a_host_that_lost_the_run_does_not_take_it_back(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    own = store.acquire_lease(owner="here:1").term
    other = store.acquire_lease(owner="elsewhere:2").term
    store.release(other)
    with pytest.raises(LeaseLost, match=r"taken over by elsewhere:2 \(term 2, since 20"):
        store.acquire_lease(owner="here:1", follows=own)
    assert store.newest_term() == other


def test_a_late_renewal_does_not_undo_a_release(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="elsewhere:1").term
    store.release(term)
    store.renew(term)
    assert store.live_owner() is None


def test_a_wrong_clock_of_a_host_does_not_make_a_live_owner_look_dead(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    store = RunStore(postgresql_server.store_url(schema_name(str(tmp_path))))
    store.acquire_lease(owner="elsewhere:1")
    now = time.time
    for ahead_s in (HOUR_S, -HOUR_S):
        monkeypatch.setattr("time.time", lambda ahead_s=ahead_s: now() + ahead_s)
        with pytest.raises(LeaseHeld):
            store.acquire_lease(owner="here:2", unless_held=True)
        monkeypatch.setattr("time.time", now)
    with write_under_way(store) as connection:
        silent = func.date_part("epoch", func.clock_timestamp()) - 31
        connection.execute(update(tables.leases).values(renewed_at=silent))
    # The server may have started less than 31 s ago; no owner could renew before that.
    owner = store.live_owner()
    started_s = 0.0 if owner is None else owner.silent_s
    assert owner is None or started_s < 30
    store.close()


def test_a_reader_and_the_writer_do_not_wait_for_each_other(
    tmp_path: Path, opened: OpenStore
) -> None:
    writer, place = opened(tmp_path), opened(tmp_path)
    url = place._database._engine.url.render_as_string(hide_password=False)
    if place._database.schema is not None:
        url += f"?schema={place._database.schema}"
    term = writer.acquire_lease(owner="elsewhere:1").term
    writer.add_step(step_record(1), term=term, new_events=())
    looking = ReadOnlyStore(url)
    with write_under_way(writer) as writing:
        # A call that needs the write lock would wait for this thread forever.
        looking.check()
        assert (looking.newest_term(), looking.kind()) == (term, RunKind.TRAIN)
        assert looking.live_owner() is not None and looking.checkpoints() == []
        assert place.newest_term() == term and place.live_owner() is not None
        place.check_lease(term)
        # A host that waits for the run opens the database and tries until the run is free.
        waiting = RunStore(url, patience_s=0.0)
        with pytest.raises(LeaseHeld):
            waiting.acquire_lease(owner="here:2", unless_held=True)
        waiting.close()
        writing.execute(select(tables.leases))

    def look_twice(connection: Connection) -> int:
        connection.execute(select(tables.steps)).all()
        writer.add_step(step_record(2), term=term, new_events=())
        return len(connection.execute(select(tables.steps)).all())

    # A read sees one state of the database, even if it takes long.
    assert looking.read(look_twice) == 1
    looking.close()


def test_a_reader_cannot_write(tmp_path: Path, opened: OpenStore) -> None:
    opened(tmp_path).acquire_lease(owner="elsewhere:1")
    database = tmp_path / "run.db"
    if not database.exists():
        pytest.skip("the PostgreSQL server enforces it")
    looking = ReadOnlyStore(database)
    with pytest.raises(StoreError, match="readonly"):
        looking.read(lambda connection: connection.execute(update(tables.leases).values(owner="x")))
    looking.close()


@pytest.mark.parametrize(("first", "second"), [("train", "serve"), ("serve", "train")])
def test_the_kind_of_a_run_cannot_change(
    tmp_path: Path, opened: OpenStore, first: str, second: str
) -> None:
    store = opened(tmp_path)
    store.acquire_lease(owner="a", kind=RunKind(first))
    with pytest.raises(StoreError, match=f"begun by `rayloom {first}`, got `rayloom {second}`"):
        store.acquire_lease(owner="b", kind=RunKind(second))
    assert store.newest_term() == 1 and store.kind() is RunKind(first)


def test_a_copy_of_only_the_database_file_is_complete_after_the_end(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    term = store.acquire_lease(owner="elsewhere:1").term
    for step in range(1, 21):
        store.add_step(step_record(step), term=term, new_events=())
    # A reader has the database open while the run ends.
    looking = ReadOnlyStore(tmp_path / "run.db")
    looking.read(lambda connection: connection.execute(select(tables.formats)).all())

    def close_and_copy(_connection: Connection) -> None:
        store.close()
        shutil.copy(tmp_path / "run.db", tmp_path / "copy.db")

    looking.read(close_and_copy)
    looking.close()
    copy = ReadOnlyStore(tmp_path / "copy.db")
    assert [record.step for record in read_history(copy).steps] == list(range(1, 21))
    copy.close()


def test_several_threads_can_write(tmp_path: Path, opened: OpenStore) -> None:
    store = opened(tmp_path)
    term = store.acquire_lease(owner="elsewhere:1").term

    def write(step: int) -> None:
        store.add_step(step_record(step), term=term, new_events=())
        store.renew(term)
        read_history(store)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 25)))
    assert len(read_history(store).steps) == 24
