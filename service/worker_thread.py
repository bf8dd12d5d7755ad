"""A thread for long calls, such as those of a store or a tokenizer, and the tasks that use it.

Invariants: calls run one after the other, in the order in which they were made; work that was begun
by `call` or `finish` is completed even if its caller is cancelled meanwhile. So the state in memory
agrees with the stored rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from actors.deadline import TaskSet

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class WorkerThread:
    """Runs slow functions in one thread, so that they do not block the event loop.

    Also runs asyncio tasks that continue if their caller is cancelled. Belongs to one event loop.
    """

    def __init__(self, name: str, *, expected: type[Exception] | tuple[()] = ()) -> None:
        """Create the thread.

        Args: name: name of the thread. If work fails after its caller was cancelled, the logger
        `rayloom.NAME` reports the error. expected: errors that are logged at the level DEBUG only.
        """
        # Use only one thread: a tokenizer must not be used by two threads at the same time.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._begun = TaskSet()
        self._log = logging.getLogger(f"rayloom.{name}")
        self._expected = expected

    def begin_task(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Start a task that continues if its caller is cancelled; log the task's failure.

        The task runs in the event loop, not in the thread.
        """
        task = self._begun.begin(work)
        task.add_done_callback(self._log_failure)
        return task

    async def finish(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Await a coroutine, and return its answer. The coroutine may await `call` or `compute`.

        The coroutine is completed even if the caller is cancelled.
        """
        task = self._begun.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # No caller is left to report the work's error.
            task.add_done_callback(self._log_failure)
            raise

    async def call(
        self,
        function: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Call a function in the thread after all earlier calls, and return its answer.

        The call is made even if the caller is cancelled before that.
        """
        return await self.finish(self.compute(function, *arguments, **named))

    async def compute(
        self,
        function: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Call a function in the thread after all earlier calls, and return its answer.

        If the caller is cancelled before the function's turn, the function is not called.
        """
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Cancel all tasks that were begun, and all calls that wait."""
        self._begun.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, self._expected) else logging.ERROR
            self._log.log(level, "%s: %s", type(error).__name__, error)
