"""Tests that a queue's cuts are kept once and in order, and that each call learns of its own."""

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
        """Take in a cut, which waits for the earlier ones."""
        task = asyncio.create_task(self.cuts.take_in(cut(number), ()))
        await asyncio.sleep(0)
        return task


async def test_a_cut_waits_for_earlier_ones() -> None:
    kept = Kept()
    third, second = await kept.begin(2), await kept.begin(1)
    assert kept.numbers == [] and not third.done()
    assert await kept.cuts.take_in(cut(0), ())
    assert (await second, await third) == (True, True)
    assert kept.numbers == [(0, 0), (0, 1), (0, 2)]


async def test_a_cut_that_waits_when_the_queue_dies_is_not_kept() -> None:
    kept = Kept()
    waiting = await kept.begin(1)
    await kept.cuts.begin_next()
    assert not await waiting
    # A late cut of the dead queue is not kept either.
    assert not await kept.cuts.take_in(cut(0), ())
    assert await kept.cuts.take_in(cut(0, opening=1), ())
    assert kept.numbers == [(1, 0)]


async def test_a_kept_cut_is_reported_even_if_the_queue_dies_at_once() -> None:
    """Check that a kept cut is reported as such, so that its call is not repeated."""
    kept = Kept()
    waiting = await kept.begin(1)
    assert await kept.cuts.take_in(cut(0), ())
    await kept.cuts.begin_next()
    assert await waiting
    assert kept.numbers == [(0, 0), (0, 1)]
