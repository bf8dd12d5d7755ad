"""The loss of a critic, as a pure function of tensors.

Letters: [M] action tokens of one micro-batch. As in the policy's loss, aggregation is a weight of
each token, so that micro-batches and ranks combine by adding.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
