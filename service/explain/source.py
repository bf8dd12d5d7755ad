"""Find the sources for recomputing a step: its journal file, its record and an earlier checkpoint.

Reads only. Called by `rayloom explain`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from actors.journal.files import JournalFile, JournalStep
from actors.trainer.checkpoint import CheckpointError, read_manifest
from service.config.file import ConfigError
from service.config.tree import Config
from service.inspect.reader import OpenJournal, config_beside, load_step, open_journal
from service.launch.run_dir import RunDir
from service.store.errors import StoreError
from service.store.lineage import Checkpoint, read_history
from service.telemetry.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """A step, and the newest available weights that were trained before this step."""

    run: Path
    """The run's directory, as the user gave it."""
    config: Config
    model: str
    """The model from which training started."""
    step: JournalStep
    checkpoint: Path | None
    """The checkpoint with the weights; None means the model from which training started."""
    weights_step: int
    """Number of steps for which these weights have been trained."""
    between: tuple[JournalFile, ...]
    """The journal's files of the steps between these weights and the step.

    They are fewer than `num_behind` if some are missing.
    """
    recorded_grad_norm: float
    """The step's recorded gradient norm before clipping; NaN if it has none."""
    is_of_older_term: bool
    """Whether the run was resumed after the step, so that its settings may have changed."""

    @property
    def num_behind(self) -> int:
        """Number of steps between these weights and those with which the step began."""
        return self.step.step - 1 - self.weights_step

    def steps_between(self) -> tuple[JournalStep, ...]:
        """Load the steps after the checkpoint's and before this one. Raises: ConfigError."""
        if len(self.between) < self.num_behind:
            raise ConfigError(
                f"explain: --replay needs the journal of steps {self.weights_step + 1} to "
                f"{self.step.step - 1}, got {len(self.between)} of {self.num_behind}; leave it "
                f"out, to compute the gradient at the weights of step {self.weights_step}"
            )
        return tuple(load_step(file.path) for file in self.between)


def find_source(run: Path, number: int) -> StepSource:
    """Find the sources for recomputing a step. Raises: ConfigError."""
    journal = open_journal(run)
    run_dir = journal.run_dir
    if run_dir is None or not journal.has_database:
        raise ConfigError(
            f"explain: {run} is only a journal, without the run's checkpoints and database; "
            "expected a run directory; name it"
        )
    step = _journal_step(journal, number)
    try:
        config = config_beside(run_dir)
        with run_dir.looked_into() as store:
            history, commits = read_history(store), store.checkpoints()
            newest_term = store.newest_term()
    except (ConfigError, StoreError) as error:
        raise ConfigError(f"explain: {error}") from error
    commit = _newest_before(run_dir, commits, number)
    weights_step = 0 if commit is None else commit.step
    return StepSource(
        run=run,
        config=config,
        model=_model(config, run_dir),
        step=step,
        checkpoint=None if commit is None else run_dir.checkpoints / commit.directory,
        weights_step=weights_step,
        between=tuple(file for file in journal.files if weights_step < file.step < number),
        recorded_grad_norm=_grad_norm(history.steps, number),
        is_of_older_term=step.term < newest_term,
    )


def _journal_step(journal: OpenJournal, number: int) -> JournalStep:
    file = next((file for file in journal.files if file.step == number), None)
    if file is None:
        raise ConfigError(
            f"explain: --step {number} is not in the journal of {journal.place}, which has steps "
            f"{journal.files[0].step} to {journal.files[-1].step}; name one of them (a run keeps "
            "its newest run.journal_steps)"
        )
    step = load_step(file.path)
    if not any(entry.reason is None for entry in step.entries):
        raise ConfigError(
            f"explain: step {number} trained nothing, expected a step that trained a trajectory; "
            f"`rayloom inspect {journal.place} --step {number}` shows why each was left out"
        )
    return step


def _newest_before(run_dir: RunDir, commits: list[Checkpoint], number: int) -> Checkpoint | None:
    """Return the newest readable checkpoint from before step `number`; None if there is none."""
    for commit in sorted(commits, key=lambda commit: commit.step, reverse=True):
        if commit.step < number:
            try:
                read_manifest(run_dir.checkpoints / commit.directory)
            except CheckpointError:
                continue
            return commit
    return None


def _model(config: Config, run_dir: RunDir) -> str:
    if config.model.path is not None:
        path = Path(config.model.path).expanduser()
        return str(path.absolute()) if path.is_dir() else config.model.path
    if not (run_dir.tiny_model / "config.json").is_file():
        raise ConfigError(
            f"explain: the run's own model is not in {run_dir.tiny_model}; expected it there, as "
            "`rayloom train` built it; restore it"
        )
    return str(run_dir.tiny_model)


def _grad_norm(steps: tuple[StepRecord, ...], number: int) -> float:
    record = next((record for record in steps if record.step == number), None)
    found = None if record is None else record.value("grad_norm")
    return math.nan if found is None else found
