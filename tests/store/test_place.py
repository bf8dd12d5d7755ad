"""Tests of where a run's database may be, of its record, and of its password."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import make_url
from worlds.faults.mounts import fuse_mount
from worlds.runs.run_driver import small_config
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service.config.file import ConfigError, dump_config, load_config
from service.launch.run_dir import RunDir, check_new, check_resumable, place_store
from service.store.errors import StoreError
from service.store.place import (
    REFUSED,
    StoreOptions,
    check_local,
    chosen_url,
    connection_url,
    recorded_url,
    refused_filesystem,
    sqlite_url,
)
from service.store.run_store import RunStore
from service.store.tables import RunKind

SECRET = "postgresql://user:geheim@db.example:6432/runs?sslmode=require"
RECORDED = "postgresql+psycopg://user@db.example:6432/runs?schema=rayloom-r-1&sslmode=require"


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYLOOM_DATABASE_URL", "RAYLOOM_DATABASE_URL_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_store_is_in_the_run_directory_by_default(tmp_path: Path) -> None:
    place = RunDir(path=tmp_path)
    place_store(place, "rayloom-r-1", StoreOptions())
    assert place.database_url == f"sqlite:///{tmp_path / 'rayloom.db'}"
    assert not place.store_file.exists()


def test_a_run_directory_with_its_database_may_be_copied(tmp_path: Path) -> None:
    place = RunDir(path=tmp_path / "run")
    place.path.mkdir()
    place_store(place, "rayloom-r-1", StoreOptions())
    RunStore(place.database_url).close()
    shutil.copytree(place.path, tmp_path / "copy")
    copy = RunDir(path=tmp_path / "copy")
    assert copy.database_url == f"sqlite:///{tmp_path / 'copy' / 'rayloom.db'}" and copy.has_run()


def test_a_copied_directory_with_the_originals_database_is_not_resumed(tmp_path: Path) -> None:
    place = RunDir(path=tmp_path / "run")
    place.path.mkdir()
    config = load_config(small_config(tmp_path))
    place.config_file.write_text(dump_config(config))
    place_store(place, "rayloom-r-1", StoreOptions(state_dir=tmp_path / "state"))
    store = RunStore(place.database_url)
    store.release(store.acquire_lease(owner="elsewhere:1", directory=str(place.path)).term)
    store.close()
    check_resumable(place, config)
    shutil.copytree(place.path, tmp_path / "copy")
    copy = RunDir(path=tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"copy: its database .* belongs to the run in .*/run,"):
        check_resumable(copy, config)
    # If the original directory is gone, the run was moved and can be resumed.
    shutil.rmtree(place.path)
    check_resumable(copy, config)


def test_a_state_directory_is_recorded_and_contains_one_run(tmp_path: Path) -> None:
    options = StoreOptions(state_dir=tmp_path / "state")
    place, other = RunDir(path=tmp_path / "one"), RunDir(path=tmp_path / "two")
    for each in (place, other):
        each.path.mkdir()
    place_store(place, "rayloom-one", options)
    assert place.database_url == f"sqlite:///{tmp_path / 'state' / 'rayloom.db'}"
    assert not place.has_run()
    RunStore(place.database_url).close()
    assert place.has_run()
    with pytest.raises(ConfigError, match=r"holds a run already.*choose another --state-dir"):
        place_store(other, "rayloom-two", options)
    # The choice is kept.
    place_store(place, "rayloom-one", StoreOptions())
    assert place.database_url == f"sqlite:///{tmp_path / 'state' / 'rayloom.db'}"


def test_the_record_of_a_url_has_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_DATABASE_URL", SECRET)
    url = chosen_url(tmp_path, "rayloom-r-1", StoreOptions())
    assert make_url(url) == make_url(RECORDED)
    assert connection_url(make_url(url)).password == "geheim"
    # The password is used only for the server and the database of the environment.
    moved = connection_url(make_url(url.replace("db.example", "evil.example")))
    assert (moved.host, moved.password) == ("db.example", "geheim")
    assert connection_url(make_url(url.replace("/runs", "/other"))).password is None
    (tmp_path / "store.json").write_text(json.dumps({"url": url}))
    assert make_url(recorded_url(tmp_path / "store.json")) == make_url(RECORDED)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://user:p1@db.example:5432/runs",
        "postgresql://v-k8s-def:p2@db.example:6432/runs",
        "postgresql://user:p1@other.example:6432/runs",
        "postgresql://user:p1@db.example/runs",
        "postgresql://user:p1@db.example:6432/runs?sslmode=verify-full&sslrootcert=/ca.pem",
        "postgres://user:p1@db.example:6432/runs?schema=of-another-run",
        "postgresql://db.example/runs?user=x&password=p3",
    ],
)
def test_server_user_and_tls_come_from_the_environment_schema_from_the_record(
    given: str,
) -> None:
    found = connection_url(make_url(RECORDED), {"RAYLOOM_DATABASE_URL": given})
    own = make_url(given)
    assert (found.host, found.port, found.username) == (own.host, own.port, own.username)
    assert found.database == "runs" and found.drivername == "postgresql+psycopg"
    assert found.password == (own.password or own.query.get("password"))
    tls = {key: value for key, value in own.query.items() if key not in ("password", "schema")}
    assert dict(found.query) == {**tls, "schema": "rayloom-r-1"}


@pytest.mark.parametrize("given", ["", "postgresql://user:p@db.example:6432/other"])
def test_the_url_of_another_database_changes_nothing(given: str) -> None:
    environ = {"RAYLOOM_DATABASE_URL": given} if given else {}
    assert connection_url(make_url(RECORDED), environ) == make_url(RECORDED)


def test_a_run_can_continue_with_another_user_and_server(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunDir(path=tmp_path / "run")
    place.path.mkdir()
    url = postgresql_server.url
    monkeypatch.setenv("RAYLOOM_DATABASE_URL", url.replace("@", f":{quote(PASSWORD)}@"))
    place_store(place, "rayloom-rotated-1", StoreOptions())
    store = RunStore(place.database_url)
    store.release(store.acquire_lease(owner="a").term)
    store.close()
    with postgresql_server.connect() as connection:
        connection.execute("CREATE ROLE rotated LOGIN SUPERUSER PASSWORD 'geheim'")
    try:
        record = json.loads(place.store_file.read_text())
        # As after a restore, no server answers at the recorded address.
        record["url"] = record["url"].replace(f":{postgresql_server.port}/", ":1/")
        place.store_file.write_text(json.dumps(record))
        moved = url.replace("runs@", "rotated:geheim@") + "?sslmode=prefer"
        monkeypatch.setenv("RAYLOOM_DATABASE_URL", moved)
        assert place.has_run()
        store = RunStore(place.database_url)
        lease = store.acquire_lease(owner="b")
        assert lease.term == 2
        store.release(lease.term)
        store.close()
        assert "geheim" not in place.store_file.read_text()
    finally:
        with postgresql_server.connect() as connection:
            connection.execute("DROP OWNED BY rotated CASCADE; DROP ROLE rotated")


def test_a_state_directory_takes_precedence_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_DATABASE_URL", SECRET)
    url = chosen_url(tmp_path, "r", StoreOptions(state_dir=tmp_path / "state"))
    assert url == f"sqlite:///{tmp_path / 'state' / 'rayloom.db'}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (StoreOptions(database_url=SECRET), "got a password.*RAYLOOM_DATABASE_URL"),
        (StoreOptions(database_url="postgresql://db/runs?password=geheim"), "got a password"),
        (StoreOptions(database_url="mysql://u:geheim@db/runs"), "got a URL of mysql, expected"),
        (StoreOptions(database_url="geheim"), "got no URL, expected postgresql://"),
        (StoreOptions(database_url="postgresql://db"), "expected postgresql://USER@HOST"),
        (StoreOptions(database_url="postgresql://db/a", state_dir=Path("x")), "got both"),
    ],
)
def test_an_invalid_store_is_refused_without_showing_its_password(
    options: StoreOptions, words: str
) -> None:
    with pytest.raises(StoreError, match=words) as refused:
        options.check()
    assert "geheim" not in str(refused.value)


MYSQL = '{"url": "mysql://host/database"}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 3}', '{"url": "geheim"}', MYSQL])
def test_an_unreadable_record_is_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    place = RunDir(path=tmp_path)
    place.store_file.write_text(text)
    with pytest.raises(ConfigError, match=r"store\.json cannot be read"):
        check_resumable(place, load_config(small_config(tmp_path)))


def test_two_runs_of_one_postgresql_database_are_separate(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    options = StoreOptions(database_url=postgresql_server.url)
    config = load_config(small_config(tmp_path))
    terms = []
    for name in ("one", "two"):
        place = RunDir(path=tmp_path / name)
        place.path.mkdir()
        check_new(place)
        place_store(place, f"rayloom-{tmp_path.name}-{name}", options)
        assert PASSWORD not in place.store_file.read_text() and not place.has_run()
        with pytest.raises(ConfigError, match=f"there is no run.*schema=.*{name}"):
            check_resumable(place, config)
        store = RunStore(place.database_url)
        terms.append(store.acquire_lease(owner="a", kind=RunKind.SERVE).term)
        store.close()
        with pytest.raises(ConfigError, match="begun by `rayloom serve`, got `rayloom train`"):
            check_resumable(place, config)
        with pytest.raises(ConfigError, match="holds a run"):
            check_new(place)
    assert terms == [1, 1]
    # The directory was removed, but the schema still exists.
    again = RunDir(path=tmp_path / "again")
    again.path.mkdir()
    with pytest.raises(ConfigError, match=r"holds a run already.*drop that schema"):
        place_store(again, f"rayloom-{tmp_path.name}-one", options)


def test_a_silent_store_is_reported_at_resume(tmp_path: Path) -> None:
    place = RunDir(path=tmp_path)
    url = "postgresql+psycopg://runs@127.0.0.1:1/postgres?schema=r"
    place.store_file.write_text(json.dumps({"url": url}))
    with pytest.raises(ConfigError, match=r"--resume .*127\.0\.0\.1:1/postgres.*refused"):
        check_resumable(place, load_config(small_config(tmp_path)))


def test_sqlite_on_fuse_is_refused_with_a_remedy(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    place = RunDir(path=tmp_path)
    words = "would be on FUSE.*--state-dir.*--database-url"
    with fuse_mount(mounted):
        assert refused_filesystem(mounted / "not" / "there") == "FUSE"
        with pytest.raises(StoreError, match=words):
            RunStore(sqlite_url(mounted))
        with pytest.raises(ConfigError, match=words):
            place_store(place, "r", StoreOptions(state_dir=mounted))
        # The check does not apply to a server.
        check_local(RECORDED)
    assert refused_filesystem(tmp_path / "not" / "there") is None
    assert not place.store_file.exists()


def test_shared_file_systems_are_refused_and_local_ones_are_not() -> None:
    assert {"NFS", "CIFS", "SMB2", "FUSE", "9p", "Ceph", "Lustre"} <= set(REFUSED.values())
    # The local file systems are ext4, XFS, btrfs, tmpfs, ZFS, overlay and F2FS.
    local = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x2FC12FC1, 0x794C7630, 0xF2F52010}
    assert not local & REFUSED.keys()
