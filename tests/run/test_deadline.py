"""Awaiting with a deadline: the three ways that it ends."""

from __future__ import annotations

import asyncio

import pytest

from actors.deadline import is_set_within, within


async def answer(word: str) -> str:
    await asyncio.sleep(0)
    return word


async def test_an_answer_in_time_comes_through_and_so_does_its_error() -> None:
    assert await within(30.0, answer("yes")) == "yes"

    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await within(30.0, fail())


async def test_a_late_answer_is_a_timeout_and_its_call_is_cancelled() -> None:
    call = asyncio.create_task(asyncio.sleep(3600))
    with pytest.raises(TimeoutError):
        await within(0.01, call)
    assert call.cancelled()


async def test_a_cancellation_that_meets_the_answer_is_not_swallowed() -> None:
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(30.0, answered))
    await asyncio.sleep(0)
    answered.set_result("yes")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_event_is_told_from_its_absence() -> None:
    event = asyncio.Event()
    assert not await is_set_within(0.01, event)
    assert not await is_set_within(-1.0, event)
    asyncio.get_running_loop().call_soon(event.set)
    assert await is_set_within(30.0, event)
    assert await is_set_within(-1.0, event)
