"""Reward shaping: pure functions over the turn rewards of one trajectory.

Each adjustment changes the last turn's reward, except the KL penalty, which is per token. Group
statistics use the adjusted rewards; the trajectory keeps the environment's own. Order: clip the
return, overlong and missing-end penalties (`shaped_rewards`), then the outcome's rule
(`disposition`), then, once a reference has scored the samples, KL (`charge_kl`). Called by
`disposition` and `step`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.algorithm import KlEstimator, KlRewardSettings, RewardSettings
from actors.limits import MAX_LOG_RATIO
from actors.merge.member import Member, token_numbers, turn_bounds
from actors.types import FinishReason, Trajectory

# Tolerated error of a clipped return, relative to the larger of its size and 1.
_ROUNDING = 1e-9


def turn_rewards(trajectory: Trajectory) -> NDArray[np.float64]:
    """Return the environment's rewards, one for each turn: [K] float64."""
    return np.array([turn.reward for turn in trajectory.turns], np.float64)


def total(rewards: NDArray[np.float64]) -> float:
    """Return the sum of the rewards in the order of play, as `Trajectory.episode_return`."""
    return float(sum(rewards.tolist()))


def add_at_end(rewards: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """Add an amount to the last turn's reward. Without turns nothing is added."""
    if amount == 0.0 or rewards.shape[0] == 0:
        return rewards
    return np.append(rewards[:-1], rewards[-1] + amount)


def shaped_rewards(trajectory: Trajectory, settings: RewardSettings) -> NDArray[np.float64]:
    """Apply all shaping that needs no model: clip, overlong, missing end. Returns: [K] float64."""
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

    R' = min(max(R, low), high).   Source: Mnih et al. 2015, Methods (deviation, ours: they clip
    each reward; groups compare returns, which do not depend on the distribution of rewards over
    turns).

    If the rewards are so large that rounding would swallow the difference, the last turn gets the
    whole clipped return, and the others 0.

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
    """Return a punishment that grows before a trajectory's length reaches its limit.

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
    """Whether the engine reported that the last turn was cut off before its end token.

    Source of the penalty: TRL, `missing_eos_penalty` (deviation: the recorded finish reason is
    read, never the token ids).
    """
    return bool(trajectory.turns) and trajectory.turns[-1].finish_reason is FinishReason.LENGTH


def charge_kl(member: Member, kl: KlRewardSettings) -> Member:
    """Subtract the KL penalty from a member's trained tokens, and its sum from the returns.

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

    -beta k, d = log p_ref - log p: k1 = -d; k3 = exp(d) - 1 - d, d at most 20.   Source: Ziegler et
    al. 2019, arXiv 1909.08593, equation 2 (k1); Schulman 2020, "Approximating KL divergence" (k3;
    deviation: the bound). Added to the rewards, their gradient is not the KL's own: k1 in the
    reward gives the gradient of the KL, k3 does not.

    Args: logprobs: [M] float32, nats, of the penalised policy (behaviour or current).
    reference_logprobs: [M] float32, nats, of the same tokens.
    Returns: [M] float64, to be added to the rewards.
    Example: log p = 0, log p_ref = -ln 2, beta 1: k1 -> -.693147; k3 -> -.193147
    """
    delta = reference_logprobs.astype(np.float64) - logprobs.astype(np.float64)
    match kl.estimator:
        case KlEstimator.K1:
            estimate = -delta
        case KlEstimator.K3:
            bounded = np.minimum(delta, MAX_LOG_RATIO)
            estimate = np.expm1(bounded) - bounded
    return -kl.coefficient * estimate
