"""The weights with which an update's tokens are averaged; pure functions over trajectories.

The trainer's loss is sum_t w_t loss_t and divides by nothing, so it does not change when turns are
merged, rows packed, or tokens dealt to micro-batches and ranks. Each aggregation gives all tokens
of a trajectory the same weight. Trajectories of groups without a signal count in the weights
although they are not in the rows (`step` says why). Called by `step`. Letters: [N] trajectories of
one update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.algorithm import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSize:
    """The size of an update; the counts are floats because they may be shares."""

    num_tokens: float = 0.0
    num_trajectories: float = 0.0
    num_groups: float = 0.0


def trajectory_weights(
    num_tokens: Sequence[int],
    group_ids: Sequence[str],
    *,
    aggregation: Aggregation,
    without_signal: UpdateSize,
    constant_tokens: int,
) -> NDArray[np.float64]:
    """Weigh each trained token of each trajectory of one update.

    token_mean: 1 / D, D all tokens of the update (Yu et al. 2025, DAPO, equation 8).
    trajectory_mean: 1 / (N n_i), n_i tokens of trajectory i (Shao et al. 2024, GRPO, equation 3).
    prompt_mean: 1 / (G n_g), n_g tokens of group g, G groups (DAPO's token mean within each
    prompt). constant: 1 / (N C), C constant_tokens (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783,
    appendix A: the generation budget). D, N and G include groups without a signal, and all ranks.

    Args: num_tokens: [N], of each trajectory over all its samples, at least 1. group_ids: [N].
        without_signal: size of the groups without a signal, which count but are not in the rows.
    Returns: [N] float64.
    Example: tokens [1, 3] of one group, all with a signal, C 8: token_mean [1/4, 1/4],
        trajectory_mean [1/2, 1/6], prompt_mean [1/4, 1/4], constant [1/16, 1/16]
    """
    counts = np.array(num_tokens, np.float64)
    num_trajectories = len(counts) + without_signal.num_trajectories
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return np.full(len(counts), 1.0 / max(1.0, counts.sum() + without_signal.num_tokens))
        case Aggregation.TRAJECTORY_MEAN:
            return 1.0 / (num_trajectories * counts)
        case Aggregation.PROMPT_MEAN:
            in_group: Counter[str] = Counter()
            for group_id, count in zip(group_ids, num_tokens, strict=True):
                in_group[group_id] += count
            of_group = np.array([in_group[group_id] for group_id in group_ids], np.float64)
            return 1.0 / ((len(in_group) + without_signal.num_groups) * of_group)
        case Aggregation.CONSTANT:
            return np.full(len(counts), 1.0 / (max(1.0, num_trajectories) * constant_tokens))


def share_of(size: UpdateSize, *, part: UpdateSize, whole: UpdateSize) -> UpdateSize:
    """Return one update's share of a size, in proportion to the part of the whole that it trains.

    Example: 10 tokens without a signal, an update of 3 of the step's 12 trained tokens -> 2.5
    """
    return UpdateSize(
        num_tokens=size.num_tokens * part.num_tokens / max(1, whole.num_tokens),
        num_trajectories=(
            size.num_trajectories * part.num_trajectories / max(1, whole.num_trajectories)
        ),
        num_groups=size.num_groups * part.num_groups / max(1, whole.num_groups),
    )
