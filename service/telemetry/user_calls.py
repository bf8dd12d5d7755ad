"""Count the calls of user functions that returned no answer, and report the workers' memory.

A call returns no answer if it reaches its time limit or if its worker process dies. Each
environment actor counts its own calls since its start. The recorder's `UserCalls` adds up the
counts of all actors, and makes metrics and notices from the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from actors.metrics import Metrics
from actors.user_code import MAX_TASKS_NAMED, LostCalls

MAX_FUNCTIONS = 32
OTHERS = "others"
"""Metric label under which all functions after the first MAX_FUNCTIONS are counted."""
NOTICED_AGAIN = 10
"""Factor by which a function's count must grow before it is reported again."""


class UserCalls:
    """Counts, over all environment actors, the calls of user functions that returned no answer."""

    def __init__(self, metrics: Metrics, notice: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._notice = notice
        # The last count that an actor reported, by actor, function and end.
        self._heard: Counter[tuple[str, str, str]] = Counter()
        self._resident_bytes: dict[str, int] = {}
        # Counts over all actors, by function, then by end.
        self._counts: dict[str, Counter[str]] = {}
        self._firsts: dict[str, str] = {}
        self._tasks: dict[str, dict[str, None]] = {}
        self._noticed: Counter[str] = Counter()

    def heard(self, actor_id: str, lost: Sequence[LostCalls], *, resident_bytes: int) -> None:
        """Process a report of an environment actor: add the calls that it had not reported before.

        Args: lost: all calls that the actor has counted since its start; the calls that it reported
        earlier are subtracted. resident_bytes: memory of the actor's largest worker process; 0 if
        the actor has no worker.
        """
        with self._metrics.together():
            for each in lost:
                key = actor_id, each.function, each.end
                self._count(each, each.count - self._heard[key])
                self._heard[key] = each.count
            self._resident_bytes[actor_id] = resident_bytes
            self._show_memory()
        for function, counts in self._counts.items():
            if counts.total() >= max(1, NOTICED_AGAIN * self._noticed[function]):
                self._noticed[function] = counts.total()
                self._notice(self._text(function))

    def ended(self, actor_id: str) -> None:
        """Leave an actor that has ended out of the memory metric, but keep the actor's counts."""
        self._resident_bytes.pop(actor_id, None)
        self._show_memory()

    def _count(self, lost: LostCalls, gained: int) -> None:
        is_known = lost.function in self._counts or len(self._counts) < MAX_FUNCTIONS
        function = lost.function if is_known else OTHERS
        self._counts.setdefault(function, Counter())[lost.end] += gained
        self._firsts.setdefault(function, lost.why)
        self._tasks.setdefault(function, {}).update(dict.fromkeys(lost.tasks))
        counter = self._metrics.parts.lost_user_calls
        counter.labels(function=function, end=lost.end).inc(gained)

    def _show_memory(self) -> None:
        largest = max(self._resident_bytes.values(), default=0)
        self._metrics.parts.worker_memory.set(largest or None)

    def _text(self, function: str) -> str:
        counts = self._counts[function]
        at_limit, died = counts.total() - counts["died"], counts["died"]
        parts = []
        if at_limit:
            parts.append(f"{_calls(at_limit)} ended at {'their' if at_limit > 1 else 'its'} limit")
        if died:
            parts.append(f"{_calls(died)} lost with {'their' if died > 1 else 'its'} process")
        tasks = ", ".join([*self._tasks[function]][:MAX_TASKS_NAMED])
        of_tasks = f"; tasks such as {tasks}" if tasks else ""
        return (
            f"{function}: {' and '.join(parts)} (the first: {self._firsts[function]}{of_tasks}). "
            "Each call fails separately: a score becomes a reward_error, a tool's answer an error, "
            "and an environment's answer an environment_error"
        )


def _calls(count: int) -> str:
    return f"{count} calls were" if count > 1 else "1 call was"
