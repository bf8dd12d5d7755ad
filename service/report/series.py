"""Series of a run of any length, as at most so many points; pure.

Neighbouring steps share a bucket; a mean, a sum and a maximum of it are each taken on purpose, so
that thinning out hides no spike where the maximum is what counts. A value that is not known is NaN
and takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.telemetry.records import StepRecord

Floats = NDArray[np.float64]


def values_of(records: Sequence[StepRecord], read: Callable[[StepRecord], float | None]) -> Floats:
    """[N] float64, one a record; None and infinity become NaN."""
    values = np.array([_or_nan(read(record)) for record in records], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """N records in K neighbourhoods. starts: [K] first record of each; edges: [K + 1] in steps.

    centres: [K] mean step of each. Invariant: K <= N, and every bucket has a record.
    """

    starts: NDArray[np.intp]
    centres: Floats
    edges: Floats

    @property
    def is_thinned(self) -> bool:
        """Whether some bucket has more than one step."""
        return bool(np.any(np.diff(self.edges) > 1.5))

    def mean(self, values: Floats) -> Floats:
        """[K]; NaN where nothing of the bucket is known."""
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), self.starts)
        counts = np.add.reduceat(known.astype(np.float64), self.starts)
        return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

    def total(self, values: Floats) -> Floats:
        """[K]; what is not known adds nothing."""
        return np.add.reduceat(np.nan_to_num(values), self.starts)

    def maximum(self, values: Floats) -> Floats:
        return np.fmax.reduceat(values, self.starts)

    def minimum(self, values: Floats) -> Floats:
        return np.fmin.reduceat(values, self.starts)


def bucketed(steps: Floats, *, max_points: int) -> Buckets:
    """Cut N >= 1 records at increasing `steps` into at most `max_points` equal neighbourhoods.

    Example: steps 1..4 with max_points 2 -> starts [0, 2], centres [1.5, 3.5], edges [.5, 2.5, 4.5]
    """
    count = min(len(steps), max_points)
    starts = np.linspace(0, len(steps), count, endpoint=False).astype(np.intp)
    sizes = np.diff(np.append(starts, len(steps)))
    edges = np.append(steps[starts] - 0.5, steps[-1] + 0.5)
    return Buckets(starts=starts, centres=np.add.reduceat(steps, starts) / sizes, edges=edges)


def buckets_of(records: Sequence[StepRecord], *, max_points: int) -> Buckets:
    """The buckets of N >= 1 records, by their steps."""
    return bucketed(values_of(records, lambda record: record.step), max_points=max_points)


def trailing_mean(values: Floats, *, width: int) -> Floats:
    """[N] mean of each value and the width - 1 before it, as far as they exist and are known."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0.0], np.cumsum(known)])
    upper = np.arange(1, len(values) + 1)
    lower = np.maximum(upper - width, 0)
    num = counts[upper] - counts[lower]
    window = sums[upper] - sums[lower]
    return np.divide(window, num, out=np.full(len(values), np.nan), where=num > 0)
