"""The record of a trajectory while its step is built, and the numbering of its trained tokens.

Every stage of a step takes members and returns new ones with more fields set. `groups` sets the
rewards, the returns and the KL rewards. `scoring` sets the scores. `advantages` sets the advantages
and the critic's values. `step` sets `no_signal`. Both `groups` and `step` may set `reason`, which
keeps a trajectory out of the loss. The N trained tokens of a trajectory are numbered in the order
of play, across its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.batch import Float32s, Float64s, Int64s, RowScores
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trajectory of a group, with the rewards, scores and advantages computed in its step.

    Letters: [K] turns, [N] trained tokens of the trajectory, [M] trained tokens of one sample.
    """

    trajectory: Trajectory
    reason: EvictionReason | None
    """The reason why the trajectory is not in the loss; None if it is in the loss."""
    problem: str = ""
    """A sentence on a trajectory that cannot be used, with a remedy; empty for a usable
    trajectory.
    """
    rewards: Float64s = field(default_factory=lambda: np.empty(0))
    """[K], the reward of each turn after shaping and after the outcome's rule, which changes only
    the last reward.
    """
    baseline_return: float | None = None
    """The return in the group's baseline; None if the trajectory is not in the baseline."""
    shaped_return: float
    """The return after shaping, before the outcome's rule is applied."""
    scores: tuple[RowScores, ...] = ()
    """The scores of each sample; empty if no reference or critic has scored the samples."""
    kl_rewards: Float64s | None = None
    """[N], the negated KL penalties of the trained tokens, which are added to the rewards; None if
    the settings have no KL penalty in the reward.
    """
    advantages: tuple[Float64s, ...] = ()
    """The advantages of each sample's trained tokens, [M]; empty if the member is not in the
    baseline.
    """
    no_signal: EvictionReason | None = None
    """The reason why all advantages of the member's group are 0; None if any of them is not 0."""
    old_values: tuple[Float32s, ...] = ()
    """For each sample, [M]: the critic's values of the states in which the tokens were sampled."""
    value_targets: tuple[Float32s, ...] = ()
    """For each sample, [M]: the values that the critic is trained to predict."""

    @property
    def is_trained(self) -> bool:
        return self.reason is None

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.trajectory.samples

    @property
    def is_malformed_rewarded(self) -> bool:
        """Whether the environment gave a positive return and the outcome is malformed_tool_call.

        False if the member has a `problem`. The step's report counts these trajectories, and they
        raise an alarm.
        """
        is_malformed = self.trajectory.outcome is Outcome.MALFORMED_TOOL_CALL
        return is_malformed and not self.problem and self.trajectory.episode_return > 0


def turn_bounds(member: Member) -> Int64s:
    """Return where each turn's tokens begin and end among the trajectory's trained tokens: [K + 1].

    The trained tokens of turn k have the indices bounds[k] to bounds[k + 1] - 1.
    """
    counts = np.zeros(len(member.trajectory.turns), np.int64)
    for sample in member.samples:
        mask = sample.mask
        for turn in sample.turns:
            counts[turn.index] = np.count_nonzero(mask[turn.tokens])
    return np.append(0, np.cumsum(counts))


def token_numbers(sample: Sample, bounds: Int64s) -> Int64s:
    """Return, for each trained token of a sample, its index among the trajectory's trained tokens.

    Args: bounds: from `turn_bounds`.    Returns: [M] int64.
    """
    return np.concatenate(
        [np.arange(bounds[turn.index], bounds[turn.index + 1]) for turn in sample.turns]
    )
