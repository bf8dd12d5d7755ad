"""Closed groups as they come into a step, and what the outcome's rule says of each member; pure.

The first stage of a step, done once: what a model is asked to score and what is trained are both
read from its result. Called by the merge actor, `scoring` and `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from actors.batch import Float32s
from actors.merge.dispositions import Verdict, judge
from actors.merge.misalignment import find_misfit
from actors.merge.settings import StepSettings
from actors.trajectory_queue.codec import TrajectoryBlock, decode
from actors.trajectory_queue.messages import StepGroup, StepInput
from actors.types import Trajectory

# Of one step; what is wrong with one trajectory is mostly wrong with many.
MAX_NOTICES = 3


class PayloadsLost(Exception):
    """Payloads of finished rollouts are gone; tell the queue (`lost`) and take the step again."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__(tuple(rollout_ids))
        self.rollout_ids = tuple(rollout_ids)

    def __str__(self) -> str:
        first = ", ".join(self.rollout_ids[:4])
        return f"merge: the payloads of {len(self.rollout_ids)} rollouts were lost: {first}, ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The members of one closed group that the queue kept."""

    group_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedTrajectory:
    """A trajectory with what a step decided on it."""

    trajectory: Trajectory
    verdict: Verdict
    advantages: tuple[Float32s, ...] = ()
    """Of each of its samples [M] float32, of the trained tokens in order. Empty before they are
    known, and for a trajectory that is not in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedGroup:
    """The same members in the same order."""

    group_id: str
    members: tuple[ClassifiedTrajectory, ...]


def read_groups(
    step_input: StepInput, blocks: Sequence[TrajectoryBlock | None]
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


def _read_group(group: StepGroup, blocks: Sequence[TrajectoryBlock | None]) -> TrajectoryGroup:
    rows = [(blocks[member.block], member.row) for member in group.trajectories]
    trajectories = tuple(decode(block, row) for block, row in rows if block is not None)
    return TrajectoryGroup(group_id=group.group_id, trajectories=trajectories)


def classify_groups(
    groups: Sequence[TrajectoryGroup], settings: StepSettings
) -> tuple[ClassifiedGroup, ...]:
    """Shape the rewards of every trajectory and apply the outcome's rule.

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
        ClassifiedGroup(
            group_id=group.group_id,
            members=tuple(_classify(trajectory, settings) for trajectory in group.trajectories),
        )
        for group in groups
    )


def _classify(trajectory: Trajectory, settings: StepSettings) -> ClassifiedTrajectory:
    return ClassifiedTrajectory(
        trajectory=trajectory,
        verdict=judge(
            trajectory,
            misfit=find_misfit(trajectory, shape=settings.shape),
            policies=settings.policies,
            shaping=settings.shaping,
        ),
    )


def problem_notices(classified: Sequence[ClassifiedTrajectory], *, step: int) -> tuple[str, ...]:
    """A sentence for each trajectory that was left out for what is wrong with it, three at most."""
    found = [each for each in classified if each.verdict.problem and each.verdict.reason]
    notices = [
        f"step {step}: trajectory {each.trajectory.trajectory_id} left out as "
        f"{each.verdict.reason}: {each.verdict.problem}"
        for each in found[:MAX_NOTICES]
    ]
    if len(found) > MAX_NOTICES:
        notices.append(f"step {step}: {len(found) - MAX_NOTICES} more like it; `rayloom inspect`")
    return tuple(notices)
