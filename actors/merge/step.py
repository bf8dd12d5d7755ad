"""Turn a step's classified groups into the shards that the ranks train on.

`build_step` subtracts the KL penalty from the rewards, computes advantages (`advantages`) and loss
weights, packs the rows (`packing`) and makes the report. `imitation_shards` packs the chats of
supervised training (`rayloom sft`).

Invariant: every trajectory gets one outcome, which is `trained` if and only if its tokens are in
the batch.

A group without a signal (equal returns, one member, or a negative return with scale mean) has
advantage 0. Such a group is trained only if the loss has an entropy bonus or a KL term. Otherwise
its rows are left out, but it still counts in the means from which the loss weights come. If it did
not, a few groups with a signal would be weighted as if they were the whole step.

The trainer's loss is the sum of weight times loss over all tokens, divided by nothing. So the loss
does not depend on the division of tokens into samples, rows, micro-batches and ranks. All tokens of
a trajectory have the same weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actors.algorithm import (
    Aggregation,
    AlgorithmSettings,
    LossSettings,
    Objective,
)
from actors.batch import Float64s, Minibatch, RankShard
from actors.merge.advantages import credit_group, normalise_members
from actors.merge.groups import GroupMembers, charge_kl
from actors.merge.member import Member
from actors.merge.packing import WeightedSample, pack_minibatch, pack_values, split_trajectories
from actors.merge.report import StepReport, report_step
from actors.merge.settings import StepSettings
from actors.policy_age import newest_kept
from actors.trajectory_queue.ledger import EvictionReason, RolloutOutcomes
from actors.types import NO_VERSION, Sample

IMITATION = AlgorithmSettings(loss=LossSettings(objective=Objective.REINFORCE, denominator="old"))
"""The settings of supervised training: with them the trainer's loss is -log p for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A built step."""

    shards: tuple[RankShard, ...]
    """The shard of each rank."""
    members: tuple[Member, ...]
    """Every trajectory of the step with its reason and its advantages, for the journal."""
    report: StepReport

    @property
    def outcomes(self) -> RolloutOutcomes:
        """The outcome of each member's rollout, in the order of the members."""
        return {member.trajectory.rollout_id: member.reason for member in self.members}


def build_step(
    groups: Sequence[GroupMembers],
    settings: StepSettings,
    *,
    step: int,
    trainer_version: int,
    republished: Sequence[int] = (),
) -> StepResult:
    """Make the batch of one step.

    Args: groups: from `classify_groups` with these settings, and with scores (`read_scores`) if the
        settings need a critic or a reference. step: the step's number, counted from 1.
        trainer_version: the policy version that the trainer holds. republished: policy versions
        under which the weights of a step were published a second time (`actors.policy_age`).
    Raises: ValueError if scores are missing, or a trajectory was sampled by a version that the
        trainer does not hold yet.
    """
    _check_members(groups, settings, trainer_version)
    credited = [_credit(group, settings) for group in groups]
    if settings.algorithm.normalise_advantages:
        credited = _normalise(credited)
    members = tuple(member for group in credited for member in group)
    shards = pack_updates(
        weigh_updates(members, settings, trainer_version=trainer_version),
        settings,
        step=step,
        trainer_version=trainer_version,
        republished=tuple(republished),
    )
    if settings.algorithm.has_critic:
        values = pack_values(
            [w for member in members if member.is_trained for w in _weighted_samples(member)],
            num_ranks=settings.trainer.num_ranks,
            budget=settings.trainer.tokens_per_micro_batch,
        )
        shards = tuple(
            replace(shard, value_rows=rows) for shard, rows in zip(shards, values, strict=True)
        )
    return StepResult(
        shards=shards,
        members=members,
        report=report_step(credited, shards),
    )


def _check_members(
    groups: Sequence[GroupMembers], settings: StepSettings, trainer_version: int
) -> None:
    needs_scores = settings.algorithm.scores_first
    for member in (member for group in groups for member in group):
        trajectory = member.trajectory
        newest = max((newest_kept(s.versions) for s in trajectory.samples), default=NO_VERSION)
        if newest > trainer_version:
            raise ValueError(
                f"merge: trajectory {trajectory.trajectory_id} was sampled by version "
                f"{newest}, expected at most {trainer_version}, which the trainer holds; take "
                "it with a step of a later version"
            )
        is_counted = member.baseline_return is not None
        if needs_scores and is_counted and len(member.scores) != len(member.samples):
            raise ValueError(
                f"merge: trajectory {trajectory.trajectory_id} has scores of {len(member.scores)} "
                f"of its {len(member.samples)} samples, expected scores of all; ask the trainer to "
                "score the samples of this step first"
            )


def _credit(group: GroupMembers, settings: StepSettings) -> GroupMembers:
    """Return the members with advantages; exclude a group that is too small or has no signal."""
    counted = [member for member in group if member.baseline_return is not None]
    if len(counted) < settings.algorithm.min_group_size:
        return tuple(_exclude(member, EvictionReason.GROUP_TOO_SMALL) for member in group)
    kl = settings.algorithm.reward.kl
    credited, no_signal = credit_group(
        counted if kl is None else [charge_kl(member, kl) for member in counted],
        baseline=settings.algorithm.baseline,
        scale=settings.algorithm.scale,
        turn_discount=settings.algorithm.turn_discount,
        critic=settings.algorithm.critic,
        state_credit=settings.algorithm.state_credit,
    )
    rest = iter(credited)
    members = tuple(m if m.baseline_return is None else next(rest) for m in group)
    if no_signal is None:
        return members
    members = tuple(replace(m, no_signal=no_signal) if m.is_trained else m for m in members)
    if settings.algorithm.trains_without_signal:
        return members
    return tuple(_exclude(member, no_signal) for member in members)


def _exclude(member: Member, reason: EvictionReason) -> Member:
    return replace(member, reason=reason) if member.is_trained else member


def _normalise(groups: Sequence[GroupMembers]) -> list[GroupMembers]:
    """Normalise the advantages over the step, except for groups without a signal."""

    def takes_part(member: Member) -> bool:
        return member.is_trained and member.no_signal is None

    new = iter(normalise_members([m for group in groups for m in group if takes_part(m)]))
    return [tuple(next(new) if takes_part(m) else m for m in group) for group in groups]


def _size_of(members: Sequence[Member]) -> Float64s:
    num_tokens = sum(member.trajectory.num_trained for member in members)
    num_groups = len({member.trajectory.group_id for member in members})
    return np.array([num_tokens, len(members), num_groups], np.float64)


def weigh_updates(
    members: Sequence[Member], settings: StepSettings, *, trainer_version: int
) -> list[list[list[WeightedSample]]]:
    """Split the trained members into the step's updates, and weight their tokens.

    `trajectory_weights` computes the weights. Example: with the aggregation token_mean, each token
    of an update has the weight 1 / D. D is the number of the update's tokens, plus a share of the
    tokens that are left out because all advantages of their group are 0. `share_of` gives a larger
    update a larger share.

    Args: members: all members of the step, in the step's order.
    Returns: [updates][trajectories of the update][samples of the trajectory]; samples without a
        trained token are left out.
    """
    trained = [member for member in members if member.is_trained]
    whole = _size_of(trained)
    without_signal = _size_of([m for m in members if m.no_signal and not m.is_trained])
    updates = []
    for part in split_trajectories(
        [member.trajectory.group_id for member in trained],
        num_minibatches=settings.algorithm.minibatches,
        seed=settings.seed,
        step=trainer_version,
    ):
        own = [trained[index] for index in part]
        weights = trajectory_weights(
            [member.trajectory.num_trained for member in own],
            [member.trajectory.group_id for member in own],
            aggregation=settings.algorithm.loss.aggregation,
            without_signal=share_of(without_signal, part=_size_of(own), whole=whole),
            constant_tokens=settings.constant_tokens,
        )
        updates.append(
            [
                list(
                    _weighted_samples(
                        member,
                        loss_weight=weight,
                        temperature=settings.temperature_of(member.trajectory),
                    )
                )
                for member, weight in zip(own, weights.tolist(), strict=True)
            ]
        )
    return updates


def pack_updates(
    updates: Sequence[Sequence[Sequence[WeightedSample]]],
    settings: StepSettings,
    *,
    step: int,
    trainer_version: int,
    republished: tuple[int, ...] = (),
) -> tuple[RankShard, ...]:
    """Pack the rows of a step's updates for every rank.

    Args: updates: from `weigh_updates`.
    """
    minibatches: list[list[Minibatch]] = [
        pack_minibatch(
            [weighted for samples in trajectories for weighted in samples],
            num_ranks=settings.trainer.num_ranks,
            budget=settings.trainer.tokens_per_micro_batch,
            attention_tokens=settings.attention_tokens,
            share_prefixes=settings.trainer.share_prefixes,
        )
        for trajectories in updates
    ]
    return tuple(
        RankShard(
            step=step,
            trainer_version=trainer_version,
            minibatches=tuple(of_rank),
            republished=republished,
        )
        for of_rank in zip(*minibatches, strict=True)
    )


def _weighted_samples(
    member: Member, *, loss_weight: float = 0.0, temperature: float = 1.0
) -> Iterator[WeightedSample]:
    for index, sample in enumerate(member.samples):
        if sample.num_trained:
            weighted = WeightedSample(
                sample=sample,
                advantage=member.advantages[index],
                loss_weight=loss_weight,
                temperature=temperature,
            )
            if member.value_targets:
                weighted = replace(
                    weighted,
                    old_values=member.old_values[index],
                    value_targets=member.value_targets[index],
                )
            yield weighted


def trajectory_weights(
    num_tokens: Sequence[int],
    group_ids: Sequence[str],
    *,
    aggregation: Aggregation,
    without_signal: Float64s,
    constant_tokens: int,
) -> NDArray[np.float64]:
    """Return for each trajectory of an update the weight that each of its trained tokens gets.

    D, N and G are the numbers of trained tokens, of trajectories and of groups: those that the
    update trains on all ranks, plus `without_signal`. Trajectory i has n_i trained tokens, and its
    group has n_g. The aggregation sets the weight:
    token_mean: 1 / D (Yu et al. 2025, DAPO, equation 8).
    trajectory_mean: 1 / (N n_i) (Shao et al. 2024, GRPO, equation 3).
    prompt_mean: 1 / (G n_g) (DAPO's mean within each prompt).
    constant: 1 / (N C); C is `constant_tokens` (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783,
    appendix A: the generation budget).

    Args: num_tokens: the number of trained tokens in all samples of each trajectory that the update
        trains, at least 1. group_ids: the group of each of these trajectories. without_signal: [3],
        the numbers of tokens, trajectories and groups that are left out because their advantages
        are 0. The numbers may be fractions (`share_of`).
    Returns: [len(num_tokens)] float64.
    Example: tokens [1, 3] of one group, all with a signal, C 8: token_mean [1/4, 1/4],
        trajectory_mean [1/2, 1/6], prompt_mean [1/4, 1/4], constant [1/16, 1/16]
    """
    counts = np.array(num_tokens, np.float64)
    other_tokens, other_trajectories, other_groups = without_signal
    num_trajectories = len(counts) + other_trajectories
    match aggregation:
        case "token_mean":
            return np.full(len(counts), 1.0 / max(1.0, counts.sum() + other_tokens))
        case "trajectory_mean":
            return 1.0 / (num_trajectories * counts)
        case "prompt_mean":
            in_group: Counter[str] = Counter()
            for group_id, count in zip(group_ids, num_tokens, strict=True):
                in_group[group_id] += count
            of_group = np.array([in_group[group_id] for group_id in group_ids], np.float64)
            return 1.0 / ((len(in_group) + other_groups) * of_group)
        case "constant":
            return np.full(len(counts), 1.0 / (max(1.0, num_trajectories) * constant_tokens))


def share_of(size: Float64s, *, part: Float64s, whole: Float64s) -> Float64s:
    """Divide a step's members without a signal among its updates; return the share of one update.

    The share is `size * part / whole`. Each argument has three numbers: of tokens, of trajectories
    and of groups, [3] float64.
    Args: size: the members without a signal. part: the members that the update trains. whole: the
    members that the step trains.
    Example: 10 tokens without a signal, an update of 3 of the step's 12 trained tokens -> 2.5
    """
    return size * part / np.maximum(1, whole)


# The steps of supervised training. The loss of a step is the mean of -log p over the trained tokens
# of its chats, over all ranks and micro-batches. The trainer needs no other loss for it: it uses
# the objective reinforce with advantage 1 and a ratio against the policy at the step's start, which
# is 1 because a step has one update. A step depends only on the seed, its number and the chats, so
# that a resumed run trains the same steps.


def steps_per_epoch(num_chats: int, chats_per_step: int) -> int:
    """Return the number of steps that a pass over the chats takes; the last step may be smaller."""
    return -(-num_chats // chats_per_step)


def chats_of_step(step: int, *, num_chats: int, chats_per_step: int, seed: int) -> list[int]:
    """Return the indices of a step's chats. Each epoch contains each chat once, in a new order.

    Args: step: counted from 1.
    """
    epoch, part = divmod(step - 1, steps_per_epoch(num_chats, chats_per_step))
    order = np.random.default_rng([seed, epoch]).permutation(num_chats)
    chosen: list[int] = order[part * chats_per_step : (part + 1) * chats_per_step].tolist()
    return chosen


def imitation_shards(
    chats: Sequence[Sequence[Sample]], *, step: int, settings: StepSettings
) -> tuple[RankShard, ...]:
    """Pack the chats of a step; every trained token has the same weight.

    Args: chats: the samples of each chat. step: counted from 1; the trainer holds version step - 1.
    Returns: a shard for each rank.
    """
    weight = 1.0 / sum(sample.num_trained for chat in chats for sample in chat)
    trajectories = [
        [
            WeightedSample(sample=_of_version(sample, step - 1), advantage=1.0, loss_weight=weight)
            for sample in chat
        ]
        for chat in chats
    ]
    return pack_updates([trajectories], settings, step=step, trainer_version=step - 1)


def _of_version(sample: Sample, version: int) -> Sample:
    """Give every trained token a version, because the trainer requires one."""
    is_trained = sample.versions != NO_VERSION
    versions = np.where(is_trained, np.int32(version), np.int32(NO_VERSION))
    return replace(sample, versions=versions)
