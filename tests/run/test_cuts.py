"""Cuts of a queue are kept once and in order, and each call learns whether its own was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.messages import QueueCut
from service.run.restartable_queue import CutsInOrder


def cut(number: int, *, opening: int = 0) -> QueueCut:
    return QueueCut(opening=opening, number=number)


class Kept:
    def __init__(self) -> None:
        self.numbers: list[tuple[int, int]] = []
        self.cuts = CutsInOrder(self._keep)

    def _keep(self, cut: QueueCut, admitted: Sequence[GroupRequest]) -> None:
        self.numbers.append((cut.opening, cut.number))

    async def begin(self, number: int) -> asyncio.Task[bool]:
        """Take a cut in, which waits for those before it."""
        task = asyncio.create_task(self.cuts.take_in(cut(number), ()))
        await asyncio.sleep(0)
        return task


async def test_a_cut_waits_for_those_before_it() -> None:
    kept = Kept()
    third, second = await kept.begin(2), await kept.begin(1)
    assert kept.numbers == [] and not third.done()
    assert await kept.cuts.take_in(cut(0), ())
    assert (await second, await third) == (True, True)
    assert kept.numbers == [(0, 0), (0, 1), (0, 2)]


async def test_a_cut_that_waits_when_the_queue_dies_was_not_kept() -> None:
    kept = Kept()
    waiting = await kept.begin(1)
    await kept.cuts.begin_next()
    assert not await waiting
    # One of the dead queue that comes late, as well.
    assert not await kept.cuts.take_in(cut(0), ())
    assert await kept.cuts.take_in(cut(0, opening=1), ())
    assert kept.numbers == [(1, 0)]


async def test_a_cut_that_was_kept_is_said_to_be_so_though_the_queue_dies_at_once() -> None:
    """Else its call would be made again, of a queue that has its effect already."""
    kept = Kept()
    waiting = await kept.begin(1)
    assert await kept.cuts.take_in(cut(0), ())
    await kept.cuts.begin_next()
    assert await waiting
    assert kept.numbers == [(0, 0), (0, 1)]
