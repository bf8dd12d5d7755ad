"""Tests of a database URL in a file that is replaced while the run uses the database."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import Connection, make_url, text
from worlds.servers.postgresql_server import PASSWORD, PostgresqlServer

from service.access.secret_files import FRESH_S
from service.launch.run_dir import RunDir, place_store
from service.store.errors import StoreError
from service.store.place import StoreOptions, changed_url
from service.store.run_store import RunStore


def user_of(connection: Connection) -> str:
    return str(connection.scalar(text("SELECT session_user")))


@pytest.mark.proof
@pytest.mark.slow
def test_a_run_uses_new_users_and_passwords_and_keeps_the_last_readable_one(
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file, num_failures = tmp_path / "database-url", 0

    def count() -> None:
        nonlocal num_failures
        num_failures += 1

    def give(user: str, password: str) -> None:
        url = make_url(postgresql_server.url).set(username=user, password=password)
        file.write_text(url.render_as_string(hide_password=False) + "\n")

    def as_admin(*statements: str) -> None:
        with postgresql_server.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    monkeypatch.setenv("RAYLOOM_DATABASE_URL_FILE", str(file))
    logging.getLogger("rayloom").propagate = True
    as_admin("CREATE ROLE one LOGIN SUPERUSER PASSWORD 'first'")
    as_admin("CREATE ROLE two LOGIN SUPERUSER PASSWORD 'second'")
    give("one", "first")
    place = RunDir(path=tmp_path / "run")
    place.path.mkdir()
    try:
        place_store(place, "rayloom-followed-1", StoreOptions())
        assert "first" not in place.store_file.read_text()
        store = RunStore(place.database_url, count_failure=count)
        term = store.acquire_lease(owner="a").term
        assert store.read(user_of) == "one"

        # Vault creates a new user, and the old one loses its rights.
        give("two", "second")
        as_admin("ALTER ROLE one NOLOGIN NOSUPERUSER")
        time.sleep(FRESH_S)
        assert store.read(user_of) == "two"

        # The same user gets another password, and all connections break.
        as_admin("ALTER ROLE two PASSWORD 'third'")
        give("two", "third")
        as_admin("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'two'")
        time.sleep(FRESH_S)
        store.renew(term)
        assert num_failures == 0

        # Without the file, or with another database in it, new connections use the last URL.
        other = make_url(postgresql_server.url).set(database="other", password="fourth")
        for num, given in enumerate((None, str(other)), start=1):
            file.unlink(missing_ok=True)
            if given is not None:
                file.write_text(given)
            as_admin("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'two'")
            time.sleep(FRESH_S)
            store.renew(term)
            assert store.read(user_of) == "two"
            assert num_failures == num
        store.release(term)
        store.close()
        for secret in (quote(PASSWORD), "first", "second", "third", "fourth"):
            assert secret not in caplog.text
        # Each change is logged once. Count records, because other tests may have added a handler.
        changes = [each for each in caplog.records if "its new value is in use" in each.message]
        assert len({id(each) for each in changes}) == 2
        assert "the last value stays in use" in caplog.text
    finally:
        as_admin("DROP OWNED BY one, two CASCADE", "DROP ROLE one, two")


def test_a_connection_waits_until_the_file_has_the_new_password(
    tmp_path: Path, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the password of the server first, and the mounted file a second later."""
    file = tmp_path / "database-url"
    right = make_url(postgresql_server.url).set(password=PASSWORD)
    file.write_text(str(right.set(password="old").render_as_string(hide_password=False)))
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    monkeypatch.setenv("RAYLOOM_DATABASE_URL_FILE", str(file))

    def replace() -> None:
        time.sleep(1.0)
        file.write_text(right.render_as_string(hide_password=False))

    later = threading.Thread(target=replace)
    later.start()
    store = RunStore(postgresql_server.store_url("rayloom-later"), patience_s=20.0)
    later.join()
    assert store.acquire_lease(owner="a").term == 1
    store.close()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RAYLOOM_DATABASE_URL": "postgresql://u:geheim@h/d"}, "got both, expected one of them"),
        ({}, "RAYLOOM_DATABASE_URL_FILE .*No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_at_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    monkeypatch.delenv("RAYLOOM_DATABASE_URL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYLOOM_DATABASE_URL_FILE", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match=message) as caught:
        StoreOptions().check()
    assert "geheim" not in str(caught.value)


def test_the_schema_in_the_file_is_ignored() -> None:
    recorded = make_url("postgresql+psycopg://user@db:5432/runs")
    found = changed_url(recorded, "postgres://v-1:p@moved:6432/runs?schema=other&sslmode=require")
    assert (found.host, found.username, found.password) == ("moved", "v-1", "p")
    assert dict(found.query) == {"sslmode": "require"}
    with pytest.raises(ValueError, match="expected runs: a run stays in its database"):
        changed_url(recorded, "postgresql://user:p@db/other")
