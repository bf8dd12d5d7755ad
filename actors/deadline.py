"""Wait for a call with a time limit, run tasks side by side, and repeat calls that failed.

`asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the result, so
that a loop around it never stops. The functions here lose no cancellation. Use them wherever an
actor awaits another actor, or an event.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_LONGEST_PAUSE_S, _POLL_S = 2.0, 0.25
_Result = TypeVar("_Result")


class ActorLost(Exception):
    """Raised if an actor of the run died or hangs; the message names the actor."""


async def within(limit_s: float, call: Awaitable[_Result]) -> _Result:
    """Return a call's result. Raises: TimeoutError after limit_s seconds; any error of the call."""
    async with asyncio.timeout(limit_s):
        return await call


async def is_set_within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait for an event, and return whether it was set within limit_s seconds."""
    try:
        await within(limit_s, event.wait())
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def race(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Run awaitables as tasks, and enter the block when the first task has ended.

    At the end of the block the other tasks are cancelled and awaited; their errors are dropped.

    Example:
        async with race(work(), is_stopping.wait()) as (working, _):
            found = working.result() if working.done() else None
    """
    tasks = tuple(asyncio.create_task(work) for work in works)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await _cancelled(tasks)


async def beside(work: Awaitable[_Result], *helpers: Awaitable[object]) -> _Result:
    """Run helpers until the work ends, and return the work's result.

    The helpers may end earlier; otherwise they are cancelled after the work. If a helper raises,
    the work is cancelled and the helper's error is raised at once.
    Raises: any error of the work or of a helper.
    """
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(each) for each in helpers]
    running: set[asyncio.Future[Any]] = {working, *others}
    try:
        while not working.done():
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                if other.done():
                    other.result()
        return working.result()
    finally:
        await _cancelled((working, *others))


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskSet:
    """Tasks that are kept alive until they end; the event loop itself has only weak references."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in self:
            task.cancel()

    async def end(self) -> None:
        """Cancel the tasks, and wait until they have ended."""
        await _cancelled(self)


async def wait_while_moving(
    answers: Sequence[asyncio.Future[Any]],
    progress: Callable[[], Awaitable[Mapping[int, int]]],
    *,
    idle_s: float,
    look_s: float,
) -> None:
    """Wait while workers make progress, until all of them have answered or one has failed.

    Args: progress: returns the amount of work that each worker has done so far; workers that do not
    answer are absent. idle_s: return if, for this many seconds, no worker has made progress and no
    further answer has arrived. look_s: seconds between two calls of `progress`.
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
    first_pause_s: float = 0.1,
) -> _Result:
    """Repeat an attempt after each error of the kinds `on`, and return its result.

    The pauses double, up to _LONGEST_PAUSE_S. Each pause is shortened at random by up to a half, so
    that callers that failed together do not retry together. The caller must bound an attempt that
    may hang.
    Raises: the last error after limit_s seconds; an error of another kind at once.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    longest_now_s = first_pause_s
    while True:
        try:
            return await attempt()
        except on:
            pause_s = random.uniform(0.5, 1.0) * longest_now_s
            if loop.time() + pause_s >= end:
                await asyncio.sleep(max(end - loop.time(), 0.0))
                raise
        await asyncio.sleep(pause_s)
        longest_now_s = min(2 * longest_now_s, _LONGEST_PAUSE_S)


def poll(find: Callable[[], _Result | None], *, limit_s: float) -> _Result | None:
    """Call `find` at least once, until it returns a value. Return None after limit_s seconds."""
    deadline = time.monotonic() + limit_s
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
