"""Rollouts that wait: pending ones for an environment actor, finished ones for a step.

Called by the queue state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from operator import itemgetter
from typing import Any

from actors.trajectory_queue.groups import BlockRow, Group, Rollout


class ReadyRollouts:
    """The pending rollouts of each environment, in the order of handing out.

    A rollout that is no longer pending stays here until it is popped; the caller skips it.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[bool, int, int, str]]] = {}
        """By environment, a heap of (is first attempt, group number, member, rollout id), so that
        retries come first."""

    def add(self, rollout: Rollout, group: Group) -> None:
        member = int(rollout.rollout_id.rpartition("-")[2])
        heap = self._heaps.setdefault(group.task.environment, [])
        heapq.heappush(heap, (rollout.next_attempt == 0, group.number, member, rollout.rollout_id))

    def pop(self, environments: Collection[str]) -> str | None:
        """Remove the first rollout of these environments; return its id, or None without any."""
        heaps = [heap for name in environments if (heap := self._heaps.get(name))]
        return heapq.heappop(min(heaps, key=itemgetter(0)))[-1] if heaps else None

    def ids(self, environments: Collection[str]) -> Iterator[str]:
        """Yield the ids of the rollouts of these environments, in no order."""
        heaps = (self._heaps.get(environment, ()) for environment in environments)
        return (rollout_id for heap in heaps for *_, rollout_id in heap)


class WaitingRollouts:
    """The finished rollouts that no step has taken, and the size of their payloads."""

    def __init__(self) -> None:
        self._payloads: dict[str, BlockRow] = {}
        self._num_rows: Counter[Any] = Counter()
        """Number of rows in `_payloads` by block."""
        self.num_bytes = 0
        """Total size of the blocks; each counts once, with all its rows."""

    def __len__(self) -> int:
        return len(self._payloads)

    def ids(self) -> list[str]:
        """Return their ids, in the order in which they finished."""
        return list(self._payloads)

    @property
    def oldest(self) -> float | None:
        """The smallest `BlockRow.arrived_at`; None if no rollout waits."""
        return min((row.arrived_at for row in self._payloads.values()), default=None)

    def add(self, rollout: Rollout) -> None:
        assert rollout.payload is not None
        payload = self._payloads[rollout.rollout_id] = rollout.payload
        if not self._num_rows[payload.block]:
            self.num_bytes += payload.num_bytes
        self._num_rows[payload.block] += 1

    def drop(self, rollout_id: str) -> None:
        """Remove a rollout if it waits."""
        if (payload := self._payloads.pop(rollout_id, None)) is None:
            return
        self._num_rows[payload.block] -= 1
        if not self._num_rows[payload.block]:
            del self._num_rows[payload.block]
            self.num_bytes -= payload.num_bytes
