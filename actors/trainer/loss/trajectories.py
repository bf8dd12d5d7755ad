"""Sums, means and minima over the tokens of a trajectory, given back to each of its tokens.

A trajectory is all trained tokens of a row with the same number, in however many samples they
lie: what is computed here does not change when turns are merged. Called by `ratios` and
`corrections`. Letters: [M] trained tokens of one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def trajectory_sum(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Sum each trajectory's tokens.

    Args: values: [M] float. trajectory_index: [M] int64, each less than M.
    Returns: [M] float, the sum of the token's own trajectory.
    Example: values [1, 2, 4], index [0, 1, 0] -> [5, 2, 5]
    """
    # As many places as tokens: the number of trajectories is known on the device only.
    sums = torch.zeros_like(values).index_add(0, trajectory_index, values)
    return sums.index_select(0, trajectory_index)


def trajectory_mean(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Average each trajectory's tokens; shapes as in `trajectory_sum`.

    Example: values [1, 2, 4], index [0, 1, 0] -> [2.5, 2, 2.5]
    """
    counts = trajectory_sum(torch.ones_like(values), trajectory_index)
    return trajectory_sum(values, trajectory_index) / counts


def trajectory_min(values: Tensor, trajectory_index: Tensor) -> Tensor:
    """Take the least of each trajectory's tokens; shapes as in `trajectory_sum`.

    Example: values [1, 2, 4], index [0, 1, 0] -> [1, 2, 1]
    """
    least = torch.full_like(values, torch.inf)
    least = least.scatter_reduce(0, trajectory_index, values, reduce="amin")
    return least.index_select(0, trajectory_index)
