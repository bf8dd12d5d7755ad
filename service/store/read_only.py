"""A run's database as it lies: neither it nor its log is made, written, or kept from its writer.

For those who look at a run, which may be running, cut off, or copied. Where a log lies beside the
database, SQLite keeps its index of it (-shm) up to date. Called by `rayloom inspect`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

from service.store.run_store import StoreError

BUSY_S = 10.0


class ReadOnlyStore:
    """Open with the path of an SQLite database; what is wrong with it, the first reading finds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._engine, "begin", _begin)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees one state of the database. Raises: StoreError."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except DatabaseError as error:
            raise StoreError(
                f"the database {self._path} cannot be read ({error.orig}); expected a run's own, "
                "whole; restore a copy of it"
            ) from error

    def close(self) -> None:
        self._engine.dispose()

    def _connect(self) -> sqlite3.Connection:
        wal = self._path.with_name(f"{self._path.name}-wal")
        is_whole = not wal.exists() or wal.stat().st_size == 0
        # Without a log all is in the file itself, and SQLite need make no index of a log beside it.
        mode = "mode=ro&immutable=1" if is_whole else "mode=ro"
        place = f"file:{quote(str(self._path))}?{mode}"
        return sqlite3.connect(place, uri=True, timeout=BUSY_S, isolation_level=None)


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
