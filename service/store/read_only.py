"""Read the database of a run that may be running, interrupted or copied.

A reader never makes a writer wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, func, select, update

from service import VERSION
from service.store import tables
from service.store.database import Database
from service.store.errors import StoreError
from service.store.leases import TOLERANCE_S, LeaseOwner, is_alive_here, newest_lease
from service.store.lineage import Checkpoint, committed_checkpoints, every_checkpoint
from service.store.migrations import FIRST_FORMAT, STEPS, Step, move_forward, newest_format
from service.store.place import sqlite_file
from service.store.tables import RunKind

# Longest time in seconds of the search for damage, which would read the whole database.
CHECK_LIMIT_S = 2.0
Result = TypeVar("Result")


class ReadOnlyStore:
    """A run's database, opened for reading.

    An SQLite database of an older format is copied when it is opened, and the copy is converted to
    the current format. The store then reads the copy, and does not see what the run writes later.
    In PostgreSQL an older format is refused.
    Raises: StoreError if the database cannot be read, or has a format that this version cannot
    read.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        is_read_only: bool = True,
        patience_s: float = 0.0,
        may_be_older: bool = False,
        any_format: bool = False,
        steps: Mapping[int, Step] = STEPS,
        count_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Open a store.

        Args:
            url: A URL as described in `service.store.place`, or the file of an SQLite database.
            may_be_older: Whether to read a database of an older format directly, without a
                converted copy. Callers may then read only the tables that no migration changes
                (`service.store.migrations`).
            any_format: Whether to read a database of any format directly, even a newer format.
                Reads raise StoreError if the format lacks a table or column that they need.
            steps: The migrations, by the format that each of them converts.
            patience_s, count_failure: As for `Database`.
        """
        place = f"sqlite:///{url}" if isinstance(url, Path) else url
        self._database = Database(
            place, is_read_only=is_read_only, patience_s=patience_s, count_failure=count_failure
        )
        self._file = sqlite_file(place)
        self._steps, self._format = steps, newest_format(steps)
        self._may_be_older, self._any_format = may_be_older, any_format
        self._scratch: TemporaryDirectory[str] | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all connections."""
        self._database.dispose()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def location(self) -> str:
        """Return the database's location for people, without a password."""
        return self._database.location

    def read(self, body: Callable[[Connection], Result]) -> Result:
        """Call `body` in a transaction that only reads, and return the result (`Database.read`)."""
        return self._database.read(body)

    @property
    def away_s(self) -> float:
        """Return the seconds for which the database has not answered; 0 if it answers."""
        return self._database.away_s

    def newest_term(self) -> int:
        """Return the number of the newest term; 0 if no supervisor has ever had the lease.

        The lease is the right to write to the database. Each new lease begins a term.
        """
        row = self.read(self._newest_lease)
        return row.term if row else 0

    def kind(self) -> RunKind | None:
        """Return which command began the run; None if no supervisor ever had the lease."""
        row = self.read(self._newest_lease)
        return row.kind if row else None

    def directory(self) -> str:
        """Return the path of the run directory that the newest owner used; empty if unknown."""
        row = self.read(self._newest_lease)
        return row.directory if row else ""

    def live_owner(self, *, tolerance_s: float = TOLERANCE_S) -> LeaseOwner | None:
        """Return the owner of the newest lease; None if no live process has the lease.

        tolerance_s: seconds without a renewal after which an owner on another machine counts as
        dead.
        """
        return self.read(partial(self._live_owner, tolerance_s=tolerance_s))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints to which the run can return, newest first.

        If several checkpoints were written to one directory, return only the newest of them.
        """

        def find(connection: Connection) -> list[Checkpoint]:
            is_blank = not self._database.has_tables(connection)
            return [] if is_blank else committed_checkpoints(connection)

        return self.read(find)

    def num_kept_samples(self) -> int:
        """Return the number of stored samples that may still be trained.

        The samples are the turns of sessions, and uploaded rollouts.
        """

        def count(connection: Connection) -> int:
            if not self._database.has_tables(connection):
                return 0
            turns = select(func.count()).select_from(tables.session_turns)
            kept = select(func.count()).where(tables.uploads.c.content.is_not(None))
            return (connection.scalar(turns) or 0) + (connection.scalar(kept) or 0)

        return self.read(count)

    def all_checkpoints(self) -> list[Checkpoint]:
        """Return every checkpoint that the database records, newest first.

        This includes checkpoints to which the run can no longer return. Some were undone when the
        run returned to an older checkpoint. Others were pruned, but have a row because the run once
        continued from them.
        """
        return self.read(every_checkpoint)

    def check(self) -> None:
        """Search the database for damage, for at most two seconds.

        In this time some hundred MiB are read. If the database is larger, damage in the rest is
        found only when the rest is used, because opening a database does not read its rows.
        Raises: StoreError if damage was found.
        """
        found = self._database.damage(limit_s=CHECK_LIMIT_S)
        if found:
            raise self._database.damaged(found)

    def is_older(self) -> bool:
        """Return whether the database has an older format than this version of Rayloom writes."""

        def is_older(connection: Connection) -> bool:
            return self._has_tables(connection) and self._read_format(connection) < self._format

        return self.read(is_older)

    def format_number(self) -> int:
        """Return the number of the database's format. Raises: StoreError."""
        return self.read(self._read_format)

    def is_fenced(self) -> bool:
        """Return whether the database refuses every write, because its run was moved."""
        return self.read(self._database.is_fenced)

    def _open(self) -> None:
        if self._any_format or not self.is_older() or self._may_be_older:
            return
        if self._file is None:
            raise self._not_moved()
        self._scratch = TemporaryDirectory(prefix="rayloom-")
        file = Path(self._scratch.name) / self._file.name
        self._database.copy_to(file)
        copy = Database(f"sqlite:///{file}", is_read_only=False)
        copy.write(self._move_forward)
        copy.location = self._database.location
        self._database.dispose()
        self._database = copy

    def _move_forward(self, connection: Connection) -> None:
        move_forward(connection, self._read_format(connection), self._steps)
        connection.execute(update(tables.formats).values(number=self._format))

    def _newest_lease(self, connection: Connection) -> Row[Any] | None:
        return newest_lease(connection) if self._database.has_tables(connection) else None

    def _live_owner(
        self, connection: Connection, *, tolerance_s: float = TOLERANCE_S
    ) -> LeaseOwner | None:
        row = self._newest_lease(connection)
        if row is None or row.renewed_at is None:
            return None
        now = self._database.now(connection)
        shown_at = max(row.renewed_at, self._database.answers_since(connection))
        owner = LeaseOwner(
            name=row.owner, term=row.term, acquired_at=row.acquired_at, silent_s=now - shown_at
        )
        is_alive = is_alive_here(row.owner, row.process)
        if is_alive is None:
            is_alive = owner.silent_s < tolerance_s
        return owner if is_alive else None

    def _has_tables(self, connection: Connection) -> bool:
        if not self._database.has_tables(connection):
            return False
        self._check_format(connection)
        return True

    def _check_format(self, connection: Connection) -> None:
        number = self._read_format(connection)
        place = self._file.parent if self._file else self.location
        version = self._last_version(connection)
        by = f" by Rayloom {version}" if version else ""
        written = (
            f"the run in {place} was written in format {number}{by}, this Rayloom ({VERSION}) "
            "reads format "
        )
        if number > self._format:
            raise StoreError(
                f"{written}{self._format}; use the newer Rayloom that wrote it, or the copy of "
                "the database that it made before it changed the format; `rayloom export` still "
                "writes its policy"
            )
        if number < FIRST_FORMAT:
            raise StoreError(
                f"{written}{self._format}; finish it with the version that began it, or start a "
                "new run; `rayloom export` still writes its policy"
            )

    def _last_version(self, connection: Connection) -> str:
        """Return the version of Rayloom that began the newest term; empty if it is not recorded."""
        versions = tables.versions
        if not self._database.has_table(connection, versions.name):
            return ""
        newest = select(versions.c.version).order_by(versions.c.term.desc()).limit(1)
        return connection.scalar(newest) or ""

    def _read_format(self, connection: Connection) -> int:
        formats = tables.formats
        has_number = self._database.has_table(connection, formats.name)
        number = connection.scalar(select(formats.c.number)) if has_number else 1
        if number is None:
            raise self._database.damaged("no format number")
        return int(number)

    def _not_moved(self) -> StoreError:
        return StoreError(
            f"the database {self.location} is in an older format than this Rayloom's "
            f"{self._format}; move it forward first: resume the run with --resume"
        )


def has_run(url: str, *, patience_s: float) -> bool:
    """Return whether a run was started in a PostgreSQL database, even if the run has ended.

    Raises: StoreError.
    """
    store = ReadOnlyStore(url, patience_s=patience_s, may_be_older=True)
    try:
        return store.newest_term() > 0
    finally:
        store.close()
