"""The journal's record of a training step: its trajectories, and what was decided on each.

A trajectory's samples are those that were packed for the trainer, with every sampled token's
log-probability and version. The record also holds the advantages of the trained tokens. The merge
actor makes it from a step's result; `rayloom inspect` and `rayloom explain` read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.batch import Float32s
from actors.merge.advantages import Baseline, Scale
from actors.merge.member import Member
from actors.merge.step import StepResult
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """A trajectory of a step, with its return in the baseline and its advantages."""

    trajectory: Trajectory
    reason: EvictionReason | None
    """Why it is not in the loss. None: trained."""
    baseline_return: float | None
    """Its return in its group's baseline. None: it was not in the baseline."""
    advantages: tuple[Float32s, ...]
    """One array for each sample, [M] float32: the advantages of its trained tokens in order, as the
    trainer received them. Empty if the trajectory is not in the loss.
    """
    problem: str = ""
    """A sentence on its fault; empty if it has none."""

    @property
    def num_trained(self) -> int:
        """The number of tokens that were given to the trainer."""
        return sum(int(each.shape[0]) for each in self.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """The rule that turns a group's returns into one advantage for each trajectory."""

    baseline: Baseline
    scale: Scale
    trains_without_signal: bool = False
    """Whether groups of equal returns are trained, as AlgorithmSettings has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStep:
    """A training step as it was played in one term."""

    step: int
    """1, 2, ..., as in the run's records and its ledger's rows."""
    term: int
    trainer_version: int
    max_policy_age: int
    """The run's bound, in versions. It counts versions that were published again for the same
    step.
    """
    group_rule: GroupRule | None
    """None if advantages depend on more than the group's returns."""
    num_packed_trained: int
    """Trained tokens in the packed rows of all ranks."""
    entries: tuple[TrajectoryEntry, ...]


def journal_step(
    result: StepResult, *, term: int, max_policy_age: int, group_rule: GroupRule | None
) -> JournalStep:
    """Convert a built step to the journal's record."""
    report = result.report
    return JournalStep(
        step=report.step,
        term=term,
        trainer_version=report.trainer_version,
        max_policy_age=max_policy_age,
        group_rule=group_rule,
        num_packed_trained=report.num_trained_tokens,
        entries=tuple(
            TrajectoryEntry(
                trajectory=member.trajectory,
                reason=member.reason,
                baseline_return=member.baseline_return,
                advantages=tuple(values.astype(np.float32) for values in member.advantages)
                if member.is_trained
                else (),
                problem=member.problem,
            )
            for member in result.members
        ),
    )


# Reasons why a group gives no training signal. Its members are not in the rows, but count in the
# loss weights.
_NO_SIGNAL = (EvictionReason.ZERO_VARIANCE, EvictionReason.NEGATIVE_RETURN)


def members_of(step: JournalStep) -> tuple[Member, ...]:
    """Rebuild the members that the step's rows were made of, with all that `weigh_updates`
    reads.
    """
    return tuple(
        Member(
            trajectory=entry.trajectory,
            reason=entry.reason,
            baseline_return=entry.baseline_return,
            shaped_return=entry.trajectory.episode_return,
            advantages=tuple(values.astype(np.float64) for values in entry.advantages),
            no_signal=entry.reason if entry.reason in _NO_SIGNAL else None,
        )
        for entry in step.entries
    )
