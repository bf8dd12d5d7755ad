"""Ratios of policies, and the importance weights and rejection masks that derive from them.

There are three policies. *behaviour*: the engine that sampled the token. *old*: the trainer at the
step's start. *current*: the trainer now. A ratio divides the probability under *current* by the
probability under *behaviour* or *old*, its denominator.

Weights and masks correct for the difference between trainer and engine, which is due to the
engine's arithmetic and the data's age. Both are computed from log-ratio = trainer - behaviour,
without gradient. The weight rescales a token's loss. The mask sets a token's loss to 0. A masked
token still counts in the mean over tokens, so that other tokens do not get more weight.

A trajectory is all trained tokens of a row with the same trajectory_index, in one or several
samples, so merging turns changes no values. Letters: [M] trained tokens of one micro-batch. Pure.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.limits import MAX_LOG_RATIO


def trajectory_sum(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Sum the values of each trajectory's tokens.

    Args: values: [M] float. trajectory_index: [M] int64, each less than M.
    Returns: [M] float, at each token the sum over the tokens of the same trajectory.
    Example: values [1, 2, 4], index [0, 1, 0] -> [5, 2, 5]
    """
    # Use one slot for each token, because only the device knows the number of trajectories.
    sums = torch.zeros_like(values).index_add(0, trajectory_index, values)
    return sums.index_select(0, trajectory_index)


def trajectory_mean(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Average the values of each trajectory's tokens; shapes as in `trajectory_sum`.

    Example: values [1, 2, 4], index [0, 1, 0] -> [2.5, 2, 2.5]
    """
    counts = trajectory_sum(torch.ones_like(values), trajectory_index)
    return trajectory_sum(values, trajectory_index) / counts


def trajectory_min(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Take the smallest value of each trajectory's tokens; shapes as in `trajectory_sum`.

    Example: values [1, 2, 4], index [0, 1, 0] -> [1, 2, 1]
    """
    least = torch.full_like(values, torch.inf)
    least = least.scatter_reduce(0, trajectory_index, values, reduce="amin")
    return least.index_select(0, trajectory_index)


def token_log_ratio(current_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return the log-ratio of each token.

    ratio_t = exp(current_t - denominator_t).   Source: Schulman et al. 2017 (PPO), section 3
    (deviation: by default the denominator is the sampler's recorded log-probability, not a
    recomputed one).

    Args: both [M] float32, nats.
    Returns: ln ratio_t, [M] float32, with a gradient for current_logprobs.
    Example: current ln .3, denominator ln .2 -> ln 1.5
    """
    return current_logprobs - denominator_logprobs


def sequence_log_ratio(
    current_logprobs: Tensor, denominator_logprobs: Tensor, trajectory_index: Tensor
) -> Tensor:
    """Return the log of the geometric mean of the token ratios of each trajectory.

    s_i = exp(mean_t(current_t - denominator_t)), over all trained tokens t of trajectory i. Each
    token gets ratio_t = sg[s_i] p_t / sg[p_t], where sg stops the gradient: the value is s_i, and
    the gradient passes only through the token's own probability p_t.
    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, section 4.1 for s_i, section 4.3
        (GSPO-token) for ratio_t, which has the same value and gradient as GSPO if the tokens of a
        trajectory share one advantage and one weight. Deviation: the mean is over the tokens of
        all samples of a trajectory, not of one response.

    Args: log-probabilities: [M] float32, nats. trajectory_index: [M] int64.
    Returns: ln ratio_t, [M] float32, with gradient 1 for the token's own log-probability.
    Example: token log-ratios [ln 4, 0, 0], index [0, 0, 1] -> [ln 2, ln 2, 0]
    """
    log_ratio = (current_logprobs - denominator_logprobs).detach()
    mean = trajectory_mean(log_ratio, trajectory_index)
    return mean + (current_logprobs - current_logprobs.detach())


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return the exponential of a log-ratio, bounded by e^20, without gradient above the bound.

    Source: ours. Above a log-ratio of 88.7 the exponential is infinite in float32. A clip gives
    such a token the gradient 0, and its backward pass would compute 0 times infinity, which is NaN.

    Args: log_ratio: [M], nats.    Returns: [M], of the same type.
    Example: log-ratios [ln 2, 100] -> [2, e^20], gradients [2, 0]
    """
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def truncated_token_weight(log_ratio: Tensor, *, cap: float) -> Tensor:
    """Weight each token by its own ratio, at most cap.

    w_t = min(exp(log_ratio_t), cap).   Source: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training" (truncated importance sampling); Espeholt et al.
    2018 (IMPALA), section 4.1.

    Args: log_ratio: [M] float32, nats. cap: > 0.    Returns: [M] float32, without gradient.
    Example: log-ratios [ln 3, ln .5], cap 2 -> [2, .5]
    """
    return torch.exp(log_ratio.detach().clamp(max=math.log(cap)))


def truncated_sequence_weight(log_ratio: Tensor, trajectory_index: Tensor, *, cap: float) -> Tensor:
    """Weight each token by the ratio of its whole trajectory, at most cap.

    w_i = min(exp(sum_t log_ratio_t), cap), over all trained tokens t of trajectory i.
    Source: Liu et al. 2025, "When speed kills stability" (sequence-level truncated importance
    sampling; deviation: the sum is over all samples of a trajectory, not over one sequence).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. cap: > 0.
    Returns: [M] float32, without gradient.
    Example: log-ratios [ln 2, ln 2, ln .5], index [0, 0, 1], cap 3 -> [3, 3, .5]
    """
    total = trajectory_sum(log_ratio.detach(), trajectory_index)
    return torch.exp(total.clamp(max=math.log(cap)))


def keep_token_band(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Keep tokens whose ratio is in [low, high].

    Source: IcePop, Ling team 2025, arXiv 2510.18855 (deviation: only the mask; IcePop also
    multiplies the kept tokens by their ratio, as algorithm.loss.correction: truncate_token does).

    Args: log_ratio: [M] float32, nats. 0 < low <= 1 <= high.    Returns: [M] bool.
    Example: log-ratios [ln .4, 0, ln 6], low .5, high 5 -> [False, True, False]
    """
    detached = log_ratio.detach()
    return (detached >= math.log(low)) & (detached <= math.log(high))


def keep_sequence_band(
    log_ratio: Tensor, trajectory_index: Tensor, *, low: float, high: float
) -> Tensor:
    """Keep trajectories whose geometric-mean ratio is in [low, high].

    low <= exp(mean_t log_ratio_t) <= high, over all trained tokens t of the trajectory.
    Source: the geometric rejection of verl's rollout correction (deviation: the mean is over all
        samples of a trajectory, not over one sequence).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. 0 < low <= 1 <= high.
    Returns: [M] bool, equal for the tokens of a trajectory.
    Example: log-ratios [ln 4, 0, 0], index [0, 0, 1], low .5, high 1.5 -> [False, False, True]
    """
    mean = trajectory_mean(log_ratio.detach(), trajectory_index)
    return keep_token_band(mean, low=low, high=high)


def keep_without_outlier(log_ratio: Tensor, trajectory_index: Tensor, *, below: float) -> Tensor:
    """Keep trajectories that have no token whose ratio is below a limit.

    min_t exp(log_ratio_t) >= below, over all trained tokens t of the trajectory.
    Source: INTELLECT-3, arXiv 2512.16144 (there with 1e-5).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. 0 < below < 1.
    Returns: [M] bool, equal for the tokens of a trajectory.
    Example: log-ratios [ln 1e-6, 0, 0], index [0, 0, 1], below 1e-5 -> [False, False, True]
    """
    return trajectory_min(log_ratio.detach(), trajectory_index) >= math.log(below)
