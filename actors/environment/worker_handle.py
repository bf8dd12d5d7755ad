"""A pool's record of one of its worker processes, with its socket, its calls and its state."""

from __future__ import annotations

import asyncio
import pickle
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.environment.worker_process import HEAD, LENGTH
from actors.user_code import CallFailed, RaisedInWorker


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
            number: The number of the request with which the fork server forks the worker.
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
