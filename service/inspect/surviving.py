"""Which files of a journal are the run's, by the run's database; read, never written.

A run's directory may hold a step twice, of two terms; the database says which one the run went on
from. Of a journal that was copied without one, the newest term of each step counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from actors.journal.files import JournalFile
from actors.trajectory_queue.ledger import EvictionReason
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store.lineage import History, Span, read_history
from service.store.run_store import ReadOnlyStore, StoreError

_RESTORE = "restore a copy of it, or look at one journal file alone by its path"


def read_surviving(run_dir: RunDir) -> History | None:
    """What survives by the run's database; None for a journal that was copied without it.

    Raises: ConfigError where it is lost, damaged, or knows nothing of a run.
    """
    database = run_dir.database_file
    if not database.is_file():
        _check_copied(run_dir)
        return None
    # SQLite takes away the log of an empty database: it must not come to opening one.
    if database.stat().st_size == 0:
        raise ConfigError(
            f"inspect: the database {database} is empty; expected a run's; {_RESTORE}"
        )
    try:
        history = read_history(ReadOnlyStore(database))
    except StoreError as error:
        raise ConfigError(f"inspect: {error}") from error
    except (SQLAlchemyError, LookupError, TypeError, ValueError) as error:
        # Rows that no run wrote.
        raise ConfigError(
            f"inspect: the database {database} cannot be read ({type(error).__name__}: {error}); "
            f"expected the rows of a run; {_RESTORE}"
        ) from error
    if not history.spans:
        raise ConfigError(
            f"inspect: the database {database} knows of no run, and there is a journal beside it; "
            f"expected the journal's own; {_RESTORE}"
        )
    return history


def refused_rollouts(history: History) -> frozenset[str]:
    """Whose update was refused as not finite, which is known only after the journal is written."""
    refused = EvictionReason.NONFINITE_STEP.value
    return frozenset(event.rollout_id for event in history.events if event.reason == refused)


def surviving_files(
    files: Sequence[JournalFile], spans: Sequence[Span] | None
) -> list[JournalFile]:
    """One file a step, those of the run's lineage; None: not known, the newest term counts.

    Example: term 1 wrote steps 1 to 4, term 2 went on from 2 and wrote 3: 1, 2 of term 1, and 3 of
    term 2.
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


def _check_copied(run_dir: RunDir) -> None:
    """Raises: ConfigError where a run lies whose database is gone."""
    database = run_dir.database_file
    left = (
        run_dir.checkpoints,
        run_dir.log_file,
        run_dir.summary_file,
        database.with_name(f"{database.name}-wal"),
    )
    found = [path.name for path in left if path.exists()]
    if found:
        raise ConfigError(
            f"inspect: the database {database} is gone, and the run's {found[0]} is there; "
            f"expected both; {_RESTORE}"
        )
