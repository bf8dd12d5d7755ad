"""Copy a run's rows to another SQLite or PostgreSQL database, and move a run there.

The copy is one transaction (in SQLite, one rename), so a new database has all rows or does not
exist. The old database is closed to writes before the first row is read. The record of the run's
database, in the run's directory, is replaced last. If a move is killed, the run therefore stays in
the old database, and a second move completes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    Table,
    TypeDecorator,
    func,
    insert,
    select,
    text,
    update,
)

from service.store import tables
from service.store.database import Database
from service.store.errors import LeaseHeld, StoreError
from service.store.leases import own_name
from service.store.place import check_local, record, shown, sqlite_file
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore

BATCH_ROWS = 200
# Tables whose rows the database numbers, with the column; a number is never used twice.
_NUMBERED = {"checkpoints": "id", "submissions": "position", "feed": "number", "admin_calls": "id"}


def copy_run(source: ReadOnlyStore, url: str) -> None:
    """Copy all rows to a new database at `url`; in the copy, no process owns the run.

    If a database at `url` has the same run with the same newest term, do nothing.
    Raises: StoreError, also if the database has another run.
    """
    check_local(url)
    file = sqlite_file(url)
    if _is_copied(source, url):
        return
    if file is None:
        _fill(source, url)
        return
    part = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _removed(part):
            _fill(source, f"sqlite:///{part}")
            part.chmod(0o600)
            part.replace(file)
    except OSError as error:
        raise StoreError(
            f"the database {file} cannot be written ({error.strerror or error}); expected a "
            "writable directory with enough space"
        ) from error


def move_run(source_url: str, url: str, *, run_dir: Path, store_file: Path) -> int:
    """Move a run to a new database if no live process owns the run.

    Args: store_file: the file in the run's directory that names its database.
    Returns: the number of the newest lease on the run.
    Raises: LeaseHeld; StoreError. After an error the run is in the old database, which can be
    written again.
    """
    with closing(RunStore(source_url, may_be_older=True)) as store:
        if store.is_fenced():
            if (owner := store.live_owner()) is not None:
                raise LeaseHeld(f"the run is being moved by {owner}")
        else:
            kind = store.kind()
            if kind is None:
                raise StoreError(f"the database {store.location} has no run, expected one to move")
            # Call this before the lease is taken: it raises if the new database cannot be used.
            _is_copied(store, url)
            term = store.acquire_lease(
                owner=own_name(), directory=str(run_dir), kind=kind, unless_held=True
            ).term
            store.fence(term, f"the run was moved to {shown(url)}")
        try:
            copy_run(store, url)
            record(store_file, url)
        except BaseException as error:
            with suppress(StoreError):
                store.unfence()
            if isinstance(error, OSError):
                raise StoreError(f"{store_file} cannot be written ({error})") from error
            raise
        return store.newest_term()


def _is_copied(source: ReadOnlyStore, url: str) -> bool:
    """Return whether the database at `url` is a copy of the run with the same newest term.

    An SQLite file whose run was moved away is renamed. Raises: StoreError for another run.
    """
    file = sqlite_file(url)
    if file is not None and not os.path.exists(file):
        return False
    with closing(ReadOnlyStore(url, any_format=True)) as target:
        term = target.newest_term()
        if term == 0:
            return False
        if target.read(_newest_lease) == source.read(_newest_lease):
            return True
        if file is not None and target.is_fenced():
            os.replace(file, file.with_name(f"{file.name}.term-{term}.bak"))
            return False
    remedy = "drop that schema" if file is None else "choose another directory"
    raise StoreError(f"the database {shown(url)} holds a run already, expected none: {remedy}")


def _newest_lease(connection: Connection) -> tuple[Any, ...] | None:
    leases = tables.leases.c
    query = select(leases.term, leases.owner, leases.process, leases.acquired_at)
    found = connection.execute(query.order_by(leases.term.desc()).limit(1)).first()
    return None if found is None else tuple(found)


def _fill(source: ReadOnlyStore, url: str) -> None:
    target = Database(url, is_read_only=False)

    def create(writing: Connection) -> None:
        tables.metadata.create_all(writing)
        source.read(lambda reading: _copy_rows(reading, writing))

    try:
        target.prepare(target.has_tables, create)
    finally:
        target.close()


def _copy_rows(reading: Connection, writing: Connection) -> None:
    for name in tables.metadata.tables:
        table = _plain(name)
        batches = reading.execution_options(yield_per=BATCH_ROWS).execute(select(table))
        for rows in batches.mappings().partitions():
            values = [dict(row) for row in rows]
            if name == "leases":
                # The checkpoints to which leases refer are copied later; they refer to leases too.
                values = [{**row, "parent_checkpoint": None, "renewed_at": None} for row in values]
            writing.execute(insert(table), values)
    leases = _plain("leases")
    for term, parent in reading.execute(select(leases.c.term, leases.c.parent_checkpoint)).all():
        if parent is not None:
            joined = update(leases).where(leases.c.term == term)
            writing.execute(joined.values(parent_checkpoint=parent))
    for name, column in _NUMBERED.items():
        _continue_numbers(writing, name, column, _last_number(reading, name, column))


def _plain(name: str) -> Table:
    """Return a table's definition without conversions; values are copied as they are stored."""
    columns = (
        Column(each.name, _stored(each.type)) for each in tables.metadata.tables[name].columns
    )
    return Table(name, MetaData(), *columns)


def _stored(kind: Any) -> Any:
    return kind.impl_instance if isinstance(kind, TypeDecorator) else kind


def _last_number(connection: Connection, name: str, column: str) -> int:
    """Return the highest number that a table's rows ever had, deleted rows included."""
    table = _plain(name)
    newest = int(connection.scalar(select(func.max(table.c[column]))) or 0)
    if connection.dialect.name != "sqlite":
        return max(newest, int(connection.scalar(_sequence(connection, name, column)) or 0))
    has_numbers = connection.scalar(
        text("SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_sequence'")
    )
    given = text("SELECT seq FROM sqlite_sequence WHERE name = :name")
    return max(newest, int(connection.scalar(given, {"name": name}) or 0) if has_numbers else 0)


def _sequence(connection: Connection, name: str, column: str) -> Any:
    """Return a query for the last number that a column's sequence in PostgreSQL gave, or null."""
    return select(func.pg_sequence_last_value(_sequence_name(connection, name, column)))


def _sequence_name(connection: Connection, name: str, column: str) -> Any:
    places = connection.get_execution_options().get("schema_translate_map") or {}
    table = Table(name, MetaData(), schema=places.get(None))
    quoted = connection.dialect.identifier_preparer.format_table(table)
    return func.pg_get_serial_sequence(quoted, column)


def _continue_numbers(connection: Connection, name: str, column: str, last: int) -> None:
    """Set the counter of a table, so that the next new row gets the number `last` + 1."""
    if last == 0:
        return
    if connection.dialect.name != "sqlite":
        connection.execute(select(func.setval(_sequence_name(connection, name, column), last)))
    elif tables.metadata.tables[name].dialect_options["sqlite"]["autoincrement"]:
        values = {"name": name, "last": last}
        connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), values)
        connection.execute(text("INSERT INTO sqlite_sequence VALUES (:name, :last)"), values)


@contextmanager
def _removed(part: Path) -> Iterator[None]:
    """Remove the files of an unfinished SQLite database before and after the block."""
    names = [part.with_name(part.name + end) for end in ("", "-wal", "-shm", "-journal")]
    try:
        for each in names:
            each.unlink(missing_ok=True)
        yield
    finally:
        for each in names:
            with suppress(OSError):
                each.unlink(missing_ok=True)
