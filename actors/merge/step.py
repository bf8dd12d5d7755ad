"""One training step's data, from closed groups to what each rank trains on; pure.

Order: merge the turns, apply the outcome policy, group statistics (by group, over trajectories),
advantages, packing. Invariant: every trajectory that comes in leaves with exactly one settlement,
and it is `trained` exactly when its tokens are in the batch. A group without a signal (equal
returns, or one member) has advantage 0. Where nothing else in the loss asks anything of its tokens
it is settled as zero_variance and not in the rows, but it counts in the loss weights, so that
solved groups weaken the update instead of leaving it to the few others. Where an entropy bonus or
a KL term does, it is trained. Called by the merge actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.batch import Minibatch, RankShard
from actors.merge.advantages import group_advantages
from actors.merge.aggregation import (
    IdleCounts,
    TrajectorySize,
    share_of_idle,
    trajectory_weights,
)
from actors.merge.dispositions import Verdict, judge
from actors.merge.packing import WeightedSample, pack_minibatch, split_trajectories
from actors.merge.prefix import Merged, find_misalignment, merge_turns
from actors.merge.report import StepReport, StepTallies, report_step
from actors.merge.settings import StepSettings
from actors.trajectory import Trajectory
from actors.trajectory_queue.ledger import EvictionReason, Settlement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The members of one closed group that the queue kept."""

    group_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """shards: one for each rank. settlements: one for each trajectory."""

    shards: tuple[RankShard, ...]
    settlements: tuple[Settlement, ...]
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A trajectory on its way: advantage is 0 until its group has been looked at.

    has_signal: False when its group was found to have none.
    """

    trajectory: Trajectory
    merged: Merged | None
    verdict: Verdict
    advantage: float = 0.0
    has_signal: bool = True

    @property
    def is_trained(self) -> bool:
        return self.verdict.reason is None


def build_step(
    groups: Sequence[TrajectoryGroup], settings: StepSettings, *, step: int, trainer_version: int
) -> StepResult:
    """Make the batch of one step.

    Args: step: its number. trainer_version: the policy version that the trainer holds.
    Raises: ValueError when the advantages refuse a group's returns (scale mean, negative ones).
    """
    judged = [_judge_group(group, settings) for group in groups]
    members = [member for group in judged for member in group]
    shards = _pack(
        [member for member in members if member.is_trained],
        settings,
        idle=_count_idle(members),
        step=step,
        trainer_version=trainer_version,
    )
    verdicts = [member.verdict for member in members]
    tallies = StepTallies(
        trajectories=[member.trajectory for member in members],
        merged=[member.merged for member in members],
        advantages=[member.advantage for member in members if member.is_trained],
        evictions=[verdict.reason for verdict in verdicts if verdict.reason is not None],
        num_groups=len(groups),
        num_zero_variance_groups=sum(any(not m.has_signal for m in g) for g in judged),
        num_malformed_rewarded=sum(verdict.is_malformed_rewarded for verdict in verdicts),
    )
    return StepResult(
        shards=shards,
        settlements=tuple(Settlement(rollout_id=v.rollout_id, reason=v.reason) for v in verdicts),
        report=report_step(tallies, shards),
    )


def _judge_group(group: TrajectoryGroup, settings: StepSettings) -> list[_Member]:
    members = [_judge(trajectory, settings) for trajectory in group.trajectories]
    returns = {
        member.verdict.rollout_id: member.verdict.baseline_return
        for member in members
        if member.verdict.baseline_return is not None
    }
    if not returns:
        return members
    try:
        result = group_advantages(
            [value for value in returns.values() if value is not None],
            baseline=settings.baseline,
            scale=settings.scale,
        )
    except ValueError as error:
        raise ValueError(f"group {group.group_id}: {error}") from error
    advantages = dict(zip(returns, result.values.tolist(), strict=True))
    if not result.has_signal:
        return [_without_signal(member, settings) for member in members]
    return [
        replace(member, advantage=advantages[member.verdict.rollout_id])
        if member.is_trained
        else member
        for member in members
    ]


def _judge(trajectory: Trajectory, settings: StepSettings) -> _Member:
    merged = merge_turns(trajectory) if find_misalignment(trajectory) is None else None
    verdict = judge(trajectory, merged, policies=settings.policies)
    return _Member(trajectory=trajectory, merged=merged, verdict=verdict)


def _without_signal(member: _Member, settings: StepSettings) -> _Member:
    """A member of a group whose advantages are all 0: idle, unless the loss has other terms."""
    if not member.is_trained:
        return member
    if settings.trains_without_signal:
        return replace(member, has_signal=False)
    verdict = replace(member.verdict, reason=EvictionReason.ZERO_VARIANCE)
    return replace(member, verdict=verdict, has_signal=False)


def _count_idle(members: Sequence[_Member]) -> IdleCounts:
    """What would be trained, had the group's returns differed."""
    idle = [m for m in members if m.verdict.reason is EvictionReason.ZERO_VARIANCE]
    return IdleCounts(
        num_tokens=sum(m.merged.num_trained_tokens for m in idle if m.merged is not None),
        num_trajectories=len(idle),
        num_groups=len({m.trajectory.group_id for m in idle}),
    )


def _pack(
    trained: Sequence[_Member],
    settings: StepSettings,
    *,
    idle: IdleCounts,
    step: int,
    trainer_version: int,
) -> tuple[RankShard, ...]:
    """What is idle is shared out over the updates in proportion to what they train."""
    parts = split_trajectories(
        [member.trajectory.group_id for member in trained],
        num_minibatches=settings.num_minibatches,
        seed=settings.seed,
        step=step,
    )
    sizes = [_size(member) for member in trained]
    minibatches: list[list[Minibatch]] = []
    for part in parts:
        of_part = [sizes[index] for index in part]
        weights = trajectory_weights(
            of_part,
            aggregation=settings.aggregation,
            idle=share_of_idle(idle, of_part, sizes),
            constant_tokens=settings.constant_tokens,
        )
        packed = pack_minibatch(
            _weighted([trained[index] for index in part], weights.tolist()),
            num_ranks=settings.num_ranks,
            budget=settings.tokens_per_micro_batch,
            attention_tokens=settings.attention_tokens,
        )
        minibatches.append(packed)
    return tuple(
        RankShard(step=step, trainer_version=trainer_version, minibatches=tuple(of_rank))
        for of_rank in zip(*minibatches, strict=True)
    )


def _size(member: _Member) -> TrajectorySize:
    return TrajectorySize(
        trajectory_id=member.trajectory.trajectory_id,
        group_id=member.trajectory.group_id,
        num_tokens=member.merged.num_trained_tokens if member.merged is not None else 0,
    )


def _weighted(members: Sequence[_Member], weights: Sequence[float]) -> list[WeightedSample]:
    """The samples that hold a trained token, with what their trajectory gives each token."""
    return [
        WeightedSample(sample=sample, advantage=member.advantage, loss_weight=weight)
        for member, weight in zip(members, weights, strict=True)
        if member.merged is not None
        for sample in member.merged.samples
        if sample.num_trained
    ]
