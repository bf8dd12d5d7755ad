"""A pool of worker processes for a user's functions, so that a call can harm only itself.

    found = await pool().call("my.py:score", {"completion": "7"}, limit_s=5)

`Pool.call` runs a function in the main thread of a worker that runs no other call. If the call
exceeds its limit, the pool kills the worker and every process that the worker has started. If a
function ends its own process, only that call fails; waiting calls get another worker. Instances
that keep state between calls live in a worker that several episodes share (`Home`). `fork_server`
imports the functions' modules and forks the workers, so the modules must be `is_importable`.

Invariant: when this process ends, in whatever way, no worker remains, nor any process that a worker
has started.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.environment.fork_server import ForkServerHandle, WorkerHandle, WorkerLost, how_ended
from actors.environment.settings import rollout_settings
from actors.environment.user_names import is_importable
from actors.environment.worker_process import HEAD, LENGTH
from actors.user_code import (
    UNWIND_S,
    CallFailed,
    CallTimedOut,
    LostCallCounter,
    LostCalls,
    RaisedInWorker,
)

LOAD_LIMIT_S = 120.0
"""Seconds that importing a function's module may take; a call's own limit does not include them."""
GROW_AFTER_S = 0.05
"""Seconds for which calls wait before the pool may grow beyond twice the number of cores."""
EPISODES_PER_WORKER = 4
MAX_STARTS_IN_VAIN = 3


@dataclass(frozen=True, slots=True)
class Held:
    """A reference to a value in a worker: the answer of an earlier call, which the worker kept.

    Later calls in the same worker take the reference as an argument.
    """

    key: int
    home: Home


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return value.key if isinstance(value, Held) else None


def _message(number: int, call: tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(call)
    body = file.getvalue()
    return LENGTH.pack(HEAD.size + len(body)) + HEAD.pack(number, 0) + body


def is_contained(name: str) -> bool:
    """Return whether a function's calls run in a worker process.

    An empty name means a function that is not the user's, whose calls run in this process.
    """
    return bool(name) and not rollout_settings.get().inline and is_importable(name)


class Pool:
    """Worker processes, which are started when calls need them.

    Calls that find no idle worker start up to two workers for each core. If calls still wait
    although cores are idle, they start more. Objects that keep state between the calls of an
    episode live in separate workers (`home`).
    """

    def __init__(self, *, size: int = 64, memory_mib: int = 4096) -> None:
        """Create a pool without starting a process.

        Args:
            size: Maximum number of workers for single calls. The same maximum holds for
                the workers of `home(is_loop=True)`, and for those of `home(is_loop=False)`.
            memory_mib: Memory in MiB that a worker may use in addition to the memory of the
                imported modules; 0 means no limit.
        """
        self._size = size
        self._max_bytes = memory_mib * 1024**2
        self._num_cores = os.cpu_count() or 1
        self._num_at_once = min(size, 2 * self._num_cores)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fork_server: ForkServerHandle | None = None
        self._numbers = itertools.count(1)
        # Every worker by the number of the request that started it.
        self._workers: dict[int, WorkerHandle] = {}
        self._idle: list[WorkerHandle] = []
        self._waiting: deque[asyncio.Future[WorkerHandle]] = deque()
        self._growing: asyncio.TimerHandle | None = None
        self._num_starts_in_vain = 0
        # How often a worker became free since the pool last checked whether to grow.
        self._num_ended = 0
        # The event loop keeps only weak references to its tasks.
        self._dropping: set[asyncio.Future[None]] = set()
        self.lost = LostCallCounter()

    # Methods that other classes and modules call.

    async def call(
        self, target: str, arguments: Mapping[str, Any], *, limit_s: float, about: str = ""
    ) -> Any:
        """Call a function in a worker and return its answer. A coroutine is awaited in the worker.

        Cancelling the caller ends the worker's process.

        Args:
            target: Name of the function, such as my.py:score.
            arguments: Keyword arguments; they and the answer are pickled.
            limit_s: Seconds that the call may take. They include neither the wait for a worker nor
                the import of the function's module.
            about: Name of the user's function that `target` calls, for messages. The module of
                this function is imported first. Empty means `target` itself.

        Raises:
            CallTimedOut: The call did not end within its limit.
            CallFailed: The function raised (`error` is a `RaisedInWorker`), or the call ended its
                process (`error` is a `WorkerLost`).
        """
        named = about or target
        worker = await self._taken()
        try:
            return await self._ask(worker, target, arguments, limit_s=limit_s, named=named)
        except WorkerLost as error:
            raise CallFailed(error) from error
        finally:
            self._give_back(worker)

    def home(self, *, is_loop: bool = False) -> Home:
        """Return a new `Home` for the instances of one episode.

        Args:
            is_loop: Whether every function called in this home is a coroutine. The worker then
                runs the coroutines of several episodes concurrently.
        """
        self._attach()
        homes = [
            each
            for each in self._workers.values()
            if each.is_home and each.is_loop == is_loop and not each.is_over
        ]
        least = min(homes, key=lambda each: each.num_homes, default=None)
        num_free = 0 if len(homes) < self._num_at_once else EPISODES_PER_WORKER - 1
        if least is None or (least.num_homes > num_free and len(homes) < self._size):
            least = self._start(is_home=True, is_loop=is_loop)
        least.num_homes += 1
        return Home(self, least)

    def kill(self, worker: WorkerHandle, why: str) -> None:
        """End a worker's process and all that it has started."""
        worker.is_explained = True
        worker.lost(why)
        if worker in self._idle:
            self._idle.remove(worker)
        self._kill_process(worker)

    def leave(self, worker: WorkerHandle, keys: list[int]) -> None:
        """Make a worker drop the values with these keys, which it keeps for an ended episode."""
        worker.num_homes -= 1
        if not worker.is_over and keys:
            dropping = asyncio.ensure_future(worker.send(_message(0, (None, keys, False))))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    @property
    def resident_bytes(self) -> list[int]:
        """Resident memory in bytes of each worker that has answered a call."""
        return [each.resident_bytes for each in self._workers.values() if each.resident_bytes]

    @property
    def is_outdated(self) -> bool:
        """Whether the pool is idle and the import path has changed since the pool started.

        Such a pool should be replaced: its workers may import modules from other places than this
        process.
        """
        is_idle = not any(each.answers or each.num_homes for each in self._workers.values())
        is_idle = is_idle and not self._waiting
        return is_idle and self._fork_server is not None and self._fork_server.is_outdated

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End all processes of the pool."""
        for worker in self._workers.values():
            self._unread(worker.socket)
            worker.is_explained = True
            worker.lost("the pool was closed")
            worker.socket.close()
        self._workers.clear()
        self._idle.clear()
        self._end_fork_server()

    # Calls.

    async def _ask(
        self,
        worker: WorkerHandle,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        named: str,
        keeps: bool = False,
        number: int | None = None,
    ) -> Any:
        """Call a function in a worker, and return its answer.

        The worker is killed after a call that exceeds limit_s, is cancelled or raises MemoryError.
        """
        is_done = False
        try:
            for name in (named, target):
                # The worker's own functions and modules that are loaded there need no import.
                if not (name.startswith("worker:") or name in worker.loaded):
                    await self._within(
                        worker, "worker:import_name", {"name": name}, limit_s=LOAD_LIMIT_S
                    )
                    worker.loaded.add(name)
            found = await self._within(
                worker, target, arguments, limit_s=limit_s, keeps=keeps, number=number
            )
            is_done = True
            return found
        except CallFailed as failed:
            error = failed.error
            is_done = not (isinstance(error, RaisedInWorker) and error.kind == "MemoryError")
            raise
        except CallTimedOut as error:
            self.lost.count(named, "killed", str(error))
            raise
        except WorkerLost as error:
            # Count the end once, also if several episodes have calls in this worker.
            if not worker.is_explained:
                worker.is_explained = True
                self.lost.count(named, "died", str(error))
            raise
        finally:
            if not is_done and not worker.is_over:
                self.kill(worker, f"its process was killed to end a call of {named}")

    async def _within(
        self,
        worker: WorkerHandle,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        keeps: bool = False,
        number: int | None = None,
    ) -> Any:
        if worker.is_over:
            raise WorkerLost(worker.why)
        number = next(self._numbers) if number is None else number
        try:
            message = _message(number, (target, dict(arguments), keeps))
        except Exception as error:
            raise CallFailed(error) from error
        try:
            async with asyncio.timeout(limit_s):
                return await worker.ask(number, message)
        except TimeoutError:
            raise CallTimedOut(f"no answer within {limit_s:.3g} s") from None

    async def ask_home(
        self,
        worker: WorkerHandle,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        named: str,
        keeps: bool,
    ) -> Any:
        """Call a function in the worker of a `Home`; return the function's answer, or its key.

        Args:
            named: Name of the function, for messages.
            keeps: Whether the worker keeps the answer; then return the key of the kept answer.
        """
        number = next(self._numbers)
        ask = partial(self._ask, worker, target, arguments, named=named, keeps=keeps, number=number)
        if not worker.is_loop:
            async with worker.lock:
                found = await ask(limit_s=limit_s)
            return number if keeps else found
        asking = asyncio.ensure_future(ask(limit_s=limit_s + 2 * UNWIND_S))
        try:
            await asyncio.wait((asking,), timeout=limit_s)
            if not asking.done():
                await self._cancel(worker, number, asking)
                why = f"no answer within {limit_s:.3g} s"
                self.lost.count(named, "cancelled", why)
                raise CallTimedOut(why)
        except asyncio.CancelledError:
            await self._cancel(worker, number, asking)
            raise
        found = asking.result()
        return number if keeps else found

    async def _cancel(self, worker: WorkerHandle, number: int, asking: asyncio.Future[Any]) -> None:
        """Cancel a coroutine in its worker. End the process if it still runs after UNWIND_S."""
        if not worker.is_over:
            await worker.send(_message(number, (None, [], False)))
        await asyncio.wait((asking,), timeout=UNWIND_S)
        asking.cancel()
        await asyncio.wait((asking,))
        if not asking.cancelled():
            asking.exception()

    # Workers.

    async def _taken(self) -> WorkerHandle:
        self._attach()
        if self._idle:
            return self._idle.pop()
        waiting: asyncio.Future[WorkerHandle] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._grow()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._give_back(waiting.result())
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _give_back(self, worker: WorkerHandle) -> None:
        self._num_ended += 1
        if worker.is_over:
            return
        if self._max_bytes and worker.resident_bytes > self._max_bytes:
            self.kill(worker, "its memory was at its limit")
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def _grow(self, *, is_late: bool = False) -> None:
        """Start workers for waiting calls. is_late: whether the calls have waited GROW_AFTER_S."""
        if self._growing is not None:
            self._growing.cancel()
            self._growing = None
        waiting = [each for each in self._waiting if not each.done()]
        if not waiting:
            return
        workers = [each for each in self._workers.values() if not each.is_home]
        num_starting = sum(not each.process for each in workers)
        bound = self._num_at_once
        # At this rate the waiting calls would wait for more than a second.
        is_slow = is_late and self._num_ended < len(waiting) * GROW_AFTER_S
        self._num_ended = 0 if is_late else self._num_ended
        if (
            is_slow
            and not num_starting
            and sum(each.is_running for each in workers) < self._num_cores
        ):
            # The workers' calls wait for something, and leave cores free.
            bound = min(self._size, max(bound, len(workers) + self._num_cores))
        for _ in range(min(len(waiting) - num_starting, bound - len(workers))):
            self._start(is_home=False, is_loop=False)
        self._growing = asyncio.get_running_loop().call_later(
            GROW_AFTER_S, lambda: self._grow(is_late=True)
        )

    def _start(self, *, is_home: bool, is_loop: bool) -> WorkerHandle:
        self._attach()
        server = self._fork_server or self._start_fork_server()
        number = next(self._numbers)
        end = server.fork(number, is_loop=is_loop)
        worker = WorkerHandle(number, end, is_home=is_home, is_loop=is_loop)
        worker.loaded |= server.loaded
        self._workers[number] = worker
        assert self._loop is not None
        self._loop.add_reader(end, self._on_readable, worker)
        return worker

    def _on_readable(self, worker: WorkerHandle) -> None:
        if not worker.read():
            self._unread(worker.socket)
            # The process has ended, which the fork server reports with its status, or it has closed
            # its end of the socket.
            if not worker.is_over:
                self._kill_process(worker)

    def _kill_process(self, worker: WorkerHandle) -> None:
        # If the process id is not known yet, `_on_report` kills the process once it is.
        if worker.process and self._fork_server is not None:
            self._fork_server.kill(worker.process)

    # The fork server.

    def _attach(self) -> None:
        """Make the running event loop read the sockets of the workers and of the fork server."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        for worker in self._workers.values():
            self._unread(worker.socket)
        if self._fork_server is not None:
            self._unread(self._fork_server.control)
        self._loop, self._growing = loop, None
        self._waiting.clear()
        if self._fork_server is not None:
            loop.add_reader(self._fork_server.control, self._on_report)
        for worker in list(self._workers.values()):
            loop.add_reader(worker.socket, self._on_readable, worker)
            # This worker's call has ended with the earlier event loop.
            if worker not in self._idle and worker.process:
                self.kill(worker, "its event loop has ended")

    def _unread(self, end: socket.socket) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(end)

    def _start_fork_server(self) -> ForkServerHandle:
        # A module may have caused a failed start. Each worker then imports the modules itself.
        server = ForkServerHandle(preloads=not self._num_starts_in_vain, max_bytes=self._max_bytes)
        self._fork_server = server
        assert self._loop is not None
        self._loop.add_reader(server.control, self._on_report)
        self._loop.call_later(LOAD_LIMIT_S, self._check_start, server)
        return server

    def _check_start(self, server: ForkServerHandle) -> None:
        """End the fork server if its imports are not done; called LOAD_LIMIT_S after its start."""
        if self._fork_server is server and not server.has_forked:
            self._fork_server_ended()

    def _on_report(self) -> None:
        assert self._fork_server is not None
        try:
            report = self._fork_server.read()
        except BlockingIOError:
            return
        if report is None:
            self._fork_server_ended()
            return
        if "started" in report:
            self._num_starts_in_vain, self._fork_server.has_forked = 0, True
            worker = self._workers[report["started"]]
            worker.process = report["process"]
            if worker.is_over:
                self._kill_process(worker)
            elif not worker.is_home:
                self._give_back(worker)
            return
        worker = next(each for each in self._workers.values() if each.process == report["ended"])
        self._drop(worker, f"its process {how_ended(report['status'])}")
        self._grow()

    def _end_fork_server(self) -> None:
        if self._fork_server is not None:
            self._unread(self._fork_server.control)
            self._fork_server.end()
            self._fork_server = None

    def _drop(self, worker: WorkerHandle, why: str) -> None:
        # Read the answers that the worker sent before it ended.
        while worker.answers and worker.read():
            pass
        self._unread(worker.socket)
        worker.socket.close()
        worker.lost(why)
        self._workers.pop(worker.number, None)
        if worker in self._idle:
            self._idle.remove(worker)

    def _fork_server_ended(self) -> None:
        assert self._fork_server is not None
        self._num_starts_in_vain += not self._fork_server.has_forked
        self._end_fork_server()
        for worker in list(self._workers.values()):
            self._drop(worker, "its process ended with the process that it was forked from")
        if self._num_starts_in_vain >= MAX_STARTS_IN_VAIN:
            self._num_starts_in_vain = 0
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_exception(CallFailed(WorkerLost("no worker process starts")))
        self._grow()


class Home:
    """The instances that one episode keeps in a worker. They are lost when the worker ends."""

    def __init__(self, pool: Pool, worker: WorkerHandle) -> None:
        self._pool = pool
        self._worker = worker
        self._held: list[int] = []
        self._is_closed = False

    async def call(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        about: str = "",
        keeps: bool = False,
    ) -> Any:
        """Call a function in this home's worker, as `Pool.call` does, and return its answer.

        The function gets the kept value in place of each `Held` argument.

        Args:
            keeps: Whether to keep the answer in the worker and return a `Held` that refers to it.

        Raises: CallTimedOut and CallFailed, as `Pool.call` does; WorkerLost if this call or a call
            of another episode ended the worker.
        """
        found = await self._pool.ask_home(
            self._worker,
            target,
            arguments,
            limit_s=limit_s,
            named=about or target,
            keeps=keeps,
        )
        if not keeps:
            return found
        self._held.append(found)
        return Held(found, self)

    def close(self) -> None:
        """Drop the values that the worker keeps for this episode."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.leave(self._worker, self._held)


_pools = threading.local()
_options: dict[str, int] = {}


def configure(*, size: int, memory_mib: int) -> None:
    """Set the options of the pools that this process makes from now on."""
    _options.update(size=size, memory_mib=memory_mib)


def pool() -> Pool:
    """Return this thread's pool.

    The first call makes the pool; a later call replaces the pool if it is outdated.
    """
    made: Pool | None = getattr(_pools, "own", None)
    if made is None or made.is_outdated:
        outdated, made = made, Pool(**_options)
        _pools.own = made
        if outdated is not None:
            outdated.close()
            made.lost.add(outdated.lost)
    return made


def report() -> tuple[tuple[LostCalls, ...], int]:
    """Return the lost calls of this thread's pool, and the resident memory of its largest worker.

    The memory is in bytes; 0 means that no worker has answered a call.
    """
    made: Pool | None = getattr(_pools, "own", None)
    if made is None:
        return (), 0
    return made.lost.calls, max(made.resident_bytes, default=0)
