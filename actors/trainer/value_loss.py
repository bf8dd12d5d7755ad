"""The loss of a critic, as a pure function of tensors.

Letters: [M] action tokens of one micro-batch. As in the policy's loss, aggregation is a weight of
each token, so that micro-batches and ranks combine by adding.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of equal targets, the mean square and the square of the mean differ by the rounding of their sums.
_EQUAL_TOLERANCE = 1e-9


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    value_targets: Tensor,
    loss_weights: Tensor,
    *,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Pull values towards their targets, not further from the old ones than `clip` in one step.

    loss = sum_t w_t / 2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); without a clip
    sum_t w_t / 2 (V - R)^2.   Source: the value loss of OpenAI Baselines' ppo2, described as detail
    9 in Huang et al. 2022, "The 37 implementation details of PPO".

    Args: values: [M] float32, with gradient. old_values: [M] float32, of the critic at the step's
    start. value_targets: [M] float32, GAE's A + V_old. loss_weights: [M] float32. clip: c > 0.
    Returns: scalar, with gradient; number of tokens whose gradient the clip took away, without.
    Raises: ValueError when lengths differ or the clip is not above 0.
    Example: V [1, .1], V_old 0, R [0, 1], c .2, w 1: [.5, .405] -> .905
    """
    shapes = {t.shape for t in (values, old_values, value_targets, loss_weights)}
    if len(shapes) > 1:
        raise ValueError(f"value loss: got shapes {sorted(map(tuple, shapes))}, expected one [M]")
    square = (values - value_targets).square()
    if clip is None:
        return 0.5 * (loss_weights * square).sum(), values.new_zeros((), dtype=torch.int64)
    if not clip > 0:
        raise ValueError(f"value loss: got clip {clip}, expected above 0, or None for no clip")
    moved = torch.clamp(values, old_values - clip, old_values + clip)
    clipped = (moved - value_targets).square()
    num_clipped = (clipped > square).sum().detach()
    return 0.5 * (loss_weights * torch.maximum(square, clipped)).sum(), num_clipped


def explained_variance(
    *, target_mean: float, target_mean_square: float, error_mean_square: float
) -> float | None:
    """Tell how much of the value targets' variance the values explain.

    1 - E[(R - V)^2] / Var[R].   Source: OpenAI Baselines, `explained_variance` (deviation: the
    error counts with its mean, so that values off by a constant explain less).

    Args: means over the same tokens, float64 sums.    Returns: at most 1; None for targets that do
    not vary beyond rounding.
    Example: R [0, 2], V [1, 1]: explained_variance(1, 2, 1) -> 0; V = R -> 1
    """
    variance = target_mean_square - target_mean**2
    if variance <= _EQUAL_TOLERANCE * target_mean_square:
        return None
    return 1.0 - error_mean_square / variance
