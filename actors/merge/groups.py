"""The first stage of a step: decode its closed groups and classify each member; pure.

The result decides both what is scored and what is trained. Called by the merge actor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.merge.disposition import classify, worst_completed_return
from actors.merge.member import Member
from actors.merge.settings import StepSettings
from actors.misalignment import find_misfit
from actors.trajectory_queue.codec import TrajectoryBlock, decode
from actors.trajectory_queue.messages import StepInput, StepTrajectory
from actors.types import Trajectory

GroupMembers = tuple[Member, ...]
"""The classified trajectories of one group of a step, in the order of the queue."""


class ScoresLost(Exception):
    """The ranks' scores are gone from the object store: the plan must be scored again."""


class PayloadsLost(Exception):
    """Payloads of finished rollouts are gone; report them to the queue (`lost`) and take the step
    again.
    """

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__(tuple(rollout_ids))
        self.rollout_ids = tuple(rollout_ids)

    def __str__(self) -> str:
        first = ", ".join(self.rollout_ids[:4])
        return f"merge: the payloads of {len(self.rollout_ids)} rollouts were lost: {first}, ..."


def read_groups(
    step_input: StepInput, blocks: Sequence[TrajectoryBlock | None]
) -> list[tuple[Trajectory, ...]]:
    """Decode a step's trajectories from its blocks, in the order of step_input.blocks.

    Raises: PayloadsLost, naming every rollout whose block is None.
    """
    lost = [
        member.rollout_id
        for group in step_input.groups
        for member in group
        if blocks[member.block] is None
    ]
    if lost:
        raise PayloadsLost(lost)

    def read(member: StepTrajectory) -> Trajectory:
        block = blocks[member.block]
        assert block is not None
        return decode(block, member.row)

    return [tuple(map(read, group)) for group in step_input.groups]


def classify_groups(
    groups: Sequence[Sequence[Trajectory]], settings: StepSettings
) -> tuple[GroupMembers, ...]:
    """Shape the rewards of every trajectory and apply its outcome's rule.

    Args: groups: for each group, the trajectories that the queue kept.
    Raises: ValueError if two trajectories are of one rollout: the ledger counts a rollout once.
    """
    rollouts = Counter(each.rollout_id for group in groups for each in group)
    repeated = [rollout_id for rollout_id, count in rollouts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"merge: rollout {repeated[0]} has {rollouts[repeated[0]]} trajectories in one step, "
            "expected one; give each rollout an id of its own"
        )
    return tuple(_classify_group(group, settings) for group in groups)


def _classify_group(group: Sequence[Trajectory], settings: StepSettings) -> GroupMembers:
    misfits = [find_misfit(trajectory, shape=settings.shape) for trajectory in group]
    fitting = [each for each, misfit in zip(group, misfits, strict=True) if misfit is None]
    worst_completed = worst_completed_return(fitting, settings.algorithm.reward)
    return tuple(
        classify(
            trajectory,
            misfit=misfit,
            policies=settings.policies,
            reward=settings.algorithm.reward,
            worst_completed=worst_completed,
        )
        for trajectory, misfit in zip(group, misfits, strict=True)
    )
