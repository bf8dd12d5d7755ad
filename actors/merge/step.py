"""One training step's data, from classified groups to what each rank trains on; pure.

Order: `groups` has shaped the rewards and applied the outcome policy; then group
statistics (by group, over trajectories) or GAE, and packing. Invariant: every trajectory that comes
in leaves with exactly one settlement, and it is `trained` exactly when its tokens are in the batch.
A group without a signal (equal returns, or one member) has advantage 0. Where nothing else in the
loss asks anything of its tokens it is settled as zero_variance and not in the rows, but it counts
in the loss weights, so that solved groups weaken the update instead of leaving it to the few
others. Where an entropy bonus or a KL term does, it is trained. Called by the merge actor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actors.batch import Float32s, Minibatch, RankShard
from actors.merge.aggregation import (
    IdleCounts,
    TrajectorySize,
    share_of_idle,
    trajectory_weights,
)
from actors.merge.candidates import NO_SCORES, Candidate, Scores, candidate, places_of
from actors.merge.credit import (
    Credit,
    credit_group,
    normalised,
    sample_advantage,
    trained_advantages,
)
from actors.merge.dispositions import Verdict
from actors.merge.groups import ClassifiedGroup, ClassifiedTrajectory
from actors.merge.packing import WeightedSample, pack_minibatch, split_trajectories
from actors.merge.report import StepReport, StepTallies, report_step
from actors.merge.settings import StepSettings
from actors.merge.value_rows import ValuedSample, pack_values
from actors.trajectory_queue.ledger import EvictionReason, Settlement
from actors.types import Trajectory
from actors.value_batch import ValueShard


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """shards: one for each rank. settlements, classified: one for each trajectory, in their order.
    value_shards: one for each rank where there is a critic.
    """

    shards: tuple[RankShard, ...]
    settlements: tuple[Settlement, ...]
    report: StepReport
    classified: tuple[ClassifiedTrajectory, ...]
    value_shards: tuple[ValueShard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A trajectory on its way: it has no credit until its group has been looked at.

    shaped_return: with all shaping, before the outcome's rule. has_signal: False when its group was
    found to have none.
    """

    trajectory: Trajectory
    verdict: Verdict
    shaped_return: float
    credit: Credit | None = None
    has_signal: bool = True

    @property
    def is_trained(self) -> bool:
        return self.verdict.reason is None


def build_step(
    groups: Sequence[ClassifiedGroup],
    settings: StepSettings,
    *,
    step: int,
    trainer_version: int,
    scores: Scores = NO_SCORES,
) -> StepResult:
    """Make the batch of one step.

    Args: groups: as `classify_groups` made them with these settings. step: its number.
    trainer_version: the policy version that the trainer holds. scores: of the samples, where the
    settings need a critic's values or a reference's log-probabilities.
    Raises: ValueError when the advantages refuse a group's returns (scale mean, negative ones),
    scores are missing, or a trajectory was sampled by a version that the trainer does not hold yet.
    """
    _check_versions(groups, trainer_version)
    judged = [_credit_members(group, settings, scores) for group in groups]
    if settings.normalises:
        judged = _normalise(judged)
    members = [member for group in judged for member in group]
    trained = [member for member in members if member.is_trained]
    shards = _pack(
        trained,
        settings,
        idle=_count_idle(members),
        step=step,
        trainer_version=trainer_version,
    )
    verdicts = [member.verdict for member in members]
    tallies = StepTallies(
        trajectories=[member.trajectory for member in members],
        returns=[member.shaped_return for member in members],
        advantages=[member.credit.mean for member in trained if member.credit is not None],
        evictions=[verdict.reason for verdict in verdicts if verdict.reason is not None],
        num_groups=len(groups),
        num_zero_variance_groups=sum(any(not m.has_signal for m in g) for g in judged),
        num_malformed_rewarded=sum(verdict.is_malformed_rewarded for verdict in verdicts),
    )
    return StepResult(
        shards=shards,
        settlements=tuple(Settlement(rollout_id=v.rollout_id, reason=v.reason) for v in verdicts),
        report=report_step(tallies, shards),
        classified=tuple(_handed_out(member) for member in members),
        value_shards=_value_shards(trained, settings, step=step) if settings.needs_values else (),
    )


def _check_versions(groups: Sequence[ClassifiedGroup], trainer_version: int) -> None:
    for trajectory in (member.trajectory for group in groups for member in group.members):
        versions = trajectory.versions
        if versions is not None and versions[1] > trainer_version:
            raise ValueError(
                f"merge: trajectory {trajectory.trajectory_id} was sampled by version "
                f"{versions[1]}, expected at most {trainer_version}, which the trainer holds; take "
                "it with a step of a later version"
            )


def _handed_out(member: _Member) -> ClassifiedTrajectory:
    trajectory, credit = member.trajectory, member.credit
    advantages: tuple[Float32s, ...] = ()
    if credit is not None and member.is_trained:
        advantages = tuple(trained_advantages(credit, sample) for sample in trajectory.samples)
    return ClassifiedTrajectory(
        trajectory=trajectory, verdict=member.verdict, advantages=advantages
    )


def _credit_members(
    group: ClassifiedGroup, settings: StepSettings, scores: Scores
) -> list[_Member]:
    members = [_member(classified) for classified in group.members]
    try:
        in_baseline = {
            index: found
            for index, member in enumerate(members)
            if (found := _candidate(member, settings, scores)) is not None
        }
        if len(in_baseline) < max(1, settings.min_group_size):
            return [_leave(member, EvictionReason.GROUP_TOO_SMALL) for member in members]
        result = credit_group(list(in_baseline.values()), settings, scores=scores)
    except ValueError as error:
        raise ValueError(f"group {group.group_id}: {error}") from error
    for (index, found), credit in zip(in_baseline.items(), result.credits, strict=True):
        charged = float(found.token_rewards.sum())
        shaped = members[index].shaped_return + charged
        members[index] = replace(members[index], credit=credit, shaped_return=shaped)
    if result.has_signal:
        return members
    return [_without_signal(member, settings) for member in members]


def _member(classified: ClassifiedTrajectory) -> _Member:
    trajectory, verdict = classified.trajectory, classified.verdict
    shaped = verdict.shaped_return
    return _Member(
        trajectory=trajectory,
        verdict=verdict,
        shaped_return=trajectory.episode_return if shaped is None else shaped,
    )


def _candidate(member: _Member, settings: StepSettings, scores: Scores) -> Candidate | None:
    baseline_return = member.verdict.baseline_return
    if baseline_return is None:
        return None
    return candidate(
        member.trajectory,
        rewards=member.verdict.rewards,
        baseline_return=baseline_return,
        kl=settings.shaping.kl,
        scores=scores,
    )


def _leave(member: _Member, reason: EvictionReason) -> _Member:
    """Take a member out of the loss, unless it is not in it for a reason of its own."""
    if not member.is_trained:
        return member
    return replace(member, verdict=replace(member.verdict, reason=reason))


def _normalise(judged: Sequence[list[_Member]]) -> list[list[_Member]]:
    """The credits over all groups of the step at once; without a signal they stay 0."""
    credits = [m.credit for group in judged for m in group if m.credit is not None and _counts(m)]
    new = iter(normalised(credits))
    return [
        [replace(m, credit=next(new)) if m.credit is not None and _counts(m) else m for m in group]
        for group in judged
    ]


def _counts(member: _Member) -> bool:
    return member.is_trained and member.has_signal


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
        num_tokens=sum(m.trajectory.num_trained for m in idle),
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
            share_prefixes=settings.share_prefixes,
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
        num_tokens=member.trajectory.num_trained,
    )


def _value_shards(
    trained: Sequence[_Member], settings: StepSettings, *, step: int
) -> tuple[ValueShard, ...]:
    return pack_values(
        [valued for member in trained for valued in _valued(member)],
        step=step,
        num_ranks=settings.num_ranks,
        budget=settings.tokens_per_micro_batch,
    )


def _valued(member: _Member) -> Iterator[ValuedSample]:
    """The samples that hold a trained token, with the targets of their values."""
    credit = member.credit
    if credit is None or credit.bounds is None:
        return
    assert credit.old_values is not None and credit.value_targets is not None
    for sample in member.trajectory.samples:
        if sample.num_trained:
            places = places_of(sample, credit.bounds)
            yield ValuedSample(
                sample=sample,
                old_values=credit.old_values[places],
                value_targets=credit.value_targets[places],
            )


def _weighted(members: Sequence[_Member], weights: Sequence[float]) -> list[WeightedSample]:
    """The samples that hold a trained token, with what each of its tokens gets."""
    return [
        WeightedSample(
            sample=sample,
            advantage=sample_advantage(member.credit, sample),
            loss_weight=weight,
        )
        for member, weight in zip(members, weights, strict=True)
        if member.credit is not None
        for sample in member.trajectory.samples
        if sample.num_trained
    ]
