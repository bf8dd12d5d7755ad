"""Group advantages: one number a trajectory, from the returns of its group.

baseline and scale are separate choices. Statistics are over trajectories, never over rows: how
turns were cut or merged changes nothing. With the baseline `critic` the group gives only the
divisor (`group_divisor`); the advantages come from `gae`. Called by `credit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from actors.choices import choice
from actors.outcomes import are_equal

STD_EPSILON = 1e-6


class Baseline(StrEnum):
    """What a return is compared with."""

    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"
    CRITIC = "critic"


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
    returns: Sequence[float],
    *,
    baseline: Baseline = Baseline.MEAN,
    scale: Scale = Scale.STD,
    names: Sequence[str] = (),
) -> GroupAdvantages:
    """Turn the returns of one group into advantages.

    A_i = (r_i - b_i) / s, b: mean of the group (mean), mean of the others (leave_one_out), 0
    (none); s: `group_divisor`.
    Source: mean, std: GRPO, arXiv 2402.03300, 4.1.2; leave_one_out: RLOO, arXiv 2402.14740, 3;
    scale mean: MaxRL; scale none: Dr.GRPO, arXiv 2503.20783, 3.2 (deviations: n - 1 in std;
    without a group baseline, scale std leaves a group without a deviation as it is, where 1e-6
    alone would blow it up).

    Args: returns: [G] float, of the members of the baseline, G >= 1. names: [G] of their
    trajectories, for what an error says.
    Raises: ValueError when there is no return, one is not finite, scale mean meets a negative one,
    or the baseline is a critic, whose advantages are per token.
    Example: group_advantages([1, 0, 0, 0]).values -> [1.499997, -.499999, -.499999, -.499999]
    """
    baseline = choice(Baseline, baseline, name="advantages.baseline")
    if baseline is Baseline.CRITIC:
        raise ValueError(
            "advantages: got baseline critic for returns, expected mean, leave_one_out or none; a "
            "critic's advantages are per token: use gae.token_advantages"
        )
    divisor = group_divisor(returns, scale=scale, names=names)
    values = np.asarray(returns, np.float64)
    is_equal = are_equal(values.tolist())
    if divisor == 0 or (is_equal and baseline is not Baseline.NONE):
        return GroupAdvantages(values=np.zeros_like(values), has_signal=False)
    return GroupAdvantages(values=(values - _baseline(values, baseline)) / divisor, has_signal=True)


def group_divisor(returns: Sequence[float], *, scale: Scale, names: Sequence[str] = ()) -> float:
    """What a group's advantages are divided by; 0: it has no signal (scale mean, a mean of 0).

    none: 1; std: sqrt(sum (r_i - mean)^2 / (G - 1)) + 1e-6, and 1 for equal returns, which have no
    deviation; mean: mean of the group.

    Args, Raises: as `group_advantages`.
    Example: group_divisor([1, 0, 0, 0], scale=Scale.STD) -> .500001
    """
    scale = choice(Scale, scale, name="advantages.scale")
    values = np.asarray(returns, np.float64)
    _check(values, scale=scale, names=names)
    match scale:
        case Scale.NONE:
            return 1.0
        case Scale.STD:
            is_equal = are_equal(values.tolist())
            return 1.0 if is_equal else float(values.std(ddof=1)) + STD_EPSILON
        case Scale.MEAN:
            return float(values.mean())


def _check(values: NDArray[np.float64], *, scale: Scale, names: Sequence[str]) -> None:
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"advantages: got returns of shape {values.shape}, expected [G], G >= 1")
    if names and len(names) != values.size:
        raise ValueError(f"advantages: got {len(names)} names for {values.size} returns")
    finite = np.isfinite(values)
    if not finite.all():
        raise ValueError(
            f"advantages: {_named(np.flatnonzero(~finite), names)} of {values.size} have a return "
            "that is not finite; give such trajectories the outcome reward_error"
        )
    if scale is Scale.MEAN and values.min() < 0:
        worst = np.flatnonzero(values == values.min())[:1]
        raise ValueError(
            f"advantages: scale mean needs non-negative returns, got {values.min()} of "
            f"{_named(worst, names)}; shift the rewards or choose another scale"
        )


def _named(members: NDArray[np.intp], names: Sequence[str]) -> str:
    """Such as 'trajectory g000000.0-1.a0', or 'member 1' where no names were given."""
    first = members[:4].tolist()
    if names:
        return "trajectory " + ", ".join(names[i] for i in first)
    return "member " + ", ".join(map(str, first))


def _baseline(values: NDArray[np.float64], baseline: Baseline) -> NDArray[np.float64] | float:
    match baseline:
        case Baseline.MEAN:
            return float(values.mean())
        case Baseline.LEAVE_ONE_OUT:
            # Returns that are not all equal are at least two.
            return (values.sum() - values) / (values.size - 1)
        case Baseline.NONE | Baseline.CRITIC:
            return 0.0
