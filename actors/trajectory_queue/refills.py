"""Dynamic sampling: groups whose returns are all equal are replaced, a bounded number of times.

What a group's members bring to the baseline is known when it closes: the environment's returns
behind the outcomes' rules. If they are all equal, no advantage can come of it, and its number is
given another task. Source: DAPO, arXiv 2503.14476, equation 11 (deviations: the place in the step
is refilled, and not the batch sampled anew; a place that was refilled `limit` times keeps what
comes, so that a solved task set ends as weak updates and not as a wait without end). Invariant: no
number is refilled more than `limit` times. Reward shaping is not looked at: a task on which all
did equally well is what is replaced. Pure; kept by the queue state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.outcomes import are_equal


class Refills:
    """How often each group number was refilled for its variance. limit: 0 never refills."""

    def __init__(self, *, limit: int, counts: Mapping[int, int] | None = None) -> None:
        self._limit = limit
        self._counts = dict(counts or {})

    def claim(self, number: int, returns: Sequence[float]) -> bool:
        """Whether a closed group is to be replaced; then one refill of its number is used up."""
        used = self._counts.get(number, 0)
        if used >= self._limit or not are_equal(returns):
            return False
        self._counts[number] = used + 1
        return True

    def forget(self, number: int) -> None:
        """The number has left with its step."""
        self._counts.pop(number, None)

    def counts(self) -> dict[int, int]:
        """By group number not settled, the refills used."""
        return dict(self._counts)
