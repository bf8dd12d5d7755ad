"""SQLAlchemy's engines for a run's database, in SQLite and in PostgreSQL."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import NullPool

from service.access.secret_files import SecretFile
from service.store.errors import StoreError
from service.store.place import changed_url, connection_url, url_file

# Longest time in seconds that one attempt waits for a lock.
BUSY_S = 10.0
# Seconds after which PostgreSQL ends an idle transaction, so that a frozen supervisor does not
# block others.
IDLE_IN_TRANSACTION_S = 20.0


def schema_of(url: URL) -> str | None:
    found = url.query.get("schema")
    return found if isinstance(found, str) else None


def postgresql_engine(url: URL, schema: str | None, count_failure: Callable[[], object]) -> Engine:
    defaults = {
        "connect_timeout": 10,
        "application_name": "rayloom",
        # A dead connection is noticed within half a minute.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }
    without_schema = url.difference_update_query(["schema"])
    connection = connection_url(without_schema)

    def arguments(target: URL) -> dict[str, Any]:
        given = {key: value for key, value in defaults.items() if key not in target.query}
        return {**given, "prepare_threshold": None}

    engine = create_engine(
        connection,
        connect_args=arguments(connection),
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        hide_parameters=True,
    )
    event.listen(engine, "connect", _prepare_postgresql)
    if (file := url_file()) is not None and without_schema.password is None:
        current = SecretFile(
            file,
            partial(changed_url, without_schema),
            value=connection,
            count_failure=count_failure,
        )
        _follow(engine, current, arguments)
    return engine.execution_options(schema_translate_map={None: schema}) if schema else engine


def _follow(
    engine: Engine, current: SecretFile[URL], arguments: Callable[[URL], dict[str, Any]]
) -> None:
    """Make an engine read the database's URL from the file again for each new connection."""

    def connect(dialect: Any, record: Any, positional: list[Any], named: dict[str, Any]) -> None:
        url = current.value()
        positional[:], fresh = dialect.create_connect_args(url)
        named.clear()
        named.update(fresh, **arguments(url))
        record.info["url"] = url

    def check_out(_connection: Any, record: Any, _proxy: Any) -> None:
        # Replace an open connection: the user in its URL may no longer exist.
        if record.info["url"] != current.value():
            raise DisconnectionError("the URL of the database has changed")

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "checkout", check_out)


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"SET lock_timeout = '{BUSY_S:.0f}s'")
    cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S:.0f}s'")
    # An acceptance must be on the disk before its answer, whatever the server's setting.
    cursor.execute(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') = 'off'"
    )
    cursor.close()
    connection.commit()


def sqlite_writer(url: URL, file: Path) -> Engine:
    def remember(_connection: Any, record: Any) -> None:
        record.info["opened"] = os.stat(file)

    engine = create_engine(url, hide_parameters=True)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "connect", remember)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def sqlite_reader(file: Path) -> Engine:
    """Return an engine that reads an SQLite file, and never changes it or makes a writer wait.

    The engine does not create a missing file. If there is a write-ahead log next to the file,
    SQLite still updates the index of the log (-shm).
    """

    engine = create_engine(
        "sqlite://",
        creator=partial(connect_reader, file),
        poolclass=NullPool,
        hide_parameters=True,
    )
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def connect_reader(file: Path) -> sqlite3.Connection:
    wal = file.with_name(f"{file.name}-wal")
    is_whole = not wal.exists() or wal.stat().st_size == 0
    # Without a log the file has all data; with "immutable" SQLite creates no index of a log.
    mode = "mode=ro&immutable=1" if is_whole else "mode=ro"
    uri = f"file:{quote(str(file))}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def check_in_place(connection: Connection, file: Path) -> None:
    """Check that an opened SQLite file is still at its path; writes to a moved file would be lost.

    Raises: StoreError.
    """
    try:
        is_there = os.path.samestat(os.stat(file), connection.info["opened"])
    except OSError:
        is_there = False
    if not is_there:
        raise StoreError(
            f"the database {file} was removed, moved or replaced while the run had it open, "
            "expected it to stay; put it back with its -wal file, or restore a copy, and resume "
            "with --resume"
        )


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver would begin transactions only at the first write, after the check of the lease.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_S * 1000:.0f}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
