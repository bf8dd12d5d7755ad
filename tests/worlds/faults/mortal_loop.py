"""An event loop that stops between two awaits, like the loop of a killed process.

After that, no code of its tasks runs, not even `finally` or `except`. Threads finish the calls that
they have begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Killed(SystemExit):
    """Raised in place of the step at which the loop dies.

    It is a SystemExit, because asyncio ends a loop at once on that, unlike on most exceptions.
    """


class MortalLoop:
    """An event loop that dies at a given step.

    Call `run` once, and `bury` when the test no longer needs the state of the loop.
    """

    def __init__(self, *, dies_at: int | None) -> None:
        """Make the loop.

        dies_at: the step of its tasks, counted from 1, before which it dies; None: never.
        """
        self._dies_at = dies_at
        self.num_steps = 0
        self._unfinished: Coroutine[Any, Any, Any] | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._loop.set_exception_handler(lambda _loop, _context: None)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine and return its result.

        Raises: Killed if the loop dies before the result.
        """
        return self._loop.run_until_complete(work)

    def bury(self) -> None:
        """End the unfinished tasks and the loop, so that Python does not warn of them."""
        self._dies_at = None
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            # Tasks that waited for the killed task get its error now.
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
        raise NotImplementedError("await the task, not its coroutine")
