"""Groups that could not be trained, counted in a row: how a run notices that it gets nowhere.

A group ends usable when it closes with enough members for a baseline; else it is evicted and its
number filled again, which a run whose every episode fails would do for ever. Pure; kept by the
queue state, told with every drain, judged by the supervisor's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from actors.types import Outcome, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGroups:
    """The groups that have failed since the last usable one.

    num_before: usable groups before this row, by which one row is told from the next. outcomes: of
    the attempts since then that were of no use; the last one's detail, task and environment.
    """

    num_before: int
    num_groups: int
    outcomes: Mapping[Outcome, int]
    last_outcome: Outcome
    last_detail: str
    task_id: str
    environment: str

    @property
    def num_attempts(self) -> int:
        return sum(self.outcomes.values())

    @property
    def main_outcome(self) -> Outcome:
        """The most frequent one; the last one among equals."""
        most = max(self.outcomes.values())
        if self.outcomes.get(self.last_outcome) == most:
            return self.last_outcome
        return next(outcome for outcome, count in self.outcomes.items() if count == most)


class FailureRow:
    """Counts; a usable group begins a new row."""

    def __init__(self) -> None:
        self._num_usable = self._num_failed = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._last: tuple[Outcome, str, Task] | None = None

    def add_attempt(self, outcome: Outcome, *, detail: str, task: Task) -> None:
        """An attempt ended without a trajectory that a baseline could use."""
        self._outcomes[outcome] += 1
        self._last = (outcome, detail, task)

    def add_group(self, *, is_usable: bool) -> None:
        """A group closed."""
        if not is_usable:
            self._num_failed += 1
            return
        self._num_usable += 1
        self._num_failed, self._last = 0, None
        self._outcomes.clear()

    def look(self) -> FailedGroups | None:
        """None while no group has failed since the last usable one."""
        if not self._num_failed or self._last is None:
            return None
        outcome, detail, task = self._last
        return FailedGroups(
            num_before=self._num_usable,
            num_groups=self._num_failed,
            outcomes=dict(self._outcomes),
            last_outcome=outcome,
            last_detail=detail,
            task_id=task.task_id,
            environment=task.environment,
        )
