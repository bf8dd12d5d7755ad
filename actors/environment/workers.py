"""A pool of processes in which a user's functions run, so that a call can hurt only itself.

    found = await pool().call("my.py:score", {"completion": "7"}, limit_s=5)

A call runs in the main thread of a worker that has no other call. A call that does not end within
its limit is ended with its process and all that it has started; one that ends its process itself
fails alone. Others wait for another worker. What has to keep state between calls lives in a `Home`,
which is a place in a worker that several episodes share. Workers are forked from a process that has
imported the functions' modules (`worker_process`). Functions of a module that was made in this
process (`is_importable`) cannot be called in another.

Invariant: when this process ends, however it does, no worker and nothing of a worker is left.
Called by reward functions, tools, a user's environments and the checks before the start.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.environment import worker_process
from actors.environment.settings import playing
from actors.environment.user_code import (
    UNWIND_S,
    CallFailed,
    CallTimedOut,
    RaisedInWorker,
)
from actors.environment.user_names import BadName, module_of
from actors.environment.worker_process import HEAD, LENGTH, MAX_CONTROL_BYTES

LOAD_LIMIT_S = 120.0
"""For the import of the functions' modules, which no call's limit includes."""
GROW_AFTER_S = 0.05
"""How long a call waits for a worker before the pool grows beyond the cores."""
EPISODES_PER_HOME = 4
MAX_STARTS_IN_VAIN = 3
MAX_COUNTED = 1000
MAX_TASKS_NAMED = 3
_logger = logging.getLogger(__name__)

task_id: ContextVar[str] = ContextVar("task_id", default="")
"""The task that is played where a call is made, for what is counted and logged of it."""


class WorkerLost(Exception):
    """The process in which a call ran, or an episode's instances were, has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCalls:
    """Calls of one function that ended alike without an answer."""

    function: str
    end: str
    """killed, or cancelled: at its limit; died: with its process."""
    count: int
    why: str
    """Of the first."""
    tasks: tuple[str, ...]
    """The first few that are known."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a call gave and is kept in its worker: an argument of later calls there."""

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


def is_importable(name: str) -> bool:
    """Whether another process finds a function's module: it is no module made in this one."""
    with suppress(BadName):
        module = sys.modules.get(module_of(name, what="function"))
        return module is None or getattr(module, "__spec__", None) is not None
    return False


def is_contained(name: str) -> bool:
    """Whether a function is called in a worker; an empty name is of no function of a user's."""
    return bool(name) and not playing.get().inline and is_importable(name)


_preloaded: dict[str, None] = {}


def preload(name: str) -> None:
    """Have a function's module imported before workers are forked, where none was yet."""
    _preloaded[name] = None


class _Worker:
    """This process's end of one worker."""

    def __init__(self, start: int, end: socket.socket, *, is_home: bool, is_loop: bool) -> None:
        self.start = start
        self.is_home = is_home
        self.is_loop = is_loop
        self.process = 0
        self.loaded: set[str] = set()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.lock = asyncio.Lock()
        self._sending = asyncio.Lock()
        self.num_homes = 0
        self.resident_bytes = 0
        self.why = ""
        self.is_over = False
        # Whether its end was ours, or is counted.
        self.is_explained = False
        self.end = end
        # At the end of this process, too.
        weakref.finalize(self, end.close)
        self._read = bytearray()

    async def ask(
        self, number: int, target: str | None, arguments: Mapping[str, Any], *, keeps: bool
    ) -> Any:
        """Raises: CallFailed; WorkerLost."""
        if self.is_over:
            raise WorkerLost(self.why)
        try:
            message = _message(number, (target, dict(arguments), keeps))
        except Exception as error:
            raise CallFailed(error) from error
        answer = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        try:
            await self.send(message)
            return await answer
        finally:
            self.answers.pop(number, None)

    async def send(self, message: bytes) -> None:
        # That its process has ended, its nursery says.
        async with self._sending:
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self.end, message)

    def read(self) -> bool:
        """Take what has come. Returns: whether the worker's end is open."""
        try:
            part = self.end.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            part = b""
        self._read += part
        while len(self._read) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                break
            self._take(bytes(self._read[LENGTH.size : end]))
            del self._read[:end]
        return bool(part)

    def _take(self, message: bytes) -> None:
        number, self.resident_bytes = HEAD.unpack_from(message)
        answer = self.answers.get(number)
        if answer is None or answer.done():
            return
        try:
            is_answer, found = pickle.loads(message[HEAD.size :])
        except Exception as error:  # noqa: BLE001  # the caller is told
            answer.set_exception(CallFailed(error))
            return
        if is_answer:
            answer.set_result(found)
        else:
            failed = CallFailed(RaisedInWorker(*found))
            failed.__cause__ = failed.error
            answer.set_exception(failed)

    def lost(self, why: str) -> None:
        self.why = self.why or why
        self.is_over = True
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(WorkerLost(self.why))


class Pool:
    """Workers, made as they are needed: up to the cores' number at once, then as calls wait."""

    def __init__(self, *, size: int = 64, memory_mib: int = 4096) -> None:
        """size: workers at most, and as many again for homes. memory_mib: what one may take beyond
        what its modules have; 0: as much as there is."""
        self._size = size
        self._max_bytes = memory_mib * 1024**2
        self._num_cores = os.cpu_count() or 1
        self._num_at_once = min(size, 2 * self._num_cores)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control: socket.socket | None = None
        self._finalizer: Any = None
        self._numbers = itertools.count(1)
        # By the number of their start.
        self._workers: dict[int, _Worker] = {}
        self._idle: list[_Worker] = []
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._growing: asyncio.TimerHandle | None = None
        self._num_starts_in_vain = 0
        # Whether the nursery has imported the modules and forked a worker.
        self._has_started = False
        # Calls, since the pool last looked whether it should grow.
        self._num_ended = 0
        self._nursery_preloads: dict[str, None] = {}
        self._path: list[str] = []
        # The event loop keeps only weak references to its tasks.
        self._dropping: set[asyncio.Future[None]] = set()
        self.faults: Counter[tuple[str, str, str]] = Counter()
        """Calls that did not end, by function, task, and what became of them."""
        self._reasons: dict[tuple[str, str], str] = {}
        """Of the first, by function and what became of it."""

    # What others call.

    async def call(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        about: str = "",
    ) -> Any:
        """Call a function by its name, such as my.py:score; a coroutine is awaited there.

        about: the user's function that target calls, for messages; it is imported first, which the
        limit does not include, nor the wait for a worker. Arguments and answer are pickled.
        Raises: CallTimedOut; CallFailed for what it raises (`RaisedInWorker`), and for a call that
        ends its process (`WorkerLost`). Cancelling ends the process, too.
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
        """Return a place for an episode's instances. is_loop: all that is called there are
        coroutines, which run beside those of other episodes.
        """
        self._attach()
        homes = [
            each
            for each in self._workers.values()
            if each.is_home and each.is_loop == is_loop and not each.is_over
        ]
        least = min(homes, key=lambda each: each.num_homes, default=None)
        num_free = 0 if len(homes) < self._num_at_once else EPISODES_PER_HOME - 1
        if least is None or (least.num_homes > num_free and len(homes) < self._size):
            least = self._start(is_home=True, is_loop=is_loop)
        least.num_homes += 1
        return Home(self, least)

    def kill(self, worker: _Worker, why: str) -> None:
        """End a worker's process and all that it has started."""
        worker.is_explained = True
        worker.lost(why)
        if worker in self._idle:
            self._idle.remove(worker)
        # Before it is known by its number, `_on_control` kills it.
        if worker.process and self._control is not None:
            self._tell({"kill": worker.process})

    def leave(self, worker: _Worker, keys: list[int]) -> None:
        """Have a worker let go of what an episode held there."""
        worker.num_homes -= 1
        if not worker.is_over and keys:
            dropping = asyncio.ensure_future(worker.send(_message(0, (None, keys, False))))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    @property
    def resident_bytes(self) -> list[int]:
        """What each worker has in memory, as far as it has been asked anything."""
        return [each.resident_bytes for each in self._workers.values() if each.resident_bytes]

    @property
    def lost_calls(self) -> tuple[LostCalls, ...]:
        """By function and end, in the order of the first."""
        counts: Counter[tuple[str, str]] = Counter()
        tasks: dict[tuple[str, str], list[str]] = {}
        for (function, task, what), count in self.faults.items():
            counts[function, what] += count
            if task:
                tasks.setdefault((function, what), []).append(task)
        return tuple(
            LostCalls(
                function=function,
                end=what,
                count=count,
                why=self._reasons[function, what],
                tasks=tuple(tasks.get((function, what), ())[:MAX_TASKS_NAMED]),
            )
            for (function, what), count in counts.items()
        )

    def count_on(self, other: Pool) -> None:
        """Add to what another pool has counted, in place of which this one is."""
        self.faults.update(other.faults)
        self._reasons.update(other._reasons)

    @property
    def is_outdated(self) -> bool:
        """Whether it does nothing, and other modules would be imported now than when it started."""
        is_idle = not any(each.answers or each.num_homes for each in self._workers.values())
        is_idle = is_idle and not self._waiting
        return is_idle and self._control is not None and self._path != _import_path()

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            self._unread(worker.end)
            worker.is_explained = True
            worker.lost("the pool was closed")
            worker.end.close()
        self._workers.clear()
        self._idle.clear()
        if self._control is not None:
            self._unread(self._control)
            self._finalizer()
            self._control = None

    # Calls.

    async def _ask(
        self,
        worker: _Worker,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        named: str,
        keeps: bool = False,
        number: int | None = None,
    ) -> Any:
        """Raises: CallTimedOut, CallFailed, WorkerLost."""
        is_done = False
        try:
            for name in (named, target):
                # One of the worker's own, or one that its nursery has imported.
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
            self._count(named, "killed", str(error))
            raise
        except WorkerLost as error:
            # Once, where several episodes have calls in it.
            if not worker.is_explained:
                worker.is_explained = True
                self._count(named, "died", str(error))
            raise
        finally:
            if not is_done and not worker.is_over:
                self.kill(worker, f"its process was ended with a call of {named}")

    async def _within(
        self,
        worker: _Worker,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        keeps: bool = False,
        number: int | None = None,
    ) -> Any:
        number = next(self._numbers) if number is None else number
        asking = worker.ask(number, target, arguments, keeps=keeps)
        try:
            async with asyncio.timeout(limit_s):
                return await asking
        except TimeoutError:
            raise CallTimedOut(f"no answer within {limit_s:.3g} s") from None

    async def ask_home(
        self,
        worker: _Worker,
        target: str,
        arguments: Mapping[str, Any],
        *,
        limit_s: float,
        named: str,
        keeps: bool,
    ) -> Any:
        """As `Home.call`."""
        number = next(self._numbers)
        if not worker.is_loop:
            async with worker.lock:
                found = await self._ask(
                    worker,
                    target,
                    arguments,
                    limit_s=limit_s,
                    named=named,
                    keeps=keeps,
                    number=number,
                )
            return number if keeps else found
        asking = asyncio.ensure_future(
            self._ask(
                worker,
                target,
                arguments,
                limit_s=limit_s + 2 * UNWIND_S,
                named=named,
                keeps=keeps,
                number=number,
            )
        )
        try:
            await asyncio.wait((asking,), timeout=limit_s)
            if not asking.done():
                await self._cancel(worker, number, asking)
                why = f"no answer within {limit_s:.3g} s"
                self._count(named, "cancelled", why)
                raise CallTimedOut(why)
        except asyncio.CancelledError:
            await self._cancel(worker, number, asking)
            raise
        found = asking.result()
        return number if keeps else found

    async def _cancel(self, worker: _Worker, number: int, asking: asyncio.Future[Any]) -> None:
        """Have a coroutine cancelled; end its process only if it does not let itself be."""
        if not worker.is_over:
            await worker.send(_message(number, (None, [], False)))
        await asyncio.wait((asking,), timeout=UNWIND_S)
        asking.cancel()
        await asyncio.wait((asking,))
        if not asking.cancelled():
            asking.exception()

    def _count(self, function: str, what: str, why: str) -> None:
        task = task_id.get()
        is_first = not any(each == function for each, _, _ in self.faults)
        if len(self.faults) >= MAX_COUNTED:
            task = ""
        self.faults[function, task, what] += 1
        self._reasons.setdefault((function, what), why)
        if is_first:
            _logger.warning(
                "%s: a call %s: %s (task %s); further ones are only counted",
                function,
                "ended its process" if what == "died" else "was ended at its limit",
                why,
                task or "unknown",
            )

    # Workers.

    async def _taken(self) -> _Worker:
        self._attach()
        if self._idle:
            return self._idle.pop()
        waiting: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
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

    def _give_back(self, worker: _Worker) -> None:
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
        """Start workers for the calls that wait."""
        if self._growing is not None:
            self._growing.cancel()
            self._growing = None
        waiting = [each for each in self._waiting if not each.done()]
        if not waiting:
            return
        workers = [each for each in self._workers.values() if not each.is_home]
        num_starting = sum(not each.process for each in workers)
        bound = self._num_at_once
        # At this rate, those that wait would wait for more than a second.
        is_slow = is_late and self._num_ended < len(waiting) * GROW_AFTER_S
        self._num_ended = 0 if is_late else self._num_ended
        if is_slow and not num_starting and self._num_running(workers) < self._num_cores:
            # Those that are there wait for something, and leave cores free.
            bound = min(self._size, max(bound, len(workers) + self._num_cores))
        for _ in range(min(len(waiting) - num_starting, bound - len(workers))):
            self._start(is_home=False, is_loop=False)
        self._growing = asyncio.get_running_loop().call_later(
            GROW_AFTER_S, lambda: self._grow(is_late=True)
        )

    def _num_running(self, workers: list[_Worker]) -> int:
        return sum(_state_of(each.process) == "R" for each in workers if each.process)

    def _start(self, *, is_home: bool, is_loop: bool) -> _Worker:
        self._attach()
        control = self._nursery()
        own, its = socket.socketpair()
        own.setblocking(False)
        worker = _Worker(next(self._numbers), own, is_home=is_home, is_loop=is_loop)
        worker.loaded |= self._nursery_preloads.keys()
        self._workers[worker.start] = worker
        told = json.dumps({"start": worker.start, "is_loop": is_loop}).encode()
        with its, suppress(ConnectionError):
            socket.send_fds(control, [told], [its.fileno()])
        assert self._loop is not None
        self._loop.add_reader(own, self._on_readable, worker)
        return worker

    def _on_readable(self, worker: _Worker) -> None:
        if not worker.read():
            self._unread(worker.end)
            # It has ended, which the nursery says with its status, or has closed its end.
            if worker.process and not worker.is_over:
                self._tell({"kill": worker.process})

    # The nursery.

    def _attach(self) -> None:
        """Read in the event loop that runs; calls that another one began have ended with it."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        for end in [each.end for each in self._workers.values()] + (
            [] if self._control is None else [self._control]
        ):
            self._unread(end)
        self._loop, self._growing = loop, None
        self._waiting.clear()
        if self._control is not None:
            loop.add_reader(self._control, self._on_control)
        for worker in list(self._workers.values()):
            loop.add_reader(worker.end, self._on_readable, worker)
            if worker not in self._idle and worker.process:
                self.kill(worker, "its event loop has ended")

    def _unread(self, end: socket.socket) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(end)

    def _nursery(self) -> socket.socket:
        if self._control is not None:
            return self._control
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-P", worker_process.__file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        # After a start in vain, the modules may be why: each worker imports them itself.
        self._nursery_preloads = {} if self._num_starts_in_vain else dict(_preloaded)
        self._path = _import_path()
        told = {
            "path": self._path,
            "preload": list(self._nursery_preloads),
            "max_bytes": self._max_bytes,
        }
        own.send(json.dumps(told).encode())
        self._control, self._has_started = own, False
        self._finalizer = weakref.finalize(self, _end_nursery, own, process)
        assert self._loop is not None
        self._loop.add_reader(own, self._on_control)
        self._loop.call_later(LOAD_LIMIT_S, self._check_start, own)
        return own

    def _check_start(self, control: socket.socket) -> None:
        """A module that does not end its import holds the nursery up."""
        if self._control is control and not self._has_started:
            self._nursery_ended()

    def _tell(self, told: dict[str, Any]) -> None:
        if self._control is not None:
            with suppress(ConnectionError):
                self._control.send(json.dumps(told).encode())

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            text = self._control.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            text = b""
        if not text:
            self._nursery_ended()
            return
        told = json.loads(text)
        if "started" in told:
            self._num_starts_in_vain, self._has_started = 0, True
            worker = self._workers[told["started"]]
            worker.process = told["process"]
            if worker.is_over:
                self._tell({"kill": worker.process})
            elif not worker.is_home:
                self._give_back(worker)
            return
        worker = next(each for each in self._workers.values() if each.process == told["ended"])
        self._drop(worker, f"its process {_how(told['status'])}")
        self._grow()

    def _drop(self, worker: _Worker, why: str) -> None:
        # What it answered before its end.
        while worker.answers and worker.read():
            pass
        self._unread(worker.end)
        worker.end.close()
        worker.lost(why)
        self._workers.pop(worker.start, None)
        if worker in self._idle:
            self._idle.remove(worker)

    def _nursery_ended(self) -> None:
        assert self._control is not None
        is_in_vain = not self._has_started
        self._unread(self._control)
        self._finalizer()
        self._control = None
        self._num_starts_in_vain += is_in_vain
        for worker in list(self._workers.values()):
            self._drop(worker, "its process ended with the one that it was forked from")
        if self._num_starts_in_vain >= MAX_STARTS_IN_VAIN:
            self._num_starts_in_vain = 0
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_exception(CallFailed(WorkerLost("no worker process starts")))
        self._grow()


class Home:
    """A place in a worker for one episode's instances, which end with that worker."""

    def __init__(self, pool: Pool, worker: _Worker) -> None:
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
        """As `Pool.call`, in the worker of this place, with `Held` arguments in place of what they
        refer to. keeps: leave the answer there and return a `Held`.

        Raises: also WorkerLost, for this call's end of the worker or one of another episode's.
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
        """Let go of what is held."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.leave(self._worker, self._held)


def _import_path() -> list[str]:
    return [str(Path(each).absolute()) for each in sys.path]


def _state_of(process: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _how(status: int) -> str:
    if status >= 0:
        return f"ended itself with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _end_nursery(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Its workers end with it."""
    control.close()
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_pools = threading.local()
_options: dict[str, int] = {}


def configure(*, size: int, memory_mib: int) -> None:
    """Set the options of the pools that this process makes from now on."""
    _options.update(size=size, memory_mib=memory_mib)


def pool() -> Pool:
    """Return this thread's pool, made when it is first asked for."""
    made: Pool | None = getattr(_pools, "own", None)
    if made is None or made.is_outdated:
        outdated, made = made, Pool(**_options)
        _pools.own = made
        if outdated is not None:
            outdated.close()
            made.count_on(outdated)
    return made


def report() -> tuple[tuple[LostCalls, ...], int]:
    """Return what this thread's pool has counted, and the bytes in memory of its largest worker; 0:
    no worker was asked anything."""
    made: Pool | None = getattr(_pools, "own", None)
    if made is None:
        return (), 0
    return made.lost_calls, max(made.resident_bytes, default=0)
