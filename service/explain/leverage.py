"""How far a trajectory's advantage rests on one other member of its group; pure.

One wrong reward moves its group's baseline, and with it the advantages of all members: their
gradients are large although nothing is wrong with them. What stays of an advantage whichever other
member is left out tells the two apart. Called by `recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.batch import Float64s
from actors.journal.record import GroupRule
from actors.merge.advantages import group_advantages

# With one member left there is nothing to compare with.
_SMALLEST = 3


def own_shares(returns: Sequence[float], rule: GroupRule) -> Float64s:
    """Return the share of each advantage that remains whichever other member is left out.

    f_i = min(1, min_{j != i} |A_i without j| / |A_i|); 1 for A_i = 0 and in groups of two.

    Args: returns: [G] float, of the members of the baseline.    Returns: [G] float, in [0, 1].
    Example: returns [-100, 0, 1, 0], no scale: [.99, .013, .026, .013], rounded
    """
    size = len(returns)
    values = np.abs(group_advantages(returns, baseline=rule.baseline, scale=rule.scale).values)
    if size < _SMALLEST:
        return np.ones(size)
    smallest = values.copy()
    for left_out in range(size):
        rest = np.arange(size) != left_out
        of_rest = group_advantages(
            [value for value, stays in zip(returns, rest, strict=True) if stays],
            baseline=rule.baseline,
            scale=rule.scale,
        )
        smallest[rest] = np.minimum(smallest[rest], np.abs(of_rest.values))
    return np.where(values > 0, smallest / np.where(values > 0, values, 1.0), 1.0)
