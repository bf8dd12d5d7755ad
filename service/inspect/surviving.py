"""Find the files of a journal that belong to the run, by reading the run's database.

A run's directory may have two files of a step, from two terms; the database records from which term
the run continued. If the journal was copied without the database, the newest term of each step
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from actors.journal.files import JournalFile
from actors.trajectory_queue.ledger import EvictionReason
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.errors import StoreError
from service.store.lineage import Span, surviving_spans, within
from service.store.place import shown, sqlite_file
from service.store.read_only import ReadOnlyStore

Answer = TypeVar("Answer")
_RESTORE = "restore a copy of it, or inspect a single journal file by its path"


def read_surviving(run_dir: RunDir) -> dict[Span, frozenset[str]] | None:
    """Return the spans of the run's lineage, from its database; None if there is only a journal.

    Each span has the rollouts whose update was refused as not finite, after the journal had been
    written. Raises: ConfigError if the database is lost or damaged, or has no run.
    """
    try:
        url = run_dir.database_url
    except StoreError as error:
        raise ConfigError(f"inspect: {error}") from error
    database, file = shown(url), sqlite_file(url)
    if file is not None and not file.is_file():
        _check_copied(run_dir, file)
        return None
    # SQLite removes the log of an empty database, so such a file must not be opened.
    if file is not None and file.stat().st_size == 0:
        raise ConfigError(
            f"inspect: the database {database} is empty; expected a run's; {_RESTORE}"
        )
    surviving = read_rows(run_dir, _surviving)
    if not surviving:
        raise ConfigError(
            f"inspect: the database {database} has no run, but there is a journal next to it; "
            f"expected the journal's own database; {_RESTORE}"
        )
    return surviving


def _surviving(store: ReadOnlyStore) -> dict[Span, frozenset[str]]:
    events = tables.events.c
    refused = select(events.rollout_id).where(events.reason == EvictionReason.NONFINITE_STEP)

    def read(connection: Connection) -> dict[Span, frozenset[str]]:
        return {
            span: frozenset(connection.scalars(refused.where(within(events, span))))
            for span in surviving_spans(connection)
        }

    return store.read(read)


def read_rows(run_dir: RunDir, read: Callable[[ReadOnlyStore], Answer]) -> Answer:
    """Return the result of reading the run's store. Raises: ConfigError if it cannot be read."""
    try:
        with run_dir.looked_into() as store:
            return read(store)
    except StoreError as error:
        raise ConfigError(f"inspect: {error}") from error
    except (SQLAlchemyError, LookupError, TypeError, ValueError) as error:
        # These are errors of rows that no run wrote.
        raise ConfigError(
            f"inspect: the database {shown(run_dir.database_url)} cannot be read "
            f"({type(error).__name__}: {error}); expected the rows of a run; {_RESTORE}"
        ) from error


def surviving_files(
    files: Sequence[JournalFile], spans: Collection[Span] | None
) -> list[JournalFile]:
    """Return one file for each step, from the terms of the run's lineage.

    spans: the terms of the lineage, each with its last step; if None, the newest term of each step
    counts.
    Example: term 1 wrote steps 1 to 4; term 2 continued from step 2 and wrote step 3. The files are
    those of steps 1 and 2 of term 1, and of step 3 of term 2.
    """
    if spans is None:
        return list({file.step: file for file in files}.values())
    last_steps = {span.term: span.last_step for span in spans}
    return [
        file
        for file in files
        if file.term in last_steps
        and ((last := last_steps[file.term]) is None or file.step <= last)
    ]


def _check_copied(run_dir: RunDir, database: Path) -> None:
    """Raise ConfigError if this is a run's own directory without its database, and not a copy."""
    left = (
        run_dir.checkpoints,
        run_dir.log_file,
        run_dir.summary_file,
        database.with_name(f"{database.name}-wal"),
        run_dir.store_file,
    )
    found = [path.name for path in left if path.exists()]
    if found:
        raise ConfigError(
            f"inspect: the database {database} is missing, but the run's {found[0]} exists, "
            f"expected both; {_RESTORE}"
        )
