"""The fork server, a process that imports a user's modules, and the workers that it forks.

    python -P worker_process.py FD

The fork server imports the modules of the users' functions once, and forks workers on request. It
has one thread and no event loop, and only starts, kills and reaps workers. A worker calls functions
in its main thread, so that signals work, and leads a process group of its own. The pool's process
imports only constants from here; its handles of these processes are in `fork_server`.

No process remains. Each ends with its parent (PR_SET_PDEATHSIG), and the fork server also ends when
its socket FD closes. The fork server adopts and kills the processes that an ended worker leaves. No
file remains: the sockets have no names. The code needs Linux.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import io
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# linux/prctl.h
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
LENGTH = struct.Struct("<Q")
"""Format of the prefix of each message between a worker and its caller: the message's size in
bytes."""
HEAD = struct.Struct("<QQ")
"""Format of the head of each message: the number of the call, and the worker's resident memory in
bytes (0 in a message to the worker)."""
MAX_ANSWER_BYTES = 64 * 1024**2
MAX_CONTROL_BYTES = 128 * 1024
MAX_TRACE_CHARS = 4000
END_LIMIT_S = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(control_fd: int) -> None:
    """Run the fork server: fork workers on request, until the socket closes."""
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    die_with(parent, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = json.loads(control.recv(MAX_CONTROL_BYTES) or b"{}")
    sys.path[:] = options.get("path", sys.path)
    for name in options.get("preload", ()):
        # If the import fails, a call of the function will report why.
        with suppress(Exception, SystemExit):
            import_name(name)
    if threading.active_count() > 1:
        # A forked worker would lack these threads, and could wait for their locks forever. If the
        # fork server ends before it forks a worker, later workers import the modules themselves.
        os._exit(0)
    gc.collect()
    gc.freeze()
    server = _ForkServer(control, woken, max_bytes=options.get("max_bytes", 0))
    with suppress(_Ended):
        signal.signal(signal.SIGTERM, _end)
        server.run()
        # The socket may close just before the signal arrives.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.end()
    os._exit(0)


class _Ended(Exception):
    """Raised if the process that started the fork server has ended, or has sent SIGTERM."""


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


class _ForkServer:
    def __init__(self, control: socket.socket, woken: int, *, max_bytes: int) -> None:
        self._control = control
        self._woken = woken
        self._max_bytes = max_bytes
        self._workers: set[int] = set()
        # The processes that the modules started while they were imported.
        self._own = _children()

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = {end for end, _ in poller.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready:
                try:
                    text, fds, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
                except ConnectionError:
                    return
                if not text:
                    return
                request = json.loads(text)
                if fds:
                    self._start(request, fds[0])
                elif request["kill"] in self._workers:
                    _kill_group(request["kill"])

    def end(self) -> None:
        """Kill every process that this process or a worker has started."""
        for worker in self._workers:
            _kill_group(worker)
        end = time.monotonic() + END_LIMIT_S
        while (below := _children()) and time.monotonic() < end:
            for process in below:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.002)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _start(self, request: dict[str, Any], end: int) -> None:
        process = os.fork()
        if process == 0:
            server = os.getppid()
            os.close(self._woken)
            os.close(signal.set_wakeup_fd(-1))
            self._control.close()
            _become_worker(end, server, max_bytes=self._max_bytes, is_loop=request["is_loop"])
        os.close(end)
        self._workers.add(process)
        self._report({"started": request["start"], "process": process})

    def _reap(self) -> None:
        while True:
            try:
                # The group can be killed only before the process is reaped and its id is free.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            process = ended.si_pid
            if process in self._workers:
                _kill_group(process)
            _, status = os.waitpid(process, 0)
            is_worker = process in self._workers
            self._workers.discard(process)
            self._end_orphans()
            if is_worker:
                self._report({"ended": process, "status": os.waitstatus_to_exitcode(status)})

    def _end_orphans(self) -> None:
        """Kill the processes that ended workers have left behind."""
        for process, group in _children().items():
            if process in self._own or group in self._workers or process in self._workers:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)

    def _report(self, event: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(event).encode())
        except OSError:
            os._exit(0)


def _become_worker(end: int, server: int, *, max_bytes: int, is_loop: bool) -> None:
    """Turn this process, which was just forked, into a worker, and never return.

    end: the worker's socket; the worker ends when it closes. server: process id of the fork server.
    """
    die_with(server, signal.SIGKILL)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_bytes:
        limit = _status_bytes("VmData") + max_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    worker = _Worker(socket.socket(fileno=end))
    try:
        worker.run_loop() if is_loop else worker.run()
    finally:
        os._exit(0)


class _Worker:
    """A worker, which calls functions one after the other or as tasks of one event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._found: dict[str, Callable[..., Any]] = {}
        # Values that later calls use, such as an episode's instances, by the number of the call.
        self._held: dict[int, Any] = {}

    def run(self) -> None:
        with asyncio.Runner() as runner:
            while (message := self._receive()) is not None:
                if (call := self._begun(message)) is not None:
                    self._answer(call, runner.run)

    def run_loop(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        reader, _ = await asyncio.open_unix_connection(sock=self._end.dup())
        tasks: dict[int, asyncio.Task[None]] = {}
        while True:
            try:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                message = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if (call := self._begun(message)) is None:
                if (task := tasks.get(HEAD.unpack_from(message)[0])) is not None:
                    task.cancel()
                continue
            number = call[0]
            tasks[number] = asyncio.create_task(self._answer_in_loop(call))
            tasks[number].add_done_callback(partial(_forget, tasks, number))

    def _begun(self, message: bytes) -> tuple[Any, ...] | None:
        """Read a message from the pool, and return the call in it; None if there is no call.

        Returns: the call's number, the function's name, the arguments, and whether to keep the
        answer. None also if the arguments cannot be read; the pool then gets the error.
        """
        number, _ = HEAD.unpack_from(message)
        try:
            target, arguments, keeps = _Unpickler(
                io.BytesIO(message[HEAD.size :]), self._held
            ).load()
        except Exception as error:  # noqa: BLE001  # the caller gets it
            self._send(number, False, _error_texts(error))
            return None
        # Without a target, the message only drops kept values or cancels a call.
        if target is not None:
            return number, target, arguments, keeps
        for key in arguments:
            self._held.pop(key, None)
        return None

    def _answer(
        self, call: tuple[Any, ...], run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        number, target, arguments, keeps = call
        try:
            found = self._function(target)(**arguments)
            if asyncio.iscoroutine(found):
                found = run(found)
            elif hasattr(found, "__await__"):
                found = run(_awaited(found))
            self._give(number, found, keeps=keeps)
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            self._send(number, False, _error_texts(error))
        finally:
            # An alarm that this call has set would interrupt the next one.
            signal.setitimer(signal.ITIMER_REAL, 0)

    async def _answer_in_loop(self, call: tuple[Any, ...]) -> None:
        number, target, arguments, keeps = call
        try:
            found = self._function(target)(**arguments)
            if hasattr(found, "__await__"):
                found = await found
            self._give(number, found, keeps=keeps)
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            self._send(number, False, _error_texts(error))

    def _function(self, target: str) -> Callable[..., Any]:
        if target not in self._found:
            self._found[target] = _find(target)
        return self._found[target]

    def _give(self, number: int, found: Any, *, keeps: bool) -> None:
        if keeps:
            self._held[number] = found
            found = None
        self._send(number, True, found)

    def _send(self, number: int, is_answer: bool, found: Any) -> None:
        message = HEAD.pack(number, _resident_bytes()) + pickle.dumps((is_answer, found))
        if len(message) > MAX_ANSWER_BYTES:
            raise ValueError(
                f"its answer has {len(message)} bytes, expected {MAX_ANSWER_BYTES} or fewer"
            )
        self._end.setblocking(True)
        self._end.sendall(LENGTH.pack(len(message)) + message)

    def _receive(self) -> bytes | None:
        head = self._received(LENGTH.size)
        return None if head is None else self._received(LENGTH.unpack(head)[0])

    def _received(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            part = self._end.recv(min(size - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del tasks[number]


class _Unpickler(pickle.Unpickler):
    """Unpickles a call, and replaces each reference (`workers.Held`) by a kept answer."""

    def __init__(self, file: io.BytesIO, held: dict[int, Any]) -> None:
        super().__init__(file)
        self._held = held

    def persistent_load(self, key: int) -> Any:
        # The key is the number of the earlier call that gave the answer.
        return self._held[key]


async def _awaited(found: Any) -> Any:
    return await found


def import_name(name: str) -> None:
    """Import the module of a function. The pool calls this before the function's first call."""
    from actors.environment.user_names import module_of

    importlib.import_module(module_of(name, what="function"))


def call_method(instance: Any, method: str, arguments: dict[str, Any]) -> Any:
    """Call a method of an instance that the worker keeps, and return its result."""
    return getattr(instance, method)(**arguments)


def _find(name: str) -> Any:
    if (own := _OWN.get(name)) is not None:
        return own
    from actors.environment.user_names import find

    return find(name, what="function")


_OWN = {f"worker:{each.__name__}": each for each in (import_name, call_method)}


def _error_texts(error: BaseException) -> tuple[str, str, str, str]:
    """Return an error's type, text, location and traceback, as not every error can be pickled."""
    text = "its text cannot be read"
    with suppress(Exception, SystemExit):
        text = str(error).encode(errors="replace").decode()
    # The frames of this file are not the user's code.
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    trace = "".join(traceback.format_list(frames))[-MAX_TRACE_CHARS:]
    return type(error).__name__, text, where, trace.encode(errors="replace").decode()


def _resident_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def die_with(parent: int, number: signal.Signals) -> None:
    """Make the kernel send this process a signal when its parent ends.

    parent: process id of the parent. number: the signal.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _kill_group(leader: int) -> None:
    for kill in (os.killpg, os.kill):
        # A worker that was just forked has no group yet.
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _children() -> dict[int, int]:
    """Return the children of this process, zombies included: process id -> process group."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                text = (entry / "stat").read_text(errors="replace")
                # PID (NAME) STATE PARENT …; a name may contain spaces and parentheses.
                _, parent, group = text.rpartition(")")[2].split()[:3]
                if int(parent) == os.getpid():
                    found[int(entry.name)] = int(group)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
