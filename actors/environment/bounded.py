"""Awaiting a call that may hang, raise anything, or refuse to be cancelled.

Invariant: `bounded` ends within its limit (and a second of grace), raises only what its docstring
says, and an abandoned call's late error is taken, never left unretrieved. Called by the turn loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

# What a cancelled call gets to let go of its things before its environment is closed.
UNWIND_S = 1.0

_Result = TypeVar("_Result")
# The event loop keeps only weak references to its tasks.
_abandoned: set[asyncio.Task[Any]] = set()


class CallTimedOut(Exception):
    """The call did not end within its limit."""


class CallFailed(Exception):
    """The call raised; `__cause__` is what it raised."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe(error))
        self.error = error


class _CallExited(Exception):
    """The call tried to end the process."""


def describe(error: BaseException) -> str:
    """One line on an error: its type and the beginning of its text."""
    text = "its text cannot be had"
    # A stranger's error, whose own text may raise anything, or hold what no log can.
    with suppress(Exception, SystemExit):
        text = " ".join(str(error).split())[:200].encode(errors="replace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def num_abandoned() -> int:
    """Calls of this process that were given up and have not ended yet."""
    return len(_abandoned)


async def bounded(call: Callable[[], Awaitable[_Result]], *, limit_s: float) -> _Result:
    """Make a call and await it for at most limit_s seconds.

    Args: call: makes the awaitable; an error in making it is an error of the call.
    Raises: CallTimedOut; CallFailed for whatever the call raised; asyncio.CancelledError only when
    the caller itself is cancelled (the call is then cancelled too).
    """
    task = asyncio.ensure_future(_contained(call))
    try:
        done, _ = await asyncio.wait((task,), timeout=max(0.0, limit_s))
        if not done:
            _abandon(task)
            await asyncio.wait((task,), timeout=UNWIND_S)
            raise CallTimedOut(f"no answer within {limit_s:.3g} s")
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if task.cancelled():
        raise CallFailed(asyncio.CancelledError())
    error = task.exception()
    if error is not None:
        raise CallFailed(error) from error
    return task.result()


async def _contained(call: Callable[[], Awaitable[_Result]]) -> _Result:
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        # In a task these two would end the event loop, and with it every other episode.
        raise _CallExited(describe(error)) from error


def _abandon(task: asyncio.Task[Any]) -> None:
    _abandoned.add(task)
    task.add_done_callback(_take_error)
    task.cancel()


def _take_error(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()
