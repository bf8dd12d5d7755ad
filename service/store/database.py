"""A run's database: connections, transactions, and retries while the database does not answer.

Invariants: a read never takes the write lock; writes of all processes are done one after the other;
each write is done once, even if its connection breaks during the commit. `read_only` and `moving`
use this module, and several threads may call it.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Float, func, inspect, make_url, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from service.store import tables
from service.store.database_engines import (
    check_in_place,
    connect_reader,
    postgresql_engine,
    schema_of,
    sqlite_reader,
    sqlite_writer,
)
from service.store.errors import Damaged, StoreError
from service.store.place import shown, sqlite_file

log = logging.getLogger("rayloom.store")

# Seconds to wait for a database that does not answer. A restart of PostgreSQL takes seconds.
PATIENCE_S = 60.0
# The trigger that refuses the writes to a database whose run was moved.
FENCE = "rayloom_moved"
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_SQLITE_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PROTOCOL,
}
# Connections, resources (a full disk is 53100), start and stop of the server, its disk, a time-out
# of a lock, conflicting transactions, a standby that is not promoted yet, a session that was ended
# because it was idle.
_POSTGRESQL_PASSING = ("08", "53", "57P", "58", "55P03", "40", "25006", "25P03")
Result = TypeVar("Result")


class Database:
    """Connects to the database at a URL (`service.store.place`), for reads and writes with retries.

    Its methods raise StoreError instead of the driver's errors.
    """

    def __init__(
        self,
        url: str,
        *,
        is_read_only: bool,
        patience_s: float = PATIENCE_S,
        count_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Store the URL without connecting; the first use connects.

        Args: patience_s: seconds to wait for a database that does not answer. count_failure: called
        each time that the file with PostgreSQL's URL, if there is one, cannot be read.
        """
        parsed = make_url(url)
        self.location = shown(parsed)
        self.schema = schema_of(parsed)
        self._file = sqlite_file(parsed)
        self._is_read_only = is_read_only
        self._patience_s = patience_s
        self._given_up: dict[str, StoreError] = {}
        """The error of each operation that failed for too long; later calls try it only once."""
        self._away_since: dict[int, float] = {}
        """For each waiting thread the time (time.monotonic) at which it began to wait."""
        self._writing = threading.Lock()
        # Distinguishes the writes of this process from those of others.
        self._name, self._num_writes = uuid4().hex, 0
        if self._file is None:
            self._engine = postgresql_engine(parsed, self.schema, count_failure)
        elif is_read_only:
            self._engine = sqlite_reader(self._file)
        else:
            self._engine = sqlite_writer(parsed, self._file)

    @property
    def is_sqlite(self) -> bool:
        return self._file is not None

    @property
    def away_s(self) -> float:
        """The seconds for which the database has not answered; 0 if it answers."""
        since = list(self._away_since.values())
        return time.monotonic() - min(since) if since else 0.0

    def close(self) -> None:
        """Merge the write-ahead log of an SQLite database into its file; end all connections."""
        if self.is_sqlite and not self._is_read_only:
            # Closing the last connection would do this, but another process may be reading the run.
            # If it fails, the log remains, and the next process that opens the database uses it.
            with (
                suppress(DBAPIError, sqlite3.Error),
                self._engine.connect() as connection,
            ):
                raw: Any = connection.connection.dbapi_connection
                raw.execute("PRAGMA busy_timeout=1000")
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.dispose()

    def dispose(self) -> None:
        """End all connections."""
        self._engine.dispose()

    def read(self, body: Callable[[Connection], Result]) -> Result:
        """Call `body` with a connection that sees one state of the database, and return the result.

        Args: body: must only use the connection, because it is called again if the database fails.
        Raises: StoreError; what body raises.
        """

        def attempt() -> Result:
            with self._reading_connection() as connection:
                return body(connection)

        return self._with_retries("read", attempt)

    def write(self, body: Callable[[Connection], Result]) -> Result:
        """Call `body` in a transaction that excludes other writers, commit, and return the result.

        Args: body: must only use the connection, because it is called again if the database fails
        before the commit is confirmed.
        Raises: StoreError; what body raises.
        """
        with self._writing:
            self._num_writes += 1
            mark = f"{self._name}-{self._num_writes}"
            answers: list[Result] = []

            def attempt() -> Result:
                with self._writing_connection() as connection:
                    # Only an earlier attempt can have stored this mark.
                    if answers and _last_write(connection) == mark:
                        return answers[-1]
                    answers.append(body(connection))
                    connection.execute(update(tables.formats).values(last_write=mark))
                return answers[-1]

            return self._with_retries("written", attempt)

    def prepare(
        self, is_ready: Callable[[Connection], bool], create: Callable[[Connection], None]
    ) -> None:
        """Call `create`, which creates the tables, unless `is_ready` returns true.

        No other process writes while `create` runs. But another process may create the tables after
        the call of `is_ready`, so `create` must accept existing tables.
        Raises: StoreError; what the two functions raise.
        """

        def attempt() -> None:
            with self._reading_connection() as connection:
                if is_ready(connection):
                    return
            self._create(create)

        self._with_retries("opened", attempt)

    def now(self, connection: Connection) -> float:
        """Return the seconds since 1970 by the clock that all users of the database share."""
        if self.is_sqlite:
            return time.time()
        return float(connection.scalar(select(_epoch(func.clock_timestamp()))) or 0.0)

    def answers_since(self, connection: Connection) -> float:
        """Return when the PostgreSQL server started, by the clock of `now`; 0 for SQLite.

        The owner of a run counts as dead if it has not renewed its lease for some time. Time before
        the server's start does not count, because no lease could be renewed then.
        """
        if self.is_sqlite:
            return 0.0
        return float(connection.scalar(select(_epoch(func.pg_postmaster_start_time()))) or 0.0)

    def damage(self, *, limit_s: float) -> str:
        """Search an SQLite file for damage for at most limit_s seconds; describe what was found.

        Returns: an empty text if no damage was found, or if the database is PostgreSQL.
        """
        if not self.is_sqlite:
            return ""

        def check(connection: Connection) -> str:
            raw: Any = connection.connection.dbapi_connection
            deadline = time.monotonic() + limit_s
            raw.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            try:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            except DBAPIError as error:
                code = getattr(error.orig, "sqlite_errorcode", None)
                if code != sqlite3.SQLITE_INTERRUPT:
                    raise
                found = "ok"
            finally:
                raw.set_progress_handler(None, 0)
            return "" if found == "ok" else str(found)

        return self.read(check)

    def copy_to(self, target: Path) -> None:
        """Copy an SQLite database to the file `target`, which is replaced if it exists.

        The copy has all committed transactions, and nothing of a transaction that is still open.
        Raises: StoreError.
        """
        assert self._file is not None, "only SQLite is copied; PostgreSQL has its own tools"
        part = target.with_name(f"{target.name}.part")
        try:
            part.unlink(missing_ok=True)
            part.touch(mode=stat.S_IMODE(self._file.stat().st_mode))
            with (
                closing(connect_reader(self._file)) as source,
                closing(sqlite3.connect(part)) as copy,
            ):
                source.backup(copy)
            part.replace(target)
        except (OSError, sqlite3.Error) as error:
            part.unlink(missing_ok=True)
            raise StoreError(
                f"the database {self.location} cannot be copied to {target} "
                f"({' '.join(str(error).split())}); expected a writable directory with enough space"
            ) from error

    def fence(self, reason: str, *, check: Callable[[Connection], None]) -> None:
        """Make the database refuse every later write, by any process and any version of Rayloom.

        Each write changes the table `format`, and a trigger refuses this change. Reads are still
        possible.
        Args: reason: message of the error that a refused writer receives. check: called in the same
        transaction; raises if the caller may not fence the database.
        Raises: StoreError; what check raises.
        """
        quoted = reason.replace("'", "''")

        def attempt() -> None:
            with self._writing_connection() as connection:
                check(connection)
                if self.is_fenced(connection):
                    return
                on = f"{FENCE} BEFORE UPDATE ON {self._in_schema(connection, 'format')}"
                if self.is_sqlite:
                    what = f"BEGIN SELECT RAISE(ABORT, '{quoted}'); END"
                else:
                    function = f"{self._in_schema(connection, FENCE)}()"
                    # The driver would take % for a placeholder of a value.
                    body = f"BEGIN RAISE EXCEPTION USING MESSAGE = '{quoted}'; END"
                    connection.exec_driver_sql(
                        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger "
                        f"LANGUAGE plpgsql AS $fence${body.replace('%', '%%')}$fence$"
                    )
                    what = f"FOR EACH ROW EXECUTE FUNCTION {function}"
                connection.exec_driver_sql(f"CREATE TRIGGER {on} {what}")

        self._with_retries("written", attempt)

    def unfence(self) -> None:
        """Allow writes again after `fence`. Raises: StoreError."""

        def attempt() -> None:
            with self._writing_connection() as connection:
                if self.is_fenced(connection):
                    on = "" if self.is_sqlite else f" ON {self._in_schema(connection, 'format')}"
                    connection.exec_driver_sql(f"DROP TRIGGER {FENCE}{on}")

        self._with_retries("written", attempt)

    def is_fenced(self, connection: Connection) -> bool:
        """Return whether the database refuses every write because `fence` was called."""
        if self.is_sqlite:
            found = select(func.count()).select_from(text("sqlite_master"))
            return bool(connection.scalar(found.where(text("name = :name")), {"name": FENCE}))
        query = text(
            "SELECT count(*) FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid "
            "JOIN pg_namespace ON pg_namespace.oid = relnamespace "
            "WHERE tgname = :name AND nspname = coalesce(:schema, current_schema())"
        )
        return bool(connection.scalar(query, {"name": FENCE, "schema": self.schema}))

    def _in_schema(self, connection: Connection, name: str) -> str:
        quote = connection.dialect.identifier_preparer.quote
        return ".".join(quote(each) for each in (self.schema, name) if each is not None)

    def has_tables(self, connection: Connection) -> bool:
        found = inspect(connection).get_table_names(schema=self.schema)
        return bool(set(found) & tables.metadata.tables.keys())

    def has_table(self, connection: Connection, name: str) -> bool:
        return inspect(connection).has_table(name, schema=self.schema)

    def unusable(self, what: str, error: DBAPIError | NoConnectionLeft) -> StoreError:
        expected = "a server that answers, and a user that may use the run's schema"
        if self._file is not None:
            expected = "a run's own database, undamaged and writable, on a disk that is not full"
            # After a crash of the run, SQLite has to write an index before it can read.
            if not os.access(self._file.parent, os.W_OK):
                expected += f"; the directory {self._file.parent} cannot be written"
        return StoreError(
            f"the database {self.location} cannot be {what} ({_reason(error)}); expected {expected}"
        )

    def damaged(self, how: str) -> StoreError:
        return StoreError(f"the database {self.location} is damaged ({how}); restore a copy")

    @contextmanager
    def _reading_connection(self) -> Iterator[Connection]:
        options: dict[str, Any] = {}
        if not self.is_sqlite:
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._engine.connect() as connection:
            connection = connection.execution_options(**options)
            with connection.begin():
                yield connection

    @contextmanager
    def _writing_connection(self) -> Iterator[Connection]:
        with self._engine.connect().execution_options(writes=True) as connection:
            if self._file is not None:
                check_in_place(connection, self._file)
            with connection.begin():
                # SQLite needs no lock here: BEGIN IMMEDIATE has locked the database.
                connection.execute(select(tables.formats.c.number).with_for_update())
                yield connection

    def _create(self, create: Callable[[Connection], None]) -> None:
        with self._engine.connect().execution_options(writes=True) as connection:
            with connection.begin():
                if self.schema is not None:
                    # PostgreSQL raises an error if two processes create a schema at once.
                    connection.execute(
                        text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": self.schema}
                    )
                    # Not by "if not exists", which PostgreSQL refuses to a user who may not create
                    # schemas, even if the schema exists.
                    if not inspect(connection).has_schema(self.schema):
                        quoted = connection.dialect.identifier_preparer.quote(self.schema)
                        connection.execute(text(f"CREATE SCHEMA {quoted}"))
                create(connection)

    def _with_retries(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Call `attempt`, and again while the database does not answer; return its result.

        what: a participle for error messages, such as "read". Raises: StoreError.
        """
        try:
            return self._attempts(what, attempt)
        except Damaged as error:
            raise self.damaged(str(error)) from error
        finally:
            self._away_since.pop(threading.get_ident(), None)

    def _attempts(self, what: str, attempt: Callable[[], Result]) -> Result:
        started, delay_s, has_warned = time.monotonic(), _FIRST_DELAY_S, False
        given_up = self._given_up.get(what)
        patience_s = self._patience_s if given_up is None else 0.0
        while True:
            try:
                result = attempt()
            except (DBAPIError, NoConnectionLeft) as error:
                if not _is_passing(error):
                    raise self.unusable(what, error) from error
                away_s = time.monotonic() - started
                if away_s + delay_s > patience_s:
                    if given_up is not None:
                        raise given_up from error
                    if not has_warned:
                        raise self.unusable(what, error) from error
                    self._given_up[what] = self._away(what, away_s, error)
                    raise self._given_up[what] from error
                if not has_warned:
                    has_warned = True
                    self._away_since[threading.get_ident()] = started
                    log.warning(
                        "the database %s cannot be %s now (%s); retrying for %g s",
                        *(self.location, what, _reason(error), patience_s),
                    )
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            else:
                self._given_up.pop(what, None)
                if has_warned:
                    log.warning(
                        "the database %s answers again, after %.1f s",
                        *(self.location, time.monotonic() - started),
                    )
                return result

    def _away(self, what: str, away_s: float, error: DBAPIError | NoConnectionLeft) -> StoreError:
        return StoreError(
            f"the database {self.location} could not be {what} for {away_s:.0f} s "
            f"({_reason(error)}), expected it to answer within {self._patience_s:g} s; what was "
            "accepted and committed is kept; once it answers, resume the run with --resume"
        )


def _last_write(connection: Connection) -> str | None:
    return connection.scalar(select(tables.formats.c.last_write))


def _epoch(moment: Any) -> Any:
    return func.date_part("epoch", moment, type_=Float)


def _reason(error: DBAPIError | NoConnectionLeft) -> str:
    """Return the driver's message, without the statement and its values."""
    words = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(words).split()) or type(words).__name__


def _is_passing(error: DBAPIError | NoConnectionLeft) -> bool:
    """Return whether an operation that failed with this error may succeed a little later."""
    if isinstance(error, NoConnectionLeft) or error.connection_invalidated:
        return True
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in _SQLITE_PASSING
    state = getattr(cause, "sqlstate", None)
    if state is None:
        # An error without a state is not from a server: none answered, or the connection broke.
        return type(cause).__name__ in ("OperationalError", "InterfaceError")
    return str(state).startswith(_POSTGRESQL_PASSING)
