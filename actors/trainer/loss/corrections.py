"""Importance weights and rejection masks for data of another policy; two separate values.

Both look at log-ratio = trainer - behaviour: what the engine's own arithmetic and the data's age
make of the same token. The weight rescales a token's loss; the mask takes the token out of the
loss, and leaves it in the denominator: its weight in the aggregation is not given to others. Both
are detached. Pure; called by `micro_batch`. Letters: [M] trained tokens of one micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.trainer.loss.trajectories import trajectory_mean, trajectory_min, trajectory_sum


def truncated_token_weight(log_ratio: Tensor, *, cap: float) -> Tensor:
    """Weigh each token by its own ratio, at most cap.

    w_t = min(exp(log_ratio_t), cap).   Source: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training" (truncated importance sampling); Espeholt et al.
    2018 (IMPALA), section 4.1.

    Args: log_ratio: [M] float32, nats. cap: > 0.    Returns: [M] float32, without gradient.
    Example: log-ratios [ln 3, ln .5], cap 2 -> [2, .5]
    """
    return torch.exp(log_ratio.detach().clamp(max=math.log(cap)))


def truncated_sequence_weight(log_ratio: Tensor, trajectory_index: Tensor, *, cap: float) -> Tensor:
    """Weigh each token by the ratio of its whole trajectory, at most cap.

    w_i = min(exp(sum_t log_ratio_t), cap), over all trained tokens t of trajectory i.
    Source: Liu et al. 2025, "When speed kills stability" (sequence-level truncated importance
    sampling; deviation: over trajectories, however many samples they were cut into).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. cap: > 0.
    Returns: [M] float32, without gradient.
    Example: log-ratios [ln 2, ln 2, ln .5], index [0, 0, 1], cap 3 -> [3, 3, .5]
    """
    total = trajectory_sum(log_ratio.detach(), trajectory_index)
    return torch.exp(total.clamp(max=math.log(cap)))


def keep_token_band(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Keep tokens whose ratio lies in [low, high].

    Source: IcePop, Ling team 2025, arXiv 2510.18855 (deviation: only the mask; its weight, the
    ratio itself, is the correction truncate_token).

    Args: log_ratio: [M] float32, nats. 0 < low <= 1 <= high.    Returns: [M] bool.
    Example: log-ratios [ln .4, 0, ln 6], low .5, high 5 -> [False, True, False]
    """
    detached = log_ratio.detach()
    return (detached >= math.log(low)) & (detached <= math.log(high))


def keep_sequence_band(
    log_ratio: Tensor, trajectory_index: Tensor, *, low: float, high: float
) -> Tensor:
    """Keep trajectories whose geometric-mean ratio lies in [low, high].

    low <= exp(mean_t log_ratio_t) <= high, over all trained tokens t of the trajectory.
    Source: the geometric rejection of verl's rollout correction (deviation: over trajectories,
    however many samples they were cut into).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. 0 < low <= 1 <= high.
    Returns: [M] bool, equal for the tokens of a trajectory.
    Example: log-ratios [ln 4, 0, 0], index [0, 0, 1], low .5, high 1.5 -> [False, False, True]
    """
    mean = trajectory_mean(log_ratio.detach(), trajectory_index)
    return keep_token_band(mean, low=low, high=high)


def keep_without_outlier(log_ratio: Tensor, trajectory_index: Tensor, *, below: float) -> Tensor:
    """Keep trajectories none of whose tokens the trainer finds all but impossible.

    min_t exp(log_ratio_t) >= below, over all trained tokens t of the trajectory.
    Source: INTELLECT-3, arXiv 2512.16144 (there with 1e-5).

    Args: log_ratio: [M] float32, nats. trajectory_index: [M] int64. 0 < below < 1.
    Returns: [M] bool, equal for the tokens of a trajectory.
    Example: log-ratios [ln 1e-6, 0, 0], index [0, 0, 1], below 1e-5 -> [False, False, True]
    """
    return trajectory_min(log_ratio.detach(), trajectory_index) >= math.log(below)
