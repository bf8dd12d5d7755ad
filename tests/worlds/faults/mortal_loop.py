"""An event loop that ends between two awaits, as the loop of a process does that is killed.

Nothing of its tasks runs after that: no `finally`, no `except`. What a thread has begun is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Killed(SystemExit):
    """A task's step that was not made; of all exceptions this kind alone ends a loop at once."""


class MortalLoop:
    """One life; `run` is called once, and `bury` when nothing of it is looked at any more."""

    def __init__(self, *, dies_at: int | None) -> None:
        """dies_at: before which step of its tasks, counted from 1; None: it does not."""
        self._dies_at = dies_at
        self.num_steps = 0
        self._unfinished: Coroutine[Any, Any, Any] | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._loop.set_exception_handler(lambda _loop, _context: None)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Raises: Killed."""
        return self._loop.run_until_complete(work)

    def bury(self) -> None:
        """End what is left, so that nothing warns of it."""
        self._dies_at = None
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            # To those that waited for the step that was not made, its error comes now.
            with suppress(Killed):
                self._loop.run_until_complete(asyncio.wait(tasks))
        if self._unfinished is not None:
            self._loop.run_until_complete(_close(self._unfinished))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def step(self, work: Coroutine[Any, Any, Any]) -> None:
        self.num_steps += 1
        if self._dies_at is not None and self.num_steps >= self._dies_at:
            self._unfinished = work
            raise Killed

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Stepped(work, self), loop=loop, **options)


async def _close(work: Coroutine[Any, Any, Any]) -> None:
    with suppress(RuntimeError):
        work.close()


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are counted."""

    def __init__(self, work: Coroutine[Any, Any, Any], life: MortalLoop) -> None:
        self._work, self._life = work, life

    def send(self, value: Any) -> Any:
        self._life.step(self._work)
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        self._life.step(self._work)
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task is awaited, not what it runs")
