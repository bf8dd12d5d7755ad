"""Call a run's store in a thread, so that the process's event loop does not wait for a disk.

Invariants: calls run one after the other, in the order in which they were made; work that was begun
by `finish` is completed even if its caller is cancelled meanwhile. So the state in memory agrees
with the stored rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from actors.deadline import TaskSet

log = logging.getLogger("rayloom.store")

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class StoreThread:
    """The thread in which a process calls its store, so that its event loop does not wait."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._begun = TaskSet()

    async def call(
        self,
        function: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Call a function in the thread after all earlier calls, and return its answer."""
        return await self.finish(self._call(partial(function, *arguments, **named)))

    async def finish(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine that calls the store, and return its result.

        The coroutine is completed even if the caller is cancelled.
        """
        task = self._begun.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # No caller is left to report the work's error.
            task.add_done_callback(_log_error)
            raise

    async def _call(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("a call of the store ended with %s: %s", type(error).__name__, error)
