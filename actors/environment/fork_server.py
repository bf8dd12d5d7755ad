"""Start and control a fork server, the process that forks the workers of a pool.

The process that owns the pool uses this module; the fork server itself runs `worker_process`.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from actors.environment import worker_process

preloaded: dict[str, None] = {}
"""The functions whose modules a fork server imports before it forks workers."""


def preload(name: str) -> None:
    """Register a function's module for import before workers are forked.

    If a pool has already started, each of its workers imports the module on its first call.
    """
    preloaded[name] = None


class ForkServer:
    """A running fork server: it imports the modules of users' functions and forks the workers."""

    def __init__(self, preloads: Iterable[str], *, max_bytes: int) -> None:
        """Start the fork server's process.

        Args:
            preloads: The functions whose modules the process imports before it forks a worker.
            max_bytes: Memory in bytes that a worker may use beyond that of the imported modules; 0
                means no limit.
        """
        self.control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-P", worker_process.__file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.preloads = dict.fromkeys(preloads).keys()
        self._path = _import_path()
        self.has_forked = False
        """Whether the fork server has imported the modules and forked its first worker."""
        options = {"path": self._path, "preload": list(self.preloads), "max_bytes": max_bytes}
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
            number: A number by which the reports of the fork server name the worker.
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
