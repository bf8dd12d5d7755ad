"""Two ways of doing the same work, timed in turn: the ratio of each pair and its spread.

The two sides of a pair run within seconds of each other and in changing order, so that what else
the machine does meets both. The caller runs each side once before, which warms up.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """wall_s: by the clock. cpu_s: of all threads of this process."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of the ratios of the pairs: quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, ratios: list[float]) -> Spread:
        """Needs at least two ratios."""
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median=round(median, 3), lower=round(lower, 3), upper=round(upper, 3))


def time_pairs(
    slow: Callable[[], object], fast: Callable[[], object], *, num_pairs: int
) -> list[tuple[Seconds, Seconds]]:
    """Return each pair's seconds, `slow` first, whichever ran first."""
    gc.freeze()
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            second = _time(fast)
            pairs.append((_time(slow), second))
        else:
            first = _time(slow)
            pairs.append((first, _time(fast)))
    return pairs


def _time(work: Callable[[], object]) -> Seconds:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Seconds(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)
