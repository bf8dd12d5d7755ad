"""Which engines were lost and which came back, from what the weight board says. Pure.

Asked by the supervisor at each look at the board. An engine counts from the first time that it
holds the current version; that it lacks a version which was just published is no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.weights.board import BoardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNews:
    """num_lost: since the last look. text: a sentence for the user; empty without news."""

    num_lost: int = 0
    text: str = ""


class EngineWatch:
    """One for the engines of a run. Replicas never return under the name of one that died."""

    def __init__(self, *, num_expected: int) -> None:
        self._num_expected = num_expected
        self._ready: frozenset[str] = frozenset()
        self._num_missing = 0

    @property
    def num_ready(self) -> int:
        """Engines that are there, whether or not they have loaded the newest version yet."""
        return len(self._ready)

    def look(self, status: BoardStatus) -> EngineNews:
        """Compare with the last look."""
        there = {replica.replica_id for replica in status.replicas}
        current = {
            replica.replica_id
            for replica in status.replicas
            if status.version is not None
            and (replica.epoch, replica.version) == (status.epoch, status.version)
        }
        num_lost, num_new = len(self._ready - there), len(current - self._ready)
        self._ready = frozenset((self._ready & there) | current)
        num_back = min(num_new, self._num_missing + num_lost)
        self._num_missing += num_lost - num_back
        news = [_sentence(num_lost, "lost")] if num_lost else []
        news += [_sentence(num_back, "back")] if num_back else []
        if not news:
            return EngineNews()
        how_many = f"{len(self._ready)} of {self._num_expected} ready"
        return EngineNews(num_lost=num_lost, text=f"{', '.join(news)}; {how_many}")


def _sentence(count: int, what: str) -> str:
    if what == "lost":
        return "an engine was lost" if count == 1 else f"{count} engines were lost"
    return "an engine is back" if count == 1 else f"{count} engines are back"
