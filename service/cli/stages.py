"""Print the progress of a start, with a first line at once and then each stage with its seconds.

The lines are plain, so that terminals, notebooks and CI logs show the same text. After the
supervisor has started, the run's display shows the later stages. This module imports no large
package, so that the first line is printed before any slow import.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from service.cli.outlet import say


class Stages:
    """Prints the stages of a start one after another.

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
        """Print the end of the current stage, and begin the stage `name`."""
        self._tell(f"{self._ended()}; next: {name}")
        self._name, self._since = name, self._clock()

    def ended(self, name: str, seconds: float) -> None:
        """Print the end of a stage that ran concurrently with the current stage."""
        self._tell(f"{name}: {seconds:.1f} s")

    def end(self) -> None:
        """End the last stage."""
        self._tell(self._ended())

    def _ended(self) -> str:
        return f"{self._name}: {self._clock() - self._since:.1f} s"
