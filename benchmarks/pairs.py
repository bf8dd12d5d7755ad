"""Time several ways of doing the same work in alternation, and compute the ratios of the rounds.

The sides of a round run within seconds of each other and in changing order, so other work on the
machine affects all of them. The caller runs each side once before, as a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The time that a piece of work took.

    wall_s: elapsed seconds. cpu_s: processor seconds of all threads of the process that worked.
    """

    wall_s: float
    cpu_s: float

    @classmethod
    def median(cls, each: Sequence[Seconds]) -> Seconds:
        return cls(
            wall_s=round(statistics.median(one.wall_s for one in each), 3),
            cpu_s=round(statistics.median(one.cpu_s for one in each), 3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The quartiles of the ratios of the rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Spread:
        """Return the spread of at least two ratios."""
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median=round(median, 3), lower=round(lower, 3), upper=round(upper, 3))


def rounds(text: str) -> int:
    """Return a number of rounds from the command line. Raises: argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"got {text}, expected 2 or more: the output has quartiles"
        )
    return int(text)


def interleave(
    sides: Mapping[str, Callable[[], _Result]], *, num_rounds: int
) -> dict[str, list[_Result]]:
    """Run every side once in each round, every second round in reverse order.

    Returns: the results of each side in the order of the rounds.
    """
    results: dict[str, list[_Result]] = {name: [] for name in sides}
    for number in range(num_rounds):
        names = list(sides)
        for name in reversed(names) if number % 2 else names:
            results[name].append(sides[name]())
    return results


def ratios_of(slow: Sequence[Seconds], fast: Sequence[Seconds]) -> dict[str, Spread]:
    """Return the spread of the rounds' ratios of slow to fast, in elapsed and in processor time.

    Goals apply to processor time, which excludes other work on the machine; for this, threads that
    wait must sleep. In elapsed time, a side looks slower if more other work ran at the same time.
    """
    pairs = list(zip(slow, fast, strict=True))
    return {
        "ratio": Spread.of([a.wall_s / b.wall_s for a, b in pairs]),
        "ratio_cpu": Spread.of([a.cpu_s / b.cpu_s for a, b in pairs]),
    }


def time_once(work: Callable[[], object]) -> Seconds:
    """Return the seconds of one call in this process, after a garbage collection."""
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Seconds(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)
