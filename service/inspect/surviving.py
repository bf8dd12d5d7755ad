"""Which files of a journal are the run's, by the run's database; read, never written.

A run's directory may hold a step twice, of two epochs; the database says which one the run went on
from. Of a journal that was copied without one, the newest epoch of each step counts. A file that no
run could have written where it lies is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy.exc import SQLAlchemyError

from actors.journal.files import JournalFile
from actors.trajectory_queue.ledger import EvictionReason
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store.lineage import History, Span, read_history, surviving_spans
from service.store.run_store import ReadOnlyStore, StoreError

_RESTORE = "restore a copy of it, or look at one journal file alone by its path"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLineage:
    """stretches: of which epochs what survives, at least one. history: the rows that do."""

    stretches: tuple[Span, ...]
    history: History


def read_lineage(run_dir: RunDir) -> RunLineage | None:
    """What the run's database says; None for a journal that was copied without it.

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
        store = ReadOnlyStore(database)
        with store.reading() as connection:
            stretches = surviving_spans(connection)
        history = read_history(store)
    except StoreError as error:
        raise ConfigError(f"inspect: {error}") from error
    except (SQLAlchemyError, LookupError, TypeError, ValueError) as error:
        # Rows that no run wrote.
        raise ConfigError(
            f"inspect: the database {database} cannot be read ({type(error).__name__}: {error}); "
            f"expected the rows of a run; {_RESTORE}"
        ) from error
    if not stretches:
        raise ConfigError(
            f"inspect: the database {database} knows of no run, and there is a journal beside it; "
            f"expected the journal's own; {_RESTORE}"
        )
    return RunLineage(stretches=tuple(stretches), history=history)


def refused_rollouts(history: History) -> frozenset[str]:
    """Whose update was refused as not finite, which is known only after the journal is written."""
    refused = EvictionReason.NONFINITE_STEP.value
    return frozenset(event.rollout_id for event in history.events if event.reason == refused)


def surviving_files(
    files: Sequence[JournalFile], stretches: Sequence[Span] | None
) -> list[JournalFile]:
    """One file a step, those of the run's lineage; None: not known, the newest epoch counts.

    Example: epoch 1 wrote steps 1 to 4, epoch 2 went on from 2 and wrote 3: 1, 2 of epoch 1, and
    3 of epoch 2.
    """
    if stretches is None:
        return list({file.step: file for file in files}.values())
    last_steps = {stretch.term: stretch.last_step for stretch in stretches}
    return [
        file
        for file in files
        if file.epoch in last_steps
        and ((last := last_steps[file.epoch]) is None or file.step <= last)
    ]


def check_places(files: Sequence[JournalFile], stretches: Sequence[Span] | None) -> None:
    """Raises: ConfigError for a file that no run could have written here, by its name."""
    for file, why in _misplaced(files, stretches or ()):
        raise ConfigError(
            f"inspect: {file.path} cannot be of this run: {why}; expected a file for each step, as "
            "a run writes it; remove it, or restore the run's directory from a copy"
        )


def _misplaced(
    files: Sequence[JournalFile], stretches: Sequence[Span]
) -> Iterator[tuple[JournalFile, str]]:
    seen: dict[tuple[int, int], JournalFile] = {}
    for file in files:
        other = seen.setdefault((file.step, file.epoch), file)
        if other is not file:
            yield file, f"{other.path.name} is of step {file.step} and epoch {file.epoch} too"
    if not stretches:
        return
    newest = stretches[-1].term
    begun_after = {later.term: earlier.last_step or 0 for earlier, later in pairwise(stretches)}
    for file in files:
        if file.epoch > newest:
            yield file, f"the newest epoch that the database knows is {newest}"
        if file.step <= begun_after.get(file.epoch, 0):
            yield file, f"epoch {file.epoch} went on from step {begun_after.get(file.epoch, 0)}"


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
