"""Recompute a step's gradient from the journal and a checkpoint, split by trajectory. Uses no Ray.

The journal has the samples that the step trained, and their advantages. The samples' loss weights
and the gradients are computed by the same code as in a run, with one rank of the trainer in this
process. This module only reads files. `rayloom explain` calls it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from actors.algorithm import Baseline
from actors.batch import Float64s, RankShard
from actors.journal.files import GroupRule, JournalFile, JournalStep, TrajectoryEntry
from actors.merge.advantages import group_advantages
from actors.merge.journal import members_of
from actors.merge.packing import WeightedSample, pack_row
from actors.merge.step import pack_updates, weigh_updates
from actors.network import LOOPBACK
from actors.trainer.attribution import GradientPart, SplitGradient
from actors.trainer.checkpoint import CheckpointError, read_manifest
from actors.trainer.process_group import open_store
from actors.trainer.rank import TrainerRank
from actors.trainer.settings import RankSettings
from actors.types import Trajectory
from service.config.file import ConfigError
from service.config.tree import Config
from service.inspect.reader import (
    OpenJournal,
    config_beside,
    file_of_step,
    load_step,
    open_journal,
)
from service.launch.run_dir import RunDir
from service.store.errors import StoreError
from service.store.lineage import Checkpoint, read_history
from service.telemetry.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """The data from which a step's gradient is recomputed.

    They are the step's journal, the step's record, and weights from before the step. The weights
    are those of the newest readable checkpoint, or of the model from which training started.
    """

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
    """The journal's files of the steps between the loaded checkpoint's step and `step`.

    There are fewer files than `num_behind` if some files are missing.
    """
    recorded_grad_norm: float
    """The step's recorded gradient norm before clipping; NaN if no norm was recorded."""
    is_of_older_term: bool
    """Whether the run was resumed after the step, so that its settings may have changed."""

    @property
    def num_behind(self) -> int:
        """Number of steps that come after the loaded checkpoint and before `step`."""
        return self.step.step - 1 - self.weights_step

    def steps_between(self) -> tuple[JournalStep, ...]:
        """Load the steps that come after the loaded checkpoint and before `step`.

        Raises: ConfigError if the journal of one is missing.
        """
        if len(self.between) < self.num_behind:
            raise ConfigError(
                f"explain: --replay needs the journal of steps {self.weights_step + 1} to "
                f"{self.step.step - 1}, got {len(self.between)} of {self.num_behind}; omit "
                f"--replay to compute the gradient at the weights of step {self.weights_step}"
            )
        return tuple(load_step(file.path) for file in self.between)


def find_source(run: Path, number: int) -> StepSource:
    """Find the data from which the gradient of step `number` is recomputed.

    Raises: ConfigError if they are missing or cannot be used.
    """
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
        recorded_grad_norm=_recorded_norm(history.steps, number),
        is_of_older_term=step.term < newest_term,
    )


def _journal_step(journal: OpenJournal, number: int) -> JournalStep:
    step = load_step(file_of_step(journal, number, command="explain").path)
    if not any(entry.reason is None for entry in step.entries):
        raise ConfigError(
            f"explain: step {number} trained nothing, expected a step that trained a trajectory; "
            f"`rayloom inspect {journal.place} --step {number}` shows why each was left out"
        )
    return step


def _newest_before(run_dir: RunDir, commits: list[Checkpoint], number: int) -> Checkpoint | None:
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


def _recorded_norm(steps: tuple[StepRecord, ...], number: int) -> float:
    record = next((record for record in steps if record.step == number), None)
    found = None if record is None else record.value("grad_norm")
    return math.nan if found is None else found


_STORE_TIMEOUT_S = 60.0
# Limit on the policy age that accepts everything that the step trained; no group is admitted here.
_ANY_LAG = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The part g of an update's gradient G that comes from one trajectory or one group.

    If the step has several updates, `share` is the mean over all updates; `norm` and `cosine` are
    the means over the updates that trained the part.
    """

    entries: tuple[TrajectoryEntry, ...]
    """The trajectory, or the trained trajectories of the group."""
    norm: float
    """|g|, the norm of the part."""
    share: float
    """g . G / |G|^2; the shares of all trajectories add up to 1. NaN if G is 0 or not finite."""
    cosine: float
    """g . G / (|g| |G|); NaN under the same conditions as `share`."""
    own_share: float = 1.0
    """The smallest share of a trajectory's advantage that remains when another member of the group
    is left out.

    The value is 1 for a group, and if advantages do not depend only on the group's returns.
    """

    @property
    def first(self) -> Trajectory:
        return self.entries[0].trajectory

    @property
    def own_norm(self) -> float:
        return self.norm * self.own_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A step's update, split by trajectory and by group."""

    source: StepSource
    replayed_steps: int
    """Number of steps trained again from the journal to reach the weights before the step."""
    device: str
    grad_norm: float
    """The recomputed norm before clipping; the mean over the step's finite updates."""
    num_updates: int
    trajectories: tuple[Contribution, ...]
    groups: tuple[Contribution, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the gradient was computed at exactly the weights with which the step began."""
        return self.source.num_behind == self.replayed_steps


def explain_step(source: StepSource, *, replays: bool = False) -> Explanation:
    """Recompute a step's gradient, separately for each trajectory.

    replays: first train the steps between the checkpoint and this step again, so that the gradient
    is computed at the step's own weights. False uses the checkpoint's weights. Raises: ConfigError.
    """
    settings = _one_rank(source.config, source.model)
    before = source.steps_between() if replays else ()
    with _rank(settings, source) as rank:
        for step in before:
            _train_again(rank, step, source.config)
        step = source.step
        updates = weigh_updates(
            members_of(step), source.config.step_settings(), trainer_version=step.trainer_version
        )
        entries = {entry.trajectory.trajectory_id: entry for entry in step.entries}
        named = [[entries[_name(samples)] for samples in update] for update in updates]
        rank.renumber(step.trainer_version, ())
        found = rank.split_step(
            _shard(step, updates, share_prefixes=settings.trainer.share_prefixes),
            [[entry.trajectory.group_id for entry in update] for update in named],
        )
        device = str(rank.device)
    # Each epoch has every update once.
    named = named * settings.algorithm.epochs
    return Explanation(
        source=source,
        replayed_steps=source.num_behind if replays else 0,
        device=device,
        grad_norm=_grad_norm(found),
        num_updates=len(found),
        trajectories=_trajectories(found, named, own=_own_shares(step)),
        groups=_groups(found, named),
    )


def _one_rank(config: Config, model: str) -> RankSettings:
    """Return the run's trainer settings for one rank in this process."""
    has_gpu = config.trainer.device == "cuda" and torch.cuda.is_available()
    trainer = replace(
        config.trainer,
        num_ranks=1,
        device="cuda" if has_gpu else "cpu",
    )
    # Leave out the critic and the reward's reference model. They only help to compute
    # advantages, which the journal already has.
    algorithm = replace(
        config.algorithm,
        baseline=Baseline.NONE,
        reward=replace(config.algorithm.reward, kl=None),
        max_lag=_ANY_LAG,
    )
    # Nothing is saved, so the directory of checkpoints stays as it is.
    settings = config.rank_settings(model=model, checkpoint_dir=Path(os.devnull))
    return replace(settings, trainer=trainer, algorithm=algorithm)


@contextmanager
def _rank(settings: RankSettings, source: StepSource) -> Iterator[TrainerRank]:
    """Start a rank with the weights from before the step."""
    store = open_store(LOOPBACK, num_ranks=1, timeout_s=_STORE_TIMEOUT_S)
    try:
        rank = TrainerRank(settings, rank=0, store=store)
    except (OSError, NotImplementedError) as error:
        # A rank joins its process group before it loads its model.
        dist.destroy_process_group()
        raise ConfigError(f"explain: the model {settings.model} cannot be used: {error}") from error
    try:
        if source.checkpoint is not None:
            rank.load(source.checkpoint)
        yield rank
    except CheckpointError as error:
        raise ConfigError(f"explain: {error}") from error
    finally:
        rank.close()


def _train_again(rank: TrainerRank, step: JournalStep, config: Config) -> None:
    settings = replace(config, trainer=rank.settings.trainer).step_settings()
    updates = weigh_updates(members_of(step), settings, trainer_version=step.trainer_version)
    (shard,) = pack_updates(updates, settings, step=step.step, trainer_version=step.trainer_version)
    rank.renumber(step.trainer_version, ())
    rank.train_step(shard)


def _shard(
    step: JournalStep, updates: Sequence[Sequence[list[WeightedSample]]], *, share_prefixes: bool
) -> RankShard:
    """Pack the step's updates with one trajectory in each row."""
    return RankShard(
        step=step.step,
        trainer_version=step.trainer_version,
        minibatches=tuple(
            tuple(pack_row(samples, share_prefixes=share_prefixes) for samples in update)
            for update in updates
        ),
    )


def _name(samples: Sequence[WeightedSample]) -> str:
    return samples[0].sample.trajectory_id


def _grad_norm(updates: Sequence[SplitGradient]) -> float:
    """Return the mean of the updates' finite gradient norms; infinity if no norm is finite."""
    # The step's record computes its norm in the same way, so that the two can be compared.
    finite = [update.norm for update in updates if math.isfinite(update.norm)]
    return _mean(finite) if finite else math.inf


def _trajectories(
    updates: Sequence[SplitGradient],
    named: Sequence[Sequence[TrajectoryEntry]],
    *,
    own: Mapping[str, float],
) -> tuple[Contribution, ...]:
    """Return the contribution of each trajectory to the step's updates.

    named: for each update, the trajectories in the order of the update's `rows`.
    own: `Contribution.own_share` by trajectory id; 1 if the id is missing.
    """
    found: dict[str, tuple[TrajectoryEntry, list[tuple[GradientPart, float]]]] = {}
    for update, entries in zip(updates, named, strict=True):
        for entry, part in zip(entries, update.rows, strict=True):
            parts = found.setdefault(entry.trajectory.trajectory_id, (entry, []))[1]
            parts.append((part, update.norm))
    return tuple(
        _contribution([entry], parts, num_updates=len(updates), own_share=own.get(name, 1.0))
        for name, (entry, parts) in found.items()
    )


def _own_shares(step: JournalStep) -> dict[str, float]:
    if step.group_rule is None:
        return {}
    returns: dict[str, dict[str, float]] = {}
    for entry in step.entries:
        if entry.baseline_return is not None:
            trajectory = entry.trajectory
            of_group = returns.setdefault(trajectory.group_id, {})
            of_group[trajectory.trajectory_id] = entry.baseline_return
    return {
        name: float(share)
        for of_group in returns.values()
        for name, share in zip(
            of_group, own_shares(list(of_group.values()), step.group_rule), strict=True
        )
    }


def _groups(
    updates: Sequence[SplitGradient], named: Sequence[Sequence[TrajectoryEntry]]
) -> tuple[Contribution, ...]:
    members: dict[str, dict[str, TrajectoryEntry]] = {}
    for entry in (entry for entries in named for entry in entries):
        trajectory = entry.trajectory
        members.setdefault(trajectory.group_id, {})[trajectory.trajectory_id] = entry
    return tuple(
        _contribution(
            entries.values(),
            [
                (update.groups[group_id], update.norm)
                for update in updates
                if group_id in update.groups
            ],
            num_updates=len(updates),
        )
        for group_id, entries in members.items()
    )


def _contribution(
    entries: Iterable[TrajectoryEntry],
    parts: Sequence[tuple[GradientPart, float]],
    *,
    num_updates: int,
    own_share: float = 1.0,
) -> Contribution:
    """Return the contribution of one trajectory, or of one group, to the step's updates.

    entries: the trajectory, or the group's trained trajectories. num_updates: all updates.
    parts: (g, |G|) for each update that trained the entries; g is their part of its gradient G.
    """
    return Contribution(
        entries=tuple(entries),
        norm=_mean(part.norm for part, _ in parts),
        share=math.fsum(_ratio(part.dot, whole**2) for part, whole in parts) / num_updates,
        cosine=_mean(_ratio(part.dot, part.norm * whole) for part, whole in parts),
        own_share=own_share,
    )


def _ratio(value: float, whole: float) -> float:
    return value / whole if whole and math.isfinite(whole) else math.nan


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


# How much a trajectory's advantage depends on one other member of its group; pure.
#
# One wrong reward moves its group's baseline, and with it the advantages of all members: their
# gradients are large although their own rewards are right. The part of an advantage that remains
# when any one other member is left out distinguishes these cases. A group of two is an exception:
# without the other member there is no baseline.
_SMALLEST = 3


def own_shares(returns: Sequence[float], rule: GroupRule) -> Float64s:
    """Return how much of each member's advantage remains if any one other member is left out.

    For member i of the group, leave out each other member j in turn, and compute the advantage A_i
    again. The share is the worst case: f_i = min(1, min_{j != i} |A_i without j| / |A_i|). A small
    share means that a single other member causes most of A_i. The share is 1 if A_i = 0, and in
    groups of one or two.

    Args: returns: [G] float, the members' returns. Returns: [G] float, in [0, 1].
    Example: returns [-100, 0, 1, 0], no scale: [.99, .013, .026, .013], rounded
    """
    size = len(returns)
    values = np.abs(group_advantages(returns, baseline=rule.baseline, scale=rule.scale))
    if size < _SMALLEST:
        return np.ones(size)
    smallest = values.copy()
    for left_out in range(size):
        rest = np.arange(size) != left_out
        of_rest = group_advantages(
            [value for value, stays in zip(returns, rest, strict=True) if stays],
            baseline=rule.baseline,
            scale=rule.scale,
        )
        smallest[rest] = np.minimum(smallest[rest], np.abs(of_rest))
    return np.where(values > 0, smallest / np.where(values > 0, values, 1.0), 1.0)
