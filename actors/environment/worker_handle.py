"""A pool's handle of one of its worker processes: its socket, its calls and its state."""

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
    """The process that ran a call, or that held an episode's instances, has ended."""


class WorkerHandle:
    """The pool's record of one worker process: its socket, its calls and its state."""

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
        # Whether the pool ended the process itself, or has counted its end already.
        self.is_explained = False
        self.end = end
        # This also closes the socket when this process ends.
        weakref.finalize(self, end.close)
        self._read = bytearray()

    @property
    def is_running(self) -> bool:
        """Whether the process runs or waits for a core; False if it has not started yet."""
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "R"
        return False

    async def ask(self, number: int, message: bytes) -> Any:
        """Send the message of a call to the worker and return its answer.

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
                await asyncio.get_running_loop().sock_sendall(self.end, message)

    def read(self) -> bool:
        """Read what the worker has sent and deliver its answers.

        Returns: whether the worker's end of the socket is still open.
        """
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
