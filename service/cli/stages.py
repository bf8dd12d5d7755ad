"""Progress of a start, line by line: a first line at once, then each stage with its seconds.

The lines are plain, so that a terminal, a notebook and a CI log show the same. Once the supervisor
runs, the run's display shows the later stages. This module imports nothing heavy, so that the first
line is printed before any slow import.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from service.cli.outlet import say


class Stages:
    """Prints the stages of one start, one after the other.

    Example: Stages("reading CONFIG") prints "rayloom: reading CONFIG", then `next("loading")`
    prints "reading CONFIG: 0.3 s; next: loading".
    """

    def __init__(
        self,
        first: str,
        *,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._clock = tell, clock
        self._name, self._since = first, clock()
        tell(f"rayloom: {first}")

    def next(self, name: str) -> None:
        """End the current stage and begin another."""
        self._tell(f"{self._ended()}; next: {name}")
        self._name, self._since = name, self._clock()

    def ended(self, name: str, seconds: float) -> None:
        """Print the end of a stage that ran at the same time as the current one."""
        self._tell(f"{name}: {seconds:.1f} s")

    def end(self) -> None:
        """End the last stage."""
        self._tell(self._ended())

    def _ended(self) -> str:
        return f"{self._name}: {self._clock() - self._since:.1f} s"
