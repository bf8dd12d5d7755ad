"""Closed groups as they come into a step, and each trajectory's merged samples and verdict; pure.

The first stage of a step, done once: what a model is asked to score and what is trained are both
read from its result. Called by the merge actor, `scoring` and `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from actors.merge.dispositions import Verdict, judge
from actors.merge.misalignment import find_misalignment
from actors.merge.prefix import Merged, merge_turns
from actors.merge.settings import StepSettings
from actors.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The members of one closed group that the queue kept."""

    group_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrajectory:
    """merged: None for turns that do not fit together."""

    trajectory: Trajectory
    merged: Merged | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedGroup:
    """The same members in the same order."""

    group_id: str
    members: tuple[MergedTrajectory, ...]


def merge_groups(
    groups: Sequence[TrajectoryGroup], settings: StepSettings
) -> tuple[MergedGroup, ...]:
    """Merge the turns of every trajectory, shape its rewards and apply the outcome's rule.

    Raises: ValueError for two trajectories of one rollout, which no ledger could tell apart.
    """
    rollouts = Counter(each.rollout_id for group in groups for each in group.trajectories)
    repeated = [rollout_id for rollout_id, count in rollouts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"merge: rollout {repeated[0]} has {rollouts[repeated[0]]} trajectories in one step, "
            "expected one; give each rollout an id of its own"
        )
    return tuple(
        MergedGroup(
            group_id=group.group_id,
            members=tuple(_merge(trajectory, settings) for trajectory in group.trajectories),
        )
        for group in groups
    )


def _merge(trajectory: Trajectory, settings: StepSettings) -> MergedTrajectory:
    misalignment = find_misalignment(trajectory, shape=settings.shape)
    merged = merge_turns(trajectory) if misalignment is None else None
    return MergedTrajectory(
        trajectory=trajectory,
        merged=merged,
        verdict=judge(
            trajectory,
            merged,
            misalignment=misalignment,
            policies=settings.policies,
            reward=settings.algorithm.reward,
        ),
    )
