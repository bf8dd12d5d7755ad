"""Read a run's journal, and find the trajectory with an id, without writing anything.

A run that went back to a checkpoint trained some steps twice, in two terms (a term lasts from a
start or recovery of the run to its end). Each term has its own file of the step. The run's database
records which file counts; without the database, the file of the newest term counts.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from actors.journal.files import (
    JournalDamaged,
    JournalFile,
    JournalStep,
    TrajectoryEntry,
    list_files,
    read_index,
    read_step,
)
from actors.trajectory_queue.ledger import EvictionReason
from service.config.file import ConfigError, load_config, why_missing
from service.config.tree import Config
from service.inspect.token_text import TokenText, token_text
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.errors import StoreError
from service.store.lineage import Span, surviving_spans, within
from service.store.place import shown, sqlite_file
from service.store.read_only import ReadOnlyStore

Answer = TypeVar("Answer")
_RESTORE = "restore a copy of it, or inspect a single journal file by its path"


def read_surviving(run_dir: RunDir) -> dict[Span, frozenset[str]] | None:
    """Return the steps that no return to a checkpoint undid, and the refused rollouts in them.

    Each start or recovery of the run begins a term. Example: term 1 trained steps 1 to 4, and term
    2 continued from step 2. Then the result has steps 1 and 2 of term 1, and all steps of term 2.

    Returns: range of a term's steps that were not undone -> ids of the rollouts in these steps that
        the trainer refused, because their update was not finite. None if the directory holds only a
        copy of the journal.
    Raises: ConfigError if the database is damaged, has no run, or is missing although other files
        of the run exist.
    """
    try:
        url = run_dir.database_url
    except StoreError as error:
        raise ConfigError(str(error)) from error
    database, file = shown(url), sqlite_file(url)
    if file is not None and not file.is_file():
        _check_copied(run_dir, file)
        return None
    # SQLite removes the log of an empty database, so such a file must not be opened.
    if file is not None and file.stat().st_size == 0:
        raise ConfigError(
            f"the database {database} is empty; expected the database of a run; {_RESTORE}"
        )
    surviving = read_rows(run_dir, _surviving)
    if not surviving:
        raise ConfigError(
            f"the database {database} has no run, but there is a journal next to it; "
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
    """Call `read` with the run's store, and return its result.

    Raises: ConfigError if the store cannot be read.
    """
    try:
        with run_dir.looked_into() as store:
            return read(store)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    except (SQLAlchemyError, LookupError, TypeError, ValueError) as error:
        # These are errors of rows that no run wrote.
        raise ConfigError(
            f"the database {shown(run_dir.database_url)} cannot be read "
            f"({type(error).__name__}: {error}); expected the rows of a run; {_RESTORE}"
        ) from error


def surviving_files(
    files: Sequence[JournalFile], spans: Collection[Span] | None
) -> list[JournalFile]:
    """Return one journal file for each step, without the files of steps that were undone.

    Args: spans: the parts of the run that were not undone, at most one for each term. If `spans` is
    None, the newest term's file of each step is returned.
    Example: term 1 wrote steps 1 to 4; term 2 continued from step 2 and wrote step 3. Returned are
    term 1's files of steps 1 and 2, and term 2's file of step 3.
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
    """Raise ConfigError if the database is missing, although other files of the run exist."""
    # A directory that has only a copy of the journal needs no database.
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
            f"the database {database} is missing, but the run's {found[0]} exists, "
            f"expected both; {_RESTORE}"
        )


RUNS = Path("runs")


class UnknownTrajectory(ConfigError):
    """Raised if the journal has no trajectory with the given name; the message has similar ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJournal:
    """A journal to read: the journal of a run's directory, or a single journal file.

    place: the path that the user gave. run_dir: None for a single file. files: the file of each
    step, in the order of steps, without files of undone steps. num_superseded: number of files left
    out because a later term played their steps again. has_database: whether the run's database
    determined which files count. refused: ids of rollouts whose update the trainer refused because
    it was not finite; only the database records this.
    """

    place: Path
    run_dir: RunDir | None
    files: tuple[JournalFile, ...]
    num_superseded: int = 0
    has_database: bool = False
    refused: frozenset[str] = frozenset()

    def steps(self) -> Iterator[JournalStep]:
        """Yield the journal's steps in order. Raises: ConfigError if a file cannot be read."""
        for file in self.files:
            yield load_step(file.path)


def is_refused(journal: OpenJournal, entry: TrajectoryEntry) -> bool:
    """Return whether an entry is recorded as trained although the trainer refused its update."""
    return entry.reason is None and entry.trajectory.rollout_id in journal.refused


def newest_run(wanted: str, runs: Path = RUNS) -> Path:
    """Return the directory of the run under runs/ whose journal was written last.

    Args: wanted: the trajectory that the user wants to see, for the error message.
    Raises: ConfigError if no run under runs/ has a journal.
    """
    journals = [path for path in runs.glob("*/journal") if path.is_dir()]
    if not journals:
        raise ConfigError(
            f"inspect: {wanted} is not a path here, and there is no run with a journal in {runs}/ "
            "in which to look it up; expected a run directory, a journal file or an id; "
            "name the id's run too, as in `rayloom inspect RUN_DIR ID`"
        )
    return max(journals, key=lambda path: path.stat().st_mtime).parent


def open_journal(place: Path) -> OpenJournal:
    """Return the journal at a path, which is a run's directory or one journal file.

    Raises: ConfigError if there is no usable journal.
    """
    if not os.path.exists(place):
        raise ConfigError(
            f"{place} {why_missing(place)}; expected a run directory or a journal file; name one"
        )
    if place.is_file():
        step = load_step(place)
        file = JournalFile(path=place, step=step.step, term=step.term)
        return OpenJournal(place=place, run_dir=None, files=(file,))
    run_dir = RunDir(path=place)
    try:
        files = list_files(run_dir.journal)
    except OSError as error:
        raise _unreadable(run_dir.journal, error) from error
    if not files and place.name == run_dir.journal.name and list_files(place):
        raise ConfigError(
            f"{place} is the journal of a run, expected the run's directory or one journal file; "
            f"name {place.parent}"
        )
    if not files:
        raise ConfigError(
            f"{place} has no journal; expected a run directory with {run_dir.journal.name}"
            "/step-….journal in it, as `rayloom train` writes them unless run.journal_steps is 0; "
            "or another version of Rayloom wrote it"
        )
    surviving = read_surviving(run_dir)
    kept = surviving_files(files, surviving)
    if not kept:
        raise ConfigError(
            f"none of the {len(files)} files in {run_dir.journal} belongs to the run's "
            "lineage, expected one; the run has undone these steps, and will play them again when "
            "it is resumed"
        )
    return OpenJournal(
        place=place,
        run_dir=run_dir,
        files=tuple(kept),
        num_superseded=len(files) - len(kept),
        has_database=surviving is not None,
        refused=frozenset[str]().union(*(surviving or {}).values()),
    )


def journal_of(run_dir: RunDir) -> OpenJournal | None:
    """Return the journal of a run; None if the run has no journal yet.

    Raises: ConfigError if the journal or the run's database cannot be used.
    """
    has_any = run_dir.journal.is_dir() and any(run_dir.journal.glob("*.journal"))
    return open_journal(run_dir.path) if has_any else None


def file_of_step(journal: OpenJournal, step: int, *, command: str) -> JournalFile:
    """Return a step's file. Raises: ConfigError, which names `command`, if there is none."""
    file = next((file for file in journal.files if file.step == step), None)
    if file is None:
        raise ConfigError(
            f"{command}: --step {step} is not in the journal of {journal.place}, which has steps "
            f"{journal.files[0].step} to {journal.files[-1].step}; name one of them (a run keeps "
            "its newest run.journal_steps)"
        )
    return file


def load_step(path: Path) -> JournalStep:
    """Read a journal file, which has one step. Raises: ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return read_step(file)
    except (JournalDamaged, OSError) as error:
        raise _unreadable(path, error) from error


def find_entry(journal: OpenJournal, name: str) -> tuple[JournalStep, TrajectoryEntry]:
    """Return the step and the entry of the trajectory that a name denotes.

    If a rollout had several attempts, the newest is returned. Args: name: a trajectory's id, a
    rollout's id, a session's id, or TASK-MEMBER (a task's id, and a member's number in the group).
    Raises: UnknownTrajectory if no trajectory has the name; ConfigError if a file cannot be read.
    """
    known: list[str] = []
    for file in reversed(journal.files):
        ids = _ids_of(file.path)
        wanted = [each for each in ids if name in (each, each.rpartition(".a")[0])]
        if wanted:
            step = load_step(file.path)
            return step, step.entries[ids.index(wanted[-1])]
        known += ids
    if (found := _find_member(journal, name)) is not None:
        return found
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "`rayloom inspect RUN_DIR` lists them"
    raise UnknownTrajectory(
        f"inspect: no trajectory {name} in the journal of {journal.place} (steps "
        f"{journal.files[0].step} to {journal.files[-1].step}, {len(known)} trajectories); {hint}"
    )


def _find_member(journal: OpenJournal, name: str) -> tuple[JournalStep, TrajectoryEntry] | None:
    task, _, member = name.rpartition("-")
    if not (task and member.isdecimal()):
        return None
    for file in reversed(journal.files):
        step = load_step(file.path)
        for entry in reversed(step.entries):
            trajectory = entry.trajectory
            is_member = trajectory.rollout_id.rpartition("-")[2] == member
            if trajectory.task_id == task and is_member:
                return step, entry
    return None


def tokenizer_of(journal: OpenJournal) -> TokenText:
    """Return the tokenizer of the configured model, or of the tiny model that the run has made.

    If neither is available, return a `TokenText` that shows token ids and says why.
    """
    run_dir = journal.run_dir or RunDir(path=journal.place.resolve().parent.parent)
    try:
        config = config_beside(run_dir)
    except ConfigError as error:
        return token_text(None, template_options={}, chat_template=None, why_not=str(error))
    tiny = run_dir.tiny_model if (run_dir.tiny_model / "config.json").is_file() else None
    return token_text(
        config.model.path or (str(tiny) if tiny else None),
        template_options=config.rollouts.template_options,
        chat_template=config.model.chat_template,
        why_not=f"the run's own model is not in {run_dir.tiny_model}",
    )


def config_beside(run_dir: RunDir) -> Config:
    """Return the run's configuration, from the file next to the journal.

    Raises: ConfigError if the file cannot be read, or if the journal was copied without the file.
    """
    if not run_dir.config_file.is_file():
        raise ConfigError(f"there is no {run_dir.config_file.name} next to the journal")
    try:
        return load_config(run_dir.config_file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run_dir.config_file} cannot be read ({error})") from error


def _ids_of(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            return read_index(file).trajectory_ids
    except (JournalDamaged, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error}); expected a journal file as a run writes it; "
        "restore it from a copy, or remove it to read the others"
    )
