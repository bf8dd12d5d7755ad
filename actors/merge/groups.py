"""The first stage of a step: decode trajectories, adjust rewards, and decide what is trained.

`classify` makes a `Member` of each trajectory. The environment's rules for outcomes
(`actors.outcomes`) decide whether the member counts in its group's baseline and in the loss. A
member that is not in the loss has a reason. The functions are pure.

Rewards are adjusted in this order. Steps 1 and 2 change the last turn's reward.
1. `shaped_rewards` clips the return, and subtracts the penalties for an overlong trajectory and for
   a missing end token.
2. `classify` applies the rule for the outcome.
3. `charge_kl` subtracts the KL of each token, after a reference has scored the samples.
Group statistics use the adjusted rewards; the trajectory keeps the environment's own rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.algorithm import KlRewardSettings, RewardSettings
from actors.limits import MAX_LOG_RATIO, MAX_REWARD
from actors.merge.member import Member, token_numbers, turn_bounds
from actors.merge.settings import StepSettings
from actors.misalignment import find_misfit
from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory_queue.codec import TrajectoryBlock, decode
from actors.trajectory_queue.ledger import EvictionReason
from actors.trajectory_queue.messages import StepInput, StepTrajectory
from actors.types import FinishReason, Outcome, Trajectory

GroupMembers = tuple[Member, ...]
"""The classified trajectories of one group of a step, in the order of the queue."""


class ScoresLost(Exception):
    """Raised if the ranks' scores are no longer in the object store; score the rows again."""


class PayloadsLost(Exception):
    """Raised if payloads of finished rollouts are lost.

    Report these rollouts to the queue (`replay_lost`), and take the step again.
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
    Raises: ValueError if two trajectories belong to one rollout, because the ledger would count
    only one of them.
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


# Largest number of notices of a step. It is small, because one fault usually affects many
# trajectories.
MAX_NOTICES = 3
_DEFAULT_POLICY = OutcomePolicy()
_NO_SHAPING = RewardSettings()
_REWARD_REMEDY = "check the environment's rewards, or set algorithm.reward.clip"


def classify(
    trajectory: Trajectory,
    *,
    misfit: str | None = None,
    policies: Mapping[str, OutcomePolicy],
    reward: RewardSettings = _NO_SHAPING,
    worst_completed: float | None = None,
) -> Member:
    """Shape a trajectory's rewards and apply the environment's outcome policy to it.

    The policy has one of these rules for each outcome; r is the trajectory's return:
    - train: train the trajectory with r.
    - train_clamped: train it with min(r, 0, worst_completed).
    - train_penalised: train it with r - penalty.
    - mask: keep it out of the loss; r still counts in the baseline if the trajectory was graded.
    - score: train if the trajectory was graded, otherwise mask.
    - drop: keep it out of the loss and the baseline.

    A trajectory is also out of the loss and the baseline if it does not fit the model, or if its
    rewards are not finite or exceed MAX_REWARD after shaping. A trajectory without tokens to train
    is not in the loss. Each trajectory that is not in the loss has a reason.

    Args: misfit: why the trajectory does not fit the trained model; None if it fits.
    worst_completed: `worst_completed_return` of its group.
    """
    left_out = Member(
        trajectory=trajectory,
        reason=EvictionReason.TOKEN_MISALIGNED,
        problem=misfit or "",
        shaped_return=trajectory.episode_return,
    )
    if misfit is not None:
        return left_out
    if not math.isfinite(trajectory.episode_return):
        return _bad_reward(
            left_out, f"return {trajectory.episode_return}, expected a finite number"
        )
    rule = policies.get(trajectory.environment, _DEFAULT_POLICY).rule(trajectory.outcome)
    rewards = shaped_rewards(trajectory, reward)
    shaped_return = total(rewards)
    largest = max(abs(shaped_return), float(np.abs(rewards).max(initial=0.0)))
    if largest > MAX_REWARD:
        return _bad_reward(
            left_out, f"a shaped reward of {largest:g}, expected at most {MAX_REWARD:g} in size"
        )
    reason: EvictionReason | None
    if rule.masks(is_graded=trajectory.is_graded):
        reason = EvictionReason.MASKED
    elif rule.disposition is Disposition.DROP:
        reason = EvictionReason.of(trajectory.outcome)
    else:
        reason = _nothing_to_train(trajectory)
    baseline_return = rule.baseline_return(
        shaped_return, is_graded=trajectory.is_graded, worst_completed=worst_completed
    )
    if baseline_return is not None:
        rewards = add_at_end(rewards, baseline_return - shaped_return)
    return Member(
        trajectory=trajectory,
        reason=reason,
        rewards=rewards,
        baseline_return=baseline_return,
        shaped_return=shaped_return,
    )


def worst_completed_return(
    trajectories: Sequence[Trajectory], reward: RewardSettings = _NO_SHAPING
) -> float | None:
    """Return the lowest shaped return of a group's completed trajectories; None without any."""
    returns = [
        total(shaped_rewards(each, reward))
        for each in trajectories
        if each.outcome is Outcome.COMPLETED and math.isfinite(each.episode_return)
    ]
    return min(returns, default=None)


def _bad_reward(member: Member, problem: str) -> Member:
    return replace(
        member, reason=EvictionReason.REWARD_ERROR, problem=f"{problem}; {_REWARD_REMEDY}"
    )


def _nothing_to_train(trajectory: Trajectory) -> EvictionReason | None:
    if trajectory.num_trained:
        return None
    is_empty = trajectory.num_sampled == 0
    return EvictionReason.EMPTY if is_empty else EvictionReason.TOKEN_MISALIGNED


def problem_notices(members: Sequence[Member], *, step: int) -> tuple[str, ...]:
    """Return a sentence for each trajectory that was left out because of a fault.

    If there are more than MAX_NOTICES, one last sentence has the number of the others.
    """
    found = [member for member in members if member.problem]
    notices = [
        f"step {step}: trajectory {member.trajectory.trajectory_id} left out as "
        f"{member.reason}: {member.problem}"
        for member in found[:MAX_NOTICES]
    ]
    if len(found) > MAX_NOTICES:
        notices.append(f"step {step}: {len(found) - MAX_NOTICES} more; see `rayloom inspect`")
    return tuple(notices)


# Tolerated error of a clipped return, relative to the larger of its size and 1.
_ROUNDING = 1e-9


def turn_rewards(trajectory: Trajectory) -> NDArray[np.float64]:
    """Return the environment's rewards, one for each turn: [K] float64."""
    return np.array([turn.reward for turn in trajectory.turns], np.float64)


def total(rewards: NDArray[np.float64]) -> float:
    """Sum the rewards in the order of play, as `Trajectory.episode_return` does."""
    return float(sum(rewards.tolist()))


def add_at_end(rewards: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """Add an amount to the last turn's reward. Without turns nothing is added."""
    if amount == 0.0 or rewards.shape[0] == 0:
        return rewards
    return np.append(rewards[:-1], rewards[-1] + amount)


def shaped_rewards(trajectory: Trajectory, settings: RewardSettings) -> NDArray[np.float64]:
    """Return the reward of each turn after the adjustments that need no model: [K] float64.

    These are the clip of the return, and the penalties for an overlong trajectory and for a missing
    end token.
    """
    rewards = turn_rewards(trajectory)
    if settings.clip is not None:
        low, high = settings.clip
        rewards = clip_return(rewards, low=low, high=high)
    if settings.overlong is not None:
        overlong = settings.overlong
        punishment = overlong_punishment(
            trajectory.num_sampled,
            max_tokens=overlong.max_tokens,
            cache_tokens=overlong.cache_tokens,
        )
        rewards = add_at_end(rewards, overlong.factor * punishment)
    if is_end_missing(trajectory):
        rewards = add_at_end(rewards, -settings.missing_end_penalty)
    return rewards


def clip_return(rewards: NDArray[np.float64], *, low: float, high: float) -> NDArray[np.float64]:
    """Clip a trajectory's return by changing the last turn's reward.

    R' = min(max(R, low), high).
    Source: Mnih et al. 2015, Methods. Deviation: they clip each reward. Here the return is clipped,
        because a group compares returns, which do not depend on the turn that a reward belongs to.

    If rounding would make the clipped return inexact (large rewards), the last turn gets the whole
    clipped return, and the other turns get 0.

    Args: rewards: [K] float.    Returns: [K] float64.
    Example: clip_return([1, 3], low=-2, high=2) -> [1, 1]
    """
    whole = total(rewards)
    wanted = min(max(whole, low), high)
    clipped = add_at_end(rewards, wanted - whole)
    if abs(total(clipped) - wanted) <= _ROUNDING * max(1.0, abs(wanted)):
        return clipped
    return add_at_end(np.zeros_like(rewards), wanted)


def overlong_punishment(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return the punishment of a trajectory that is almost as long as its limit, or longer.

    0 for L <= L_max - L_cache; (L_max - L_cache - L) / L_cache for L <= L_max; else -1.
    Source: DAPO, arXiv 2503.14476, equation 13 (deviation: L counts the sampled tokens of all
    turns of the trajectory, without observations, which the policy did not sample).

    Args: num_tokens: L. max_tokens: L_max. cache_tokens: L_cache, >= 1.
    Returns: float in [-1, 0], to be added to the return.
    Example: L_max 100, L_cache 20: 80 -> 0; 90 -> -.5; 100 -> -1; 101 -> -1
    """
    start = max_tokens - cache_tokens
    if num_tokens <= start:
        return 0.0
    return max(-1.0, (start - num_tokens) / cache_tokens)


def is_end_missing(trajectory: Trajectory) -> bool:
    """Return whether the engine reported that the last turn was cut off before its end token.

    Source of the penalty: TRL, `missing_eos_penalty` (deviation: the recorded finish reason is
    read, never the token ids).
    """
    return bool(trajectory.turns) and trajectory.turns[-1].finish_reason is FinishReason.LENGTH


def charge_kl(member: Member, kl: KlRewardSettings) -> Member:
    """Return the member with the KL rewards of its trained tokens added to its returns.

    Args: member: must be in its group's baseline and have a reference's scores.
    """
    assert member.baseline_return is not None
    bounds = turn_bounds(member)
    charged = np.zeros(int(bounds[-1]), np.float64)
    for sample, scores in zip(member.samples, member.scores, strict=True):
        assert scores.reference_logprobs is not None
        logprobs = sample.logprobs[sample.mask == 1]
        charged[token_numbers(sample, bounds)] = kl_rewards(
            logprobs, scores.reference_logprobs, kl=kl
        )
    taken = float(charged.sum())
    return replace(
        member,
        kl_rewards=charged,
        baseline_return=member.baseline_return + taken,
        shaped_return=member.shaped_return + taken,
    )


def kl_rewards(
    logprobs: NDArray[np.float32], reference_logprobs: NDArray[np.float32], *, kl: KlRewardSettings
) -> NDArray[np.float64]:
    """Return the negated KL penalty of each sampled token, which is added to its reward.

    The result is -beta k. With d = log p_ref - log p, the estimate k is k1 = -d, or
    k3 = exp(d) - 1 - d, in which d is at most 20. With k1 in the reward, the policy gradient
    includes the gradient of the KL; with k3 it does not.
    Source: Ziegler et al. 2019, arXiv 1909.08593, equation 2 (k1); Schulman 2020, "Approximating KL
        divergence" (k3; deviation: the bound on d).

    Args: logprobs: [M] float32, nats, by the policy that is penalised.
    reference_logprobs: [M] float32, nats, of the same tokens.
    Returns: [M] float64, to be added to the rewards.
    Example: log p = 0, log p_ref = -ln 2, beta 1: k1 -> -.693147; k3 -> -.193147
    """
    delta = reference_logprobs.astype(np.float64) - logprobs.astype(np.float64)
    match kl.estimator:
        case "k1":
            estimate = -delta
        case "k3":
            bounded = np.minimum(delta, MAX_LOG_RATIO)
            estimate = np.expm1(bounded) - bounded
    return -kl.coefficient * estimate
