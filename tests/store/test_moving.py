"""Tests of moving a run to another database: all rows move, and the old one is read-only."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from sqlalchemy import insert, select
from worlds.builders.record_builders import step_record
from worlds.builders.store_builders import commit
from worlds.runs.run_driver import SMALL
from worlds.runs.stored_run import unpack_run
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service import VERSION
from service.cli.artifacts import move
from service.cli.commands import keys
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.errors import LeaseLost, StoreError
from service.store.leases import own_name
from service.store.moving import _plain, copy_run
from service.store.place import StoreOptions
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore

Rows = dict[str, list[dict[str, object]]]


@pytest.fixture
def to_server(postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> StoreOptions:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return StoreOptions(database_url=postgresql_server.url)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Create a run of two terms; the second continued from a checkpoint of the first."""
    run_dir = RunDir(path=tmp_path / "100% mine's")
    run_dir.path.mkdir()
    run_dir.config_file.write_text(yaml.safe_dump(SMALL))
    with closing(RunStore(run_dir.database_url)) as store:
        for term in (1, 2):
            store.acquire_lease(owner="gone:nobody")
            for step in (2 * term - 1, 2 * term):
                store.add_step(step_record(step), term=term, new_events=())
                commit(store, term=term, step=step)
        call = {"at": 1.0, "caller": "", "call": "x", "body": "", "status": 200, "answer": ""}
        for _ in range(3):
            store.write_of_no_term(lambda c: c.execute(insert(tables.admin_calls).values(call)))
        store.write_of_no_term(
            lambda c: c.execute(tables.admin_calls.delete().where(tables.admin_calls.c.id == 1))
        )
        feed = {"at": 1.0, "kind": "step", "number": 7}
        plain = _plain("feed")
        store.write_of_no_term(lambda c: c.execute(insert(plain).values(tenant="", **feed)))
        store.write_of_no_term(lambda c: c.execute(plain.delete()))
    return run_dir


def test_a_move_to_another_path_of_the_same_database_is_refused(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    link = run_dir.path.with_name("link")
    link.symlink_to(run_dir.path)
    before = rows_of(run_dir.database_url)
    for same in (link, run_dir.path / ".." / run_dir.path.name):
        with pytest.raises(ConfigError, match="already; expected another place"):
            move(run_dir.path, StoreOptions(state_dir=same))
    assert rows_of(run_dir.database_url) == before and not run_dir.store_file.exists()
    with closing(RunStore(run_dir.database_url)) as store:
        assert not store.is_fenced()


def rows_of(place: str) -> Rows:
    """Return all stored rows of a database without the identifiers of writers."""
    with closing(ReadOnlyStore(place)) as store:
        return store.read(
            lambda connection: {
                name: sorted(
                    (
                        {
                            key: value
                            for key, value in row.items()
                            if key not in ("last_write", "renewed_at")
                        }
                        for row in connection.execute(select(_plain(name))).mappings()
                    ),
                    key=str,
                )
                for name in tables.metadata.tables
            }
        )


def test_a_run_moves_to_postgresql_and_back_with_all_its_rows(
    run_dir: RunDir, to_server: StoreOptions
) -> None:
    old = run_dir.database_url
    assert "term 3" in move(run_dir.path, to_server)
    new = run_dir.database_url
    assert new.startswith("postgresql+psycopg://") and rows_of(new) == rows_of(old)
    with pytest.raises(ConfigError, match=r"is in postgresql.* already; expected another place"):
        move(run_dir.path, to_server)
    with closing(RunStore(new)) as store:
        lease = store.acquire_lease(owner="gone:nobody")
        assert lease.term == 4 and lease.parent is not None and lease.parent.step == 4
        commit(store, term=4, step=5)
        # The number of a removed row is not used again.
        given = insert(_plain("feed")).values(at=1.0, kind="step", tenant="")
        number = tables.feed.c.number
        result = store.write_of_no_term(lambda c: c.execute(given.returning(number)).scalar())
        assert result == 8
        assert [each.id for each in store.checkpoints()] == [5, 4, 3, 2, 1]
    assert "term 5" in move(run_dir.path, StoreOptions(state_dir=run_dir.path))
    assert run_dir.database_url == old and not run_dir.store_file.exists()
    assert rows_of(old) == rows_of(new)
    # The first database, which the run has left, is kept next to the new one.
    assert run_dir.database_file.with_name("rayloom.db.term-3.bak").is_file()
    with closing(RunStore(old)) as store:
        assert store.acquire_lease(owner="gone:nobody").term == 6
        result = store.write_of_no_term(lambda c: c.execute(given.returning(number)).scalar())
        assert result == 9
    # PostgreSQL still has the older copy of the run.
    with pytest.raises(ConfigError, match="holds a run already, expected none: drop that schema"):
        move(run_dir.path, to_server)
    assert run_dir.database_url == old


def test_nothing_can_write_to_the_database_that_a_run_has_left(
    run_dir: RunDir, to_server: StoreOptions
) -> None:
    left = run_dir.database_url
    for options in (to_server, StoreOptions(state_dir=run_dir.path / "state")):
        move(run_dir.path, options)
        with closing(RunStore(left)) as store:
            assert store.is_fenced() and store.newest_term() >= 3
            with pytest.raises(StoreError, match=r"cannot be written .*the run was moved to "):
                store.acquire_lease(owner="b")
            with pytest.raises(StoreError, match="the run was moved to"):
                commit(store, term=store.newest_term(), step=9)
        left = run_dir.database_url
    assert keys.listing(run_dir.path) == "the run has no named keys"


def test_a_held_run_is_not_moved(run_dir: RunDir, to_server: StoreOptions) -> None:
    with closing(RunStore(run_dir.database_url)) as store:
        store.acquire_lease(owner=own_name())
        with pytest.raises(ConfigError, match="the run is held by"):
            move(run_dir.path, to_server)
        commit(store, term=3, step=5)


def test_a_move_to_a_silent_server_leaves_the_run_in_place(run_dir: RunDir) -> None:
    options = StoreOptions(database_url="postgresql://runs@127.0.0.1:1/postgres")
    with pytest.raises(ConfigError, match=r"move: .*127\.0\.0\.1:1/postgres.*refused"):
        move(run_dir.path, options)
    assert not run_dir.store_file.exists()
    with closing(RunStore(run_dir.database_url)) as store:
        assert not store.is_fenced()
        assert store.acquire_lease(owner="b").term == 3


def test_a_failed_copy_leaves_the_old_database_writable(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "state" / "rayloom.db.part").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot be written .*expected a writable directory"):
        move(run_dir.path, StoreOptions(state_dir=tmp_path / "state"))
    with closing(RunStore(run_dir.database_url)) as store:
        assert not store.is_fenced()
        commit(store, term=3, step=5)


def test_the_next_move_completes_one_killed_before_its_record_was_written(
    run_dir: RunDir, to_server: StoreOptions
) -> None:
    with closing(RunStore(run_dir.database_url)) as store:
        store.acquire_lease(owner="gone:nobody")
        store.fence(3, "the run was moved to x")
        old = run_dir.database_url
        move(run_dir.path, to_server)
        new = run_dir.database_url
        # Restore the state after a complete copy, before the record was written.
        run_dir.store_file.unlink()
        copy_run(store, new)
    move(run_dir.path, to_server)
    assert run_dir.database_url == new and rows_of(new) == rows_of(old)


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_next_move_completes_one_killed_during_its_copy(
    run_dir: RunDir, to_server: StoreOptions, kind: str
) -> None:
    with closing(RunStore(run_dir.database_url)) as store:
        for number in range(200):
            call = {"at": 1.0, "caller": "", "call": "x", "body": "y" * 50_000, "status": 1}
            rows = [{**call, "answer": str(100 * number + each)} for each in range(10)]
            store.write_of_no_term(lambda c, rows=rows: c.execute(insert(tables.admin_calls), rows))
    old = run_dir.database_url
    options = to_server if kind == "postgresql" else StoreOptions(state_dir=run_dir.path / "state")
    program = (
        "import sys; from pathlib import Path; from service.cli.artifacts import move; "
        "from service.store.place import StoreOptions; "
        f"move(Path(sys.argv[1]), {options!r})"
    ).replace("PosixPath", "Path")
    child = subprocess.Popen([sys.executable, "-c", program, str(run_dir.path)])
    try:
        with closing(ReadOnlyStore(old)) as looking:
            deadline = time.monotonic() + 60
            while not looking.is_fenced():
                assert time.monotonic() < deadline and child.poll() is None
                time.sleep(0.002)
    finally:
        child.kill()
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert run_dir.database_url == old
    with closing(RunStore(old)) as store, pytest.raises(StoreError, match="was moved to"):
        commit(store, term=3, step=9)
    move(run_dir.path, options)
    assert run_dir.database_url != old and rows_of(run_dir.database_url) == rows_of(old)


def test_an_older_run_with_sessions_and_uploads_can_be_moved(
    tmp_path: Path, to_server: StoreOptions
) -> None:
    run_dir = unpack_run(tmp_path)
    old = run_dir.database_url
    move(run_dir.path, to_server)
    there = rows_of(run_dir.database_url)
    assert there == rows_of(old) and there["session_turns"] and there["uploads"]
    assert there["format"][0]["number"] == tables.FORMAT
    assert there["versions"] == [{"term": 2, "version": VERSION}]
    with closing(RunStore(old)) as store, pytest.raises(LeaseLost):
        store.check_lease(1)
