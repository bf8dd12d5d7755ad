"""How much likelier the current policy makes what was sampled: by token, or by trajectory.

Three policies, three names. *behaviour*: the engine that sampled the token. *old*: the trainer at
the step's start. *current*: the trainer now. A ratio compares current with one of the other two,
its denominator. Pure; called by `micro_batch`. Letters: [M] trained tokens of one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.limits import MAX_LOG_RATIO
from actors.trainer.loss.trajectories import trajectory_mean


def token_log_ratio(current_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Compare each token's probability on its own.

    ratio_t = exp(current_t - denominator_t).   Source: Schulman et al. 2017 (PPO), section 3
    (deviation: by default the denominator is the sampler's recorded log-probability, not a
    recomputed one).

    Args: [M] float32, nats, both.
    Returns: ln ratio_t, [M] float32, with gradient 1.
    Example: current ln .3, denominator ln .2 -> ln 1.5
    """
    return current_logprobs - denominator_logprobs


def sequence_log_ratio(
    current_logprobs: Tensor, denominator_logprobs: Tensor, trajectory_index: Tensor
) -> Tensor:
    """Compare whole trajectories by the geometric mean of their tokens' ratios.

    s_i = exp(mean_t(current_t - denominator_t)), ratio_t = sg[s_i] p_t / sg[p_t], over all trained
    tokens t of trajectory i.   Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, section 4.1 for
    s_i, section 4.3 (GSPO-token) for the straight-through form, whose value and gradient are those
    of GSPO where the tokens of a trajectory share one advantage and one weight (deviation: a
    trajectory's tokens are those of all its samples, not of one response).

    Args: [M] float32, nats, both. trajectory_index: [M] int64.
    Returns: ln ratio_t, [M] float32: ln s_i at each token of i, with gradient 1 for the token's
        own log-probability.
    Example: token log-ratios [ln 4, 0, 0], index [0, 0, 1] -> [ln 2, ln 2, 0]
    """
    log_ratio = (current_logprobs - denominator_logprobs).detach()
    mean = trajectory_mean(log_ratio, trajectory_index)
    return mean + (current_logprobs - current_logprobs.detach())


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Raise e to a log-ratio, at most e^20, without gradient beyond.

    Source: ours. Past a log-ratio of 88.7 float32 is infinite, and 0 times infinity, in the
    backward pass of a clip that takes the token's gradient away, is not 0.

    Args: log_ratio: [M], nats.    Returns: [M], of the same type.
    Example: log-ratios [ln 2, 100] -> [2, e^20], gradients [2, 0]
    """
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
