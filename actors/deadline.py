"""Awaiting with a deadline, without losing a cancellation; and retrying.

Not `asyncio.wait_for`: in Python 3.11 it swallows a cancellation that meets the result, and a loop
around it then never stops. Called wherever an actor awaits another one, or an event.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class ActorLost(Exception):
    """An actor of the run died or hangs; the message names it."""


async def within(limit_s: float, call: Awaitable[_Result]) -> _Result:
    """Await a call. Raises: TimeoutError after limit_s seconds; what the call raises."""
    async with asyncio.timeout(limit_s):
        return await call


async def is_set_within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait for an event. Returns: whether it came within limit_s seconds."""
    try:
        await within(limit_s, event.wait())
    except TimeoutError:
        return False
    return True


async def wait_while_moving(
    answers: Sequence[asyncio.Future[Any]],
    progress: Callable[[], Awaitable[Mapping[int, int]]],
    *,
    idle_s: float,
    look_s: float,
) -> None:
    """Wait until all have answered, or one has failed, for as long as the work makes progress.

    progress: the work done by each worker so far; a worker that does not answer is left out.
    idle_s: seconds without a change of it, or another answer, after which this returns. look_s:
    seconds between two checks.
    """
    seen: dict[int, int] = {}
    num_done, since = 0, time.monotonic()
    while time.monotonic() - since < idle_s:
        done, left = await asyncio.wait(
            answers, timeout=look_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if not left or any(answer.exception() for answer in done):
            return
        now = {**seen, **await progress()}
        if now != seen or len(done) > num_done:
            seen, num_done, since = now, len(done), time.monotonic()


async def retry(
    attempt: Callable[[], Awaitable[_Result]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    limit_s: float = math.inf,
    max_attempts: float = math.inf,
    first_pause_s: float = 0.1,
    longest_pause_s: float = 2.0,
) -> _Result:
    """Repeat an attempt after each error of the kinds `on`.

    The pauses double, up to the longest; each is cut by up to a half at random, so that callers
    that failed together do not retry together. The caller must bound an attempt that may hang.
    Raises: the last error after max_attempts, or at the end of limit_s seconds; others at once.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    longest_now_s = first_pause_s
    for number in itertools.count(1):
        try:
            return await attempt()
        except on:
            pause_s = random.uniform(0.5, 1.0) * longest_now_s
            if number >= max_attempts:
                raise
            if loop.time() + pause_s >= end:
                await asyncio.sleep(max(end - loop.time(), 0.0))
                raise
        await asyncio.sleep(pause_s)
        longest_now_s = min(2 * longest_now_s, longest_pause_s)
    raise AssertionError("unreachable: attempts are counted without end")


def poll(
    find: Callable[[], _Result | None], *, limit_s: float, every_s: float = 0.25
) -> _Result | None:
    """Call `find` until it finds something, at least once. Returns: None at the end of limit_s."""
    deadline = time.monotonic() + limit_s
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(every_s)
    return found
