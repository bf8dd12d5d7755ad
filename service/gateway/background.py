"""The gateway's background work: tasks that outlive their callers, and a thread for long calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from actors.deadline import TaskSet
from service.gateway.chat import Refused

log = logging.getLogger("rayloom.gateway")

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Background:
    """The background tasks and the thread of a gateway; belongs to one event loop."""

    def __init__(self) -> None:
        # Use only one thread, because two threads must not use a tokenizer at the same time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._begun = TaskSet()

    def begin(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Start a task that continues if its caller is cancelled; log the task's failure."""
        task = self._begun.begin(work)
        task.add_done_callback(_log_failure)
        return task

    async def in_thread(
        self,
        function: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """Run a function in the thread, because it would block the event loop (tokenising)."""
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Cancel all tasks that were begun."""
        self._begun.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        level = logging.DEBUG if isinstance(error, Refused) else logging.ERROR
        log.log(level, "%s: %s", type(error).__name__, error)
