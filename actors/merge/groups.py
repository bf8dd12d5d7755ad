"""Closed groups as they come into a step, and their members merged and classified; pure.

The first stage of a step, done once: what a model is asked to score and what is trained are both
read from its result. Called by the merge actor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from actors.merge.disposition import classify
from actors.merge.member import Member
from actors.merge.misalignment import find_misalignment
from actors.merge.prefix import merge_turns
from actors.merge.settings import StepSettings
from actors.types import Trajectory

Group = tuple[Member, ...]
"""The members of one group, in the order of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The members of one closed group that the queue kept."""

    group_id: str
    trajectories: tuple[Trajectory, ...]


def merge_groups(groups: Sequence[TrajectoryGroup], settings: StepSettings) -> tuple[Group, ...]:
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
        tuple(_merge(trajectory, settings) for trajectory in group.trajectories) for group in groups
    )


def _merge(trajectory: Trajectory, settings: StepSettings) -> Member:
    misalignment = find_misalignment(trajectory, shape=settings.shape)
    return classify(
        trajectory,
        merge_turns(trajectory) if misalignment is None else None,
        misalignment=misalignment,
        policies=settings.policies,
        reward=settings.algorithm.reward,
    )
