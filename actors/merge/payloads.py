"""From a step as the queue describes it to trajectories; pure. Called by the merge actor."""

from __future__ import annotations

from collections.abc import Sequence

from actors.merge.groups import TrajectoryGroup
from actors.trajectory_queue.columns import TrajectoryColumns, decode
from actors.trajectory_queue.messages import StepGroup, StepInput


class PayloadsLost(Exception):
    """Payloads of finished rollouts are gone; tell the queue (`lost`) and take the step again."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__(tuple(rollout_ids))
        self.rollout_ids = tuple(rollout_ids)

    def __str__(self) -> str:
        first = ", ".join(self.rollout_ids[:4])
        return f"merge: the payloads of {len(self.rollout_ids)} rollouts were lost: {first}, ..."


def read_groups(
    step_input: StepInput, blocks: Sequence[TrajectoryColumns | None]
) -> list[TrajectoryGroup]:
    """Decode a step's trajectories from its blocks, in the order of step_input.blocks.

    Raises: PayloadsLost, naming every rollout whose block is None.
    """
    lost = [
        member.summary.rollout_id
        for group in step_input.groups
        for member in group.trajectories
        if blocks[member.block] is None
    ]
    if lost:
        raise PayloadsLost(lost)
    return [_read_group(group, blocks) for group in step_input.groups]


def _read_group(group: StepGroup, blocks: Sequence[TrajectoryColumns | None]) -> TrajectoryGroup:
    columns = [(blocks[member.block], member.row) for member in group.trajectories]
    trajectories = tuple(decode(block, row) for block, row in columns if block is not None)
    return TrajectoryGroup(group_id=group.group_id, trajectories=trajectories)
