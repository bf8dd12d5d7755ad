"""The journal's record of a training step: its trajectories, and what was decided on each.

A trajectory's samples are those that were packed for the trainer, with every sampled token's
log-probability and version. The record also holds the advantages of the trained tokens. The merge
actor makes it from a step's result; `rayloom inspect` and `rayloom explain` read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.algorithm import Baseline, Scale
from actors.batch import Float32s
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """A trajectory of a step, with its return in the baseline and its advantages."""

    trajectory: Trajectory
    reason: EvictionReason | None
    """The reason why it is not in the loss; None if it is trained."""
    baseline_return: float | None
    """Its return in its group's baseline; None if it was not in the baseline."""
    advantages: tuple[Float32s, ...]
    """One array for each sample, [M] float32: the advantages of its trained tokens in order, as the
    trainer received them. Empty if the trajectory is not in the loss.
    """
    problem: str = ""
    """A sentence on its fault; empty if it has none."""

    @property
    def num_trained(self) -> int:
        """The number of its tokens that were trained."""
        return sum(int(each.shape[0]) for each in self.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """The rule that turns a group's returns into one advantage for each trajectory."""

    baseline: Baseline
    scale: Scale
    trains_without_signal: bool = False
    """Whether groups of equal returns are trained (`AlgorithmSettings.trains_without_signal`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStep:
    """A training step as it was played in one term."""

    step: int
    """The step's number, counted from 1, as in the run's records and its ledger."""
    term: int
    trainer_version: int
    max_policy_age: int
    """The largest age of a trained token, in versions, including versions that were published again
    for the same step.
    """
    group_rule: GroupRule | None
    """The rule of its advantages; None if they depend on more than the group's returns."""
    num_packed_trained: int
    """Trained tokens in the packed rows of all ranks."""
    entries: tuple[TrajectoryEntry, ...]
