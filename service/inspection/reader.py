"""Where a journal lies, which of its files survive, and which of them holds a trajectory.

A run's directory may hold a step twice, of two epochs; the run's database says which one the run
went on from. Without a database (a copied journal) the newest epoch of each step counts. Called by
`rayloom inspect`; reads only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.journal.codec import JournalDamaged, read_index, read_step
from actors.journal.files import JournalFile, list_files
from actors.journal.record import JournalStep, TrajectoryEntry
from service.config.file import ConfigError
from service.run_dir import RunDir
from service.store.lineage import History, Stretch, read_history, surviving_stretches
from service.store.run_store import RunStore, StoreError

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJournal:
    """place: as the user named it. run_dir: None for a file on its own. files: those that survive,
    by step. num_superseded: files of steps that a later epoch played again. history: of the run's
    database, where there is one.
    """

    place: Path
    run_dir: RunDir | None
    files: tuple[JournalFile, ...]
    num_superseded: int = 0
    history: History | None = None

    def steps(self) -> Iterator[JournalStep]:
        """Raises: ConfigError for a file that cannot be read."""
        for file in self.files:
            yield load_step(file.path)


def newest_run(runs: Path = RUNS) -> Path:
    """The run directory under runs/ whose journal was written last. Raises: ConfigError."""
    journals = [path for path in runs.glob("*/journal") if path.is_dir()]
    if not journals:
        raise ConfigError(
            f"inspect: no run with a journal lies under {runs}/; expected one; name it with --run "
            "RUN_DIR"
        )
    return max(journals, key=lambda path: path.stat().st_mtime).parent


def open_journal(place: Path) -> OpenJournal:
    """Open a run's directory, or one journal file. Raises: ConfigError."""
    if place.is_file():
        step = load_step(place)
        file = JournalFile(path=place, step=step.step, epoch=step.epoch)
        return OpenJournal(place=place, run_dir=None, files=(file,))
    run_dir = RunDir(path=place)
    files = list_files(run_dir.journal)
    if not files:
        raise ConfigError(
            f"inspect: {place} has no journal; expected a run directory with {run_dir.journal.name}"
            "/step-….npz in it, as `rayloom train` writes them unless run.journal_steps is 0"
        )
    stretches, history = _lineage(run_dir)
    kept = surviving_files(files, stretches)
    return OpenJournal(
        place=place,
        run_dir=run_dir,
        files=tuple(kept),
        num_superseded=len(files) - len(kept),
        history=history,
    )


def surviving_files(
    files: Sequence[JournalFile], stretches: Sequence[Stretch] | None
) -> list[JournalFile]:
    """One file a step, those of the run's lineage; None: not known, the newest epoch counts.

    Example: epoch 1 wrote steps 1 to 4, epoch 2 went on from 2 and wrote 3: 1, 2 of epoch 1, and
    3 of epoch 2.
    """
    if stretches is None:
        return list({file.step: file for file in files}.values())
    last_steps = {stretch.epoch: stretch.last_step for stretch in stretches}
    return [
        file
        for file in files
        if file.epoch in last_steps
        and ((last := last_steps[file.epoch]) is None or file.step <= last)
    ]


def load_step(path: Path) -> JournalStep:
    """Raises: ConfigError."""
    try:
        with path.open("rb") as file:
            return read_step(file)
    except (JournalDamaged, OSError) as error:
        raise _unreadable(path, error) from error


def find_entry(journal: OpenJournal, name: str) -> tuple[JournalStep, TrajectoryEntry]:
    """Find a trajectory by its id, or by its rollout's; of several attempts the newest.

    Raises: ConfigError with the nearest ids when there is none of that name.
    """
    known: list[str] = []
    for file in reversed(journal.files):
        ids = _ids_of(file.path)
        wanted = [each for each in ids if name in (each, each.rpartition(".a")[0])]
        if wanted:
            step = load_step(file.path)
            return step, step.entries[ids.index(wanted[-1])]
        known += ids
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "`rayloom inspect RUN_DIR` lists them"
    raise ConfigError(
        f"inspect: no trajectory {name} in the journal of {journal.place} (steps "
        f"{journal.files[0].step} to {journal.files[-1].step}, {len(known)} trajectories); {hint}"
        if journal.files
        else f"inspect: the journal of {journal.place} holds no step of the run's lineage"
    )


def _ids_of(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            return read_index(file).trajectory_ids
    except (JournalDamaged, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"inspect: {path} cannot be read ({error}); expected a journal file as a run writes it; "
        "restore it from a copy, or remove it to look at the others"
    )


def _lineage(run_dir: RunDir) -> tuple[list[Stretch] | None, History | None]:
    if not run_dir.database_file.is_file():
        return None, None
    try:
        store = RunStore(run_dir.database_url)
        try:
            with store.reading() as connection:
                stretches = surviving_stretches(connection)
            return stretches, read_history(store)
        finally:
            store.close()
    except StoreError as error:
        raise ConfigError(f"inspect: {error}") from error
