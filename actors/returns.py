"""When returns are equal: what the queue and the merge actor must agree on; pure, no NumPy.

Called by the group advantages (a group of equal returns has no signal) and by the queue, which may
replace such a group (dynamic sampling).
"""

from __future__ import annotations

from collections.abc import Sequence

# Returns closer than this, relative to the largest, are equal: sums of rewards carry rounding.
EQUAL_TOLERANCE = 1e-9


def are_equal(returns: Sequence[float]) -> bool:
    """Whether returns differ by rounding at most; so are none, and one.

    max - min <= 1e-9 max(1, |r_1|, ..., |r_G|).

    Example: are_equal([0.1 + 0.2, 0.3]) -> True; are_equal([0.3, 0.4]) -> False
    """
    if len(returns) < 2:
        return True
    largest = max(1.0, *(abs(value) for value in returns))
    return max(returns) - min(returns) <= EQUAL_TOLERANCE * largest
