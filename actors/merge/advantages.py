"""Group advantages: one number a trajectory, from the returns of its group.

baseline and scale are separate choices. Statistics are over trajectories, never over rows: how
turns were cut or merged changes nothing. Called by `step`, which looks groups up by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6
# Returns closer than this, relative to the largest, are equal: sums of rewards carry rounding.
EQUAL_TOLERANCE = 1e-9


class Baseline(StrEnum):
    """What a return is compared with."""

    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"


class Scale(StrEnum):
    """What the difference is divided by."""

    NONE = "none"
    STD = "std"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """values: [G] float64. has_signal: False when a group of one or equal returns (or a mean of
    0 that would divide) left all of them 0; such a group is counted and not trained.
    """

    values: NDArray[np.float64]
    has_signal: bool


def group_advantages(
    returns: Sequence[float], *, baseline: Baseline = Baseline.MEAN, scale: Scale = Scale.STD
) -> GroupAdvantages:
    """Turn the returns of one group into advantages.

    A_i = (r_i - b_i) / s, b: mean of the group (mean), mean of the others (leave_one_out), 0
    (none); s: 1 (none), sample deviation (n - 1) + 1e-6 (std), mean of the group (mean).
    Source: mean, std: GRPO, arXiv 2402.03300, 4.1.2; leave_one_out: RLOO, arXiv 2402.14740, 3;
    scale mean: MaxRL (deviations: n - 1 in std; without a group baseline, scale std leaves a
    group without a deviation as it is, where 1e-6 alone would blow it up).

    Args: returns: [G] float, of the members of the baseline, G >= 1.
    Raises: ValueError when there is no return, one is not finite, or scale mean meets a negative
    one.
    Example: group_advantages([1, 0, 0, 0]).values -> [1.499997, -.499999, -.499999, -.499999]
    """
    values = np.asarray(returns, np.float64)
    _check(values, scale=scale)
    is_equal = bool(np.ptp(values) <= EQUAL_TOLERANCE * max(1.0, float(np.abs(values).max())))
    if is_equal and baseline is not Baseline.NONE:
        return GroupAdvantages(values=np.zeros_like(values), has_signal=False)
    divisor = _divisor(values, scale=scale, is_equal=is_equal)
    if divisor == 0:
        return GroupAdvantages(values=np.zeros_like(values), has_signal=False)
    return GroupAdvantages(values=(values - _baseline(values, baseline)) / divisor, has_signal=True)


def _check(values: NDArray[np.float64], *, scale: Scale) -> None:
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"advantages: got returns of shape {values.shape}, expected [G], G >= 1")
    if not np.isfinite(values).all():
        raise ValueError(
            f"advantages: {int((~np.isfinite(values)).sum())} of {values.size} returns are not "
            "finite; give such trajectories the outcome reward_error"
        )
    if scale is Scale.MEAN and values.min() < 0:
        raise ValueError(
            f"advantages: scale mean needs non-negative returns, got {values.min()}; shift the "
            "rewards or choose another scale"
        )


def _baseline(values: NDArray[np.float64], baseline: Baseline) -> NDArray[np.float64] | float:
    match baseline:
        case Baseline.MEAN:
            return float(values.mean())
        case Baseline.LEAVE_ONE_OUT:
            # Returns that are not all equal are at least two.
            return (values.sum() - values) / (values.size - 1)
        case Baseline.NONE:
            return 0.0


def _divisor(values: NDArray[np.float64], *, scale: Scale, is_equal: bool) -> float:
    match scale:
        case Scale.NONE:
            return 1.0
        case Scale.STD:
            return 1.0 if is_equal else float(values.std(ddof=1)) + STD_EPSILON
        case Scale.MEAN:
            return float(values.mean())
