"""Rate limits by token buckets, one for each name; pure except for the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# At this number the bucket that was not used for longest is dropped: it had most time to fill.
MAX_BUCKETS = 4096


class Rates:
    """Token buckets by name. Belongs to one event loop; each process counts separately."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}
        """The number of remaining tokens and the time of that count, by name."""

    def take(self, name: str, *, per_s: float, burst: float) -> int:
        """Take a token. Returns: 0; if there is none, the whole seconds until the next.

        per_s: tokens that are added per second. burst: tokens of a full bucket; at least 1.
        Example: per_s=0.5, burst=1 -> 0 at the first call, 2 at the next.
        """
        now, most = self._now(), max(1.0, burst)
        left, at = self._buckets.get(name, (most, now))
        left = min(most, left + (now - at) * per_s)
        is_there = left >= 1.0
        if len(self._buckets) >= MAX_BUCKETS and name not in self._buckets:
            del self._buckets[next(iter(self._buckets))]
        # Insert it last, so that the buckets stay in the order of their last use.
        self._buckets.pop(name, None)
        self._buckets[name] = (left - 1.0 if is_there else left, now)
        return 0 if is_there else max(1, math.ceil((1.0 - left) / per_s))
