"""One training step's data, from closed groups to what each rank trains on; pure.

Order: merge the turns, apply the outcome policy, group statistics (by group, over trajectories),
advantages, packing. Invariant: every trajectory that comes in leaves with exactly one settlement,
and it is `trained` exactly when its tokens are in the batch. A group without a signal (equal
returns, or one member) is settled as zero_variance: it is not in the rows, because its gradient is
zero, but its tokens count in the denominators, so that solved groups weaken the update instead of
leaving it to the few others. Called by the merge actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.batch import Minibatch, RankShard
from actors.merge.advantages import group_advantages
from actors.merge.dispositions import Verdict, judge
from actors.merge.judged import JudgedTrajectory
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
    """shards: one for each rank. settlements, judged: one for each trajectory, in their order."""

    shards: tuple[RankShard, ...]
    settlements: tuple[Settlement, ...]
    report: StepReport
    judged: tuple[JudgedTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A trajectory on its way: advantage is 0 until its group has been looked at."""

    trajectory: Trajectory
    merged: Merged | None
    verdict: Verdict
    advantage: float = 0.0

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
        num_idle_tokens=sum(_num_idle_tokens(member) for member in members),
        step=step,
        trainer_version=trainer_version,
    )
    verdicts = [member.verdict for member in members]
    zero = EvictionReason.ZERO_VARIANCE
    tallies = StepTallies(
        trajectories=[member.trajectory for member in members],
        merged=[member.merged for member in members],
        advantages=[member.advantage for member in members if member.is_trained],
        evictions=[verdict.reason for verdict in verdicts if verdict.reason is not None],
        num_groups=len(groups),
        num_zero_variance_groups=sum(any(m.verdict.reason is zero for m in g) for g in judged),
        num_malformed_rewarded=sum(verdict.is_malformed_rewarded for verdict in verdicts),
    )
    return StepResult(
        shards=shards,
        settlements=tuple(Settlement(rollout_id=v.rollout_id, reason=v.reason) for v in verdicts),
        report=report_step(tallies, shards),
        judged=tuple(_handed_out(member) for member in members),
    )


def _handed_out(member: _Member) -> JudgedTrajectory:
    samples = member.merged.samples if member.merged is not None and member.is_trained else ()
    return JudgedTrajectory(
        trajectory=member.trajectory,
        merged=member.merged,
        verdict=member.verdict,
        advantages=tuple(np.full(s.num_trained, member.advantage, np.float32) for s in samples),
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
    return [_weigh(member, advantages, has_signal=result.has_signal) for member in members]


def _judge(trajectory: Trajectory, settings: StepSettings) -> _Member:
    merged = merge_turns(trajectory) if find_misalignment(trajectory) is None else None
    verdict = judge(trajectory, merged, policies=settings.policies)
    return _Member(trajectory=trajectory, merged=merged, verdict=verdict)


def _weigh(member: _Member, advantages: dict[str, float], *, has_signal: bool) -> _Member:
    if not member.is_trained:
        return member
    if not has_signal:
        verdict = replace(member.verdict, reason=EvictionReason.ZERO_VARIANCE)
        return replace(member, verdict=verdict)
    return replace(member, advantage=advantages[member.verdict.rollout_id])


def _num_idle_tokens(member: _Member) -> int:
    """Tokens that would be trained, had the group's returns differed."""
    is_idle = member.verdict.reason is EvictionReason.ZERO_VARIANCE
    return member.merged.num_trained_tokens if is_idle and member.merged is not None else 0


def _pack(
    trained: Sequence[_Member],
    settings: StepSettings,
    *,
    num_idle_tokens: int,
    step: int,
    trainer_version: int,
) -> tuple[RankShard, ...]:
    """Idle tokens are shared out over the updates in proportion to their trained tokens."""
    parts = split_trajectories(
        [member.trajectory.group_id for member in trained],
        num_minibatches=settings.num_minibatches,
        seed=settings.seed,
        step=step,
    )
    updates = [_weighted([trained[index] for index in part]) for part in parts]
    counts = [sum(each.sample.num_trained for each in update) for update in updates]
    minibatches: list[list[Minibatch]] = [
        pack_minibatch(
            update,
            num_idle_tokens=num_idle_tokens * count // max(1, sum(counts)),
            num_ranks=settings.num_ranks,
            budget=settings.tokens_per_micro_batch,
            attention_tokens=settings.attention_tokens,
        )
        for update, count in zip(updates, counts, strict=True)
    ]
    return tuple(
        RankShard(step=step, trainer_version=trainer_version, minibatches=tuple(of_rank))
        for of_rank in zip(*minibatches, strict=True)
    )


def _weighted(members: Sequence[_Member]) -> list[WeightedSample]:
    """The samples that hold a trained token, each with its trajectory's advantage."""
    return [
        WeightedSample(sample=sample, advantage=member.advantage)
        for member in members
        if member.merged is not None
        for sample in member.merged.samples
        if sample.num_trained
    ]
