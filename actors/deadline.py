"""Waiting for so long and no longer, without ever losing a cancellation.

Not `asyncio.wait_for`: in Python 3.11 it swallows a cancellation that meets the result, and a loop
around it then never stops. Called wherever an actor awaits another one, or an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class ActorLost(Exception):
    """An actor of the run died or hangs; the text names it."""


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


def poll(
    find: Callable[[], _Result | None], *, limit_s: float, every_s: float = 0.25
) -> _Result | None:
    """Call `find` until it finds something, at least once. Returns: None at the end of limit_s."""
    deadline = time.monotonic() + limit_s
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(every_s)
    return found
