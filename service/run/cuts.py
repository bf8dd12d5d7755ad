"""Takes the cuts of a trajectory queue in, one after the other, whichever order they come in.

Invariant: `take_in` says whether its cut was kept, also where the queue has died meanwhile: a call
whose cut was kept took effect, and is not made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.messages import QueueCut

Keep = Callable[[QueueCut, Sequence[GroupRequest]], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    cut: QueueCut
    admitted: Sequence[GroupRequest]
    is_kept: bool = False


class CutsInOrder:
    """Those of one opening of the queue at a time; belongs to one event loop."""

    def __init__(self, keep: Keep) -> None:
        """keep: called with each cut when all before it were kept, and with what was admitted in
        its call."""
        self._keep = keep
        self._opening = 0
        self._num_kept = 0
        self._waiting: dict[int, _Arrival] = {}
        """By number, cuts that wait for one before them."""
        self._news = asyncio.Condition()

    @property
    def opening(self) -> int:
        """Of the queue whose cuts are taken in."""
        return self._opening

    @property
    def num_kept(self) -> int:
        """Of this opening."""
        return self._num_kept

    async def take_in(self, cut: QueueCut, admitted: Sequence[GroupRequest]) -> bool:
        """Wait until the cut and all before it are kept.

        Returns: False for a cut of a queue that has died before, and with it the call's effect.
        """
        arrival = _Arrival(cut=cut, admitted=admitted)
        async with self._news:
            if cut.opening == self._opening:
                self._waiting[cut.number] = arrival
            while (following := self._waiting.pop(self._num_kept, None)) is not None:
                self._keep(following.cut, following.admitted)
                following.is_kept = True
                self._num_kept += 1
            self._news.notify_all()
            await self._news.wait_for(lambda: arrival.is_kept or cut.opening != self._opening)
            return arrival.is_kept

    async def begin_next(self) -> None:
        """The queue has died; its successor's cuts are taken in, from number 0 on."""
        async with self._news:
            self._opening += 1
            self._num_kept = 0
            self._waiting.clear()
            self._news.notify_all()
