"""The calls of a user's functions that gave no answer, by function, task and how they ended."""

from __future__ import annotations

import logging
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass

MAX_COUNTED = 1000
MAX_TASKS_NAMED = 3
_logger = logging.getLogger(__name__)

task_id: ContextVar[str] = ContextVar("task_id", default="")
"""The id of the task being played in the current context, for counts and log lines; empty if there
is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCalls:
    """The calls of one function that gave no answer and ended in the same way."""

    function: str
    end: str
    """How the calls ended: `killed` (the pool killed the process at the call's limit), `cancelled`
    (the pool cancelled the coroutine at its limit) or `died` (the process ended during the call).
    """
    count: int
    why: str
    """Why the first of these calls was lost."""
    tasks: tuple[str, ...]
    """The known ids of the first tasks whose calls were lost, at most MAX_TASKS_NAMED of them."""


class LostCallCounter:
    """The counts of one pool's lost calls."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """The number of calls that gave no answer, by function, task id and `LostCalls.end`."""
        self._reasons: dict[tuple[str, str], str] = {}
        """Why the first lost call was lost, by function and `LostCalls.end`."""

    def count(self, function: str, end: str, why: str) -> None:
        """Count a lost call of the current task, and log the first lost call of each function."""
        task = task_id.get()
        is_first = not any(each == function for each, _, _ in self.counts)
        if len(self.counts) >= MAX_COUNTED:
            task = ""
        self.counts[function, task, end] += 1
        self._reasons.setdefault((function, end), why)
        if is_first:
            _logger.warning(
                "%s: a call %s: %s (task %s); further such calls are only counted",
                function,
                "ended its process" if end == "died" else "was ended at its limit",
                why,
                task or "unknown",
            )

    def add(self, other: LostCallCounter) -> None:
        """Add the counts of `other`, the counter of the pool that this counter's pool replaces."""
        self.counts.update(other.counts)
        self._reasons.update(other._reasons)

    @property
    def calls(self) -> tuple[LostCalls, ...]:
        """The calls that gave no answer, with one entry for each function and `LostCalls.end`.

        The entries are in the order in which they first occurred.
        """
        counts: Counter[tuple[str, str]] = Counter()
        tasks: dict[tuple[str, str], list[str]] = {}
        for (function, task, end), count in self.counts.items():
            counts[function, end] += count
            if task:
                tasks.setdefault((function, end), []).append(task)
        return tuple(
            LostCalls(
                function=function,
                end=end,
                count=count,
                why=self._reasons[function, end],
                tasks=tuple(tasks.get((function, end), ())[:MAX_TASKS_NAMED]),
            )
            for (function, end), count in counts.items()
        )
