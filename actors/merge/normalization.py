"""REINFORCE++: advantages normalised over all trained tokens of a step, after the group statistics.

Padding does not exist here, and groups without a signal take no part, so that the numbers do not
depend on packing, ranks or micro-batches. Called by `credit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.merge.advantages import STD_EPSILON


def normalise_over_tokens(
    advantages: Sequence[NDArray[np.float64]], num_tokens: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.float64]]:
    """Centre and scale a step's advantages by the mean and deviation over its tokens.

    A' = (A - m) / (s + 1e-6), m = sum_j n_j A_j / sum_j n_j, s^2 = sum_j n_j (A_j - m)^2 / sum_j
    n_j, where advantage A_j stands at n_j trained tokens.   Source: REINFORCE++, arXiv 2501.03262,
    global advantage normalisation (deviations: 1e-6 added to s, as in the group statistics;
    groups without a signal keep advantage 0 and are not counted in m and s, so that solved groups
    do not enlarge the advantages of the others).

    Args: advantages: for each trajectory [K] float, one for it, its turns or its tokens.
    num_tokens: for each [K], the trained tokens that each stands at.
    Returns: for each trajectory [K] float64; all 0 where the step's advantages are all equal.
    Raises: ValueError when the two do not fit together or an advantage is not finite.
    Example: advantages [[1], [-1]], num_tokens [[1], [3]]: m = -.5, s = .866025 ->
        [[1.732049], [-.577350]]
    """
    if len(advantages) != len(num_tokens):
        raise ValueError(
            f"normalisation: got token counts of {len(num_tokens)} trajectories for the advantages "
            f"of {len(advantages)}, expected one each"
        )
    for index, (values, counts) in enumerate(zip(advantages, num_tokens, strict=True)):
        if values.shape != counts.shape or not np.isfinite(values).all() or (counts < 0).any():
            raise ValueError(
                f"normalisation: trajectory {index} has {values.shape[0]} advantages for "
                f"{counts.shape[0]} token counts, expected as many, finite and not negative"
            )
    if not advantages:
        return []
    flat, weights = np.concatenate(advantages), np.concatenate(num_tokens)
    total = weights.sum()
    if total == 0 or np.ptp(flat[weights > 0]) == 0:
        return [np.zeros_like(values) for values in advantages]
    mean = (weights * flat).sum() / total
    deviation = np.sqrt((weights * (flat - mean) ** 2).sum() / total)
    return [(values - mean) / (deviation + STD_EPSILON) for values in advantages]
