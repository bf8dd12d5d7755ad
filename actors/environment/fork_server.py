"""The pool's interface to its fork server and to the workers that the fork server forks.

This module runs in the pool's process, where a `ForkServerHandle` represents the fork server, and a
`WorkerHandle` represents each worker. The fork server and the workers are processes of their own,
which run `worker_process`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.environment import worker_process
from actors.environment.worker_process import HEAD, LENGTH
from actors.user_code import CallFailed, RaisedInWorker

preloaded: dict[str, None] = {}
"""The functions whose modules a fork server imports before it forks workers."""


def preload(name: str) -> None:
    """Register a function, so that fork servers import its module before they fork workers.

    If a fork server is already running, each of its workers imports the module when the worker
    first calls the function.
    """
    preloaded[name] = None


class ForkServerHandle:
    """A running fork server, which imports users' modules and forks the workers."""

    def __init__(self, *, preloads: bool, max_bytes: int) -> None:
        """Start the fork server's process.

        Args:
            preloads: Whether the process imports the modules of `preload` before it forks a worker.
            max_bytes: Memory in bytes that a worker may use in addition to the memory of the
                imported modules; 0 means no limit.
        """
        self.control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-P", worker_process.__file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        names = list(preloaded) if preloads else []
        self.loaded = frozenset(names)
        """The functions whose modules the process imports."""
        self._path = _import_path()
        self.has_forked = False
        """Whether the fork server has imported the modules and forked its first worker."""
        options = {"path": self._path, "preload": names, "max_bytes": max_bytes}
        self.control.send(json.dumps(options).encode())
        self.end = weakref.finalize(self, _end, self.control, process)
        """A function that ends the fork server and all workers; Python also calls it when this
        process ends."""

    @property
    def is_outdated(self) -> bool:
        """Whether this process's import path has changed since the fork server started."""
        return self._path != _import_path()

    def fork(self, number: int, *, is_loop: bool) -> socket.socket:
        """Fork a worker, and return this process's end of the worker's socket.

        Args:
            number: A number for the worker, which the fork server's reports repeat.
            is_loop: Whether the worker runs coroutines of several episodes concurrently.
        """
        own, its = socket.socketpair()
        own.setblocking(False)
        request = json.dumps({"start": number, "is_loop": is_loop}).encode()
        with its, suppress(ConnectionError):
            socket.send_fds(self.control, [request], [its.fileno()])
        return own

    def kill(self, process: int) -> None:
        """Kill the worker with this process id, and every process that the worker has started."""
        with suppress(ConnectionError):
            self.control.send(json.dumps({"kill": process}).encode())

    def read(self) -> dict[str, int] | None:
        """Return the fork server's next report that a worker started or ended, without waiting.

        Returns: None if the fork server has ended.
        Raises: BlockingIOError if there is no report yet.
        """
        try:
            text = self.control.recv(worker_process.MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
        except ConnectionError:
            return None
        return json.loads(text) if text else None


def _import_path() -> list[str]:
    return [str(Path(each).absolute()) for each in sys.path]


def how_ended(status: int) -> str:
    """Return a clause that says how a process ended, such as `was ended by SIGKILL`."""
    if status >= 0:
        return f"ended itself with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the fork server, and with it all workers."""
    control.close()
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerLost(Exception):
    """Raised if the process that ran a call, or that held an episode's instances, has ended."""


class WorkerHandle:
    """The pool's record of one worker process: its socket, its calls and its state.

    The pool changes the fields, except `answers`, `resident_bytes`, `why` and `is_over`, which the
    handle changes itself.
    """

    def __init__(self, number: int, end: socket.socket, *, is_home: bool, is_loop: bool) -> None:
        """Record a worker that is being forked.

        Args:
            number: The number for the worker that was given to `ForkServerHandle.fork`.
            end: This process's end of the socket between this process and the worker.
            is_home: Whether the worker keeps instances for episodes (`workers.Home`); otherwise it
                runs single calls.
            is_loop: Whether the worker runs the coroutines of several episodes concurrently.
        """
        self.number = number
        self.is_home = is_home
        self.is_loop = is_loop
        self.process = 0
        """Id of the worker's process; 0 until the process has started."""
        self.loaded: set[str] = set()
        """The names of the functions whose modules the worker has imported."""
        self.answers: dict[int, asyncio.Future[Any]] = {}
        """Futures of the answers that callers wait for, by the number of the call."""
        self.lock = asyncio.Lock()
        """A lock with which a worker that keeps instances runs one call at a time; unused if its
        functions are coroutines."""
        self._sending = asyncio.Lock()
        self.num_homes = 0
        self.resident_bytes = 0
        """The worker's resident memory in bytes at its last answer; 0 before the first answer."""
        self.why = ""
        """Why the worker has ended; empty while the worker runs."""
        self.is_over = False
        self.is_explained = False
        """Whether the pool ended the process itself, or has already counted the process's end."""
        self.socket = end
        # This also closes the socket when this process ends.
        weakref.finalize(self, end.close)
        self._read = bytearray()

    @property
    def is_running(self) -> bool:
        """Whether the process uses a core or waits for one, and does not sleep."""
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "R"
        return False

    async def ask(self, number: int, message: bytes) -> Any:
        """Send the message of a call to the worker, and return the answer.

        Raises: CallFailed if the call raises; WorkerLost if the worker ends before it answers.
        """
        answer = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        try:
            await self.send(message)
            return await answer
        finally:
            self.answers.pop(number, None)

    async def send(self, message: bytes) -> None:
        # An error means that the process has ended, which the fork server reports.
        async with self._sending:
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self.socket, message)

    def read(self) -> bool:
        """Read what the worker has sent, and deliver its answers.

        Returns: whether the worker's end of the socket is still open.
        """
        try:
            part = self.socket.recv(1 << 18)
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
        except Exception as error:  # noqa: BLE001  # the caller gets it
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
