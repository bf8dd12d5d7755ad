"""Start, call and kill the processes that the tools run in.

Each server process belongs to one thread, which waits for its answers, so that no event loop is
blocked. Invariant: no call waits for an answer longer than its limit. A server that answers too
late or ends during a call is killed with its process group, and the next call starts another
server. A server also dies when its thread or the process that started it ends for any reason.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[4]
_PACKAGE = "actors.environment.plugins"
_START_LIMIT_S = 20.0
_MAX_ANSWER_BYTES = 2**22
# A server that has used this many CPU seconds is replaced between two calls.
_RETIRES_AFTER_CPU_S = 60


class ServerFailed(Exception):
    """Raised if a server cannot be started, or does not work, on this machine."""


class NoAnswer(Exception):
    """Raised if a call exceeds a limit of time, memory or size, or ends its server."""


def start_program(
    name: str, arguments: Sequence[str] = (), *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a program without environment variables or site packages, in its own process group.

    Args: name: the program's module below `actors.environment.plugins`, such as code_search.server.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
        f"from {_PACKAGE}.{name} import main; main(*sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", code, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its process group, and wait for the program's end."""
    signal_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def read_line(process: subprocess.Popen[bytes], *, limit_s: float) -> dict[str, Any]:
    """Return the next JSON line of a program's output.

    Raises: NoAnswer if the program ends, or does not write a line within `limit_s`.
    """
    assert process.stdout is not None
    end = time.monotonic() + limit_s
    data = b""
    descriptor = process.stdout.fileno()
    while not data.endswith(b"\n"):
        left = end - time.monotonic()
        # Not select.select, which refuses descriptors above 1023.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if left <= 0 or not poll.poll(left * 1000):
            raise NoAnswer(f"the program gave no answer within {limit_s:g} s")
        chunk = os.read(descriptor, 2**16)
        data += chunk
        if not chunk or len(data) > _MAX_ANSWER_BYTES:
            raise NoAnswer("the program ended" if not chunk else "the answer is too long")
    answer: dict[str, Any] = json.loads(data)
    return answer


class _Server:
    """The process of one server, which only one thread uses."""

    def __init__(self, program: str) -> None:
        self._name = program.partition(".")[0]
        self.process = start_program(program, stdin=subprocess.PIPE)
        try:
            self.walls = self._read(limit_s=_START_LIMIT_S)["walls"]
        except NoAnswer as error:
            kill(self.process)
            raise ServerFailed(
                f"{self._name}: the tools' process does not start: {error}"
            ) from None
        except ServerFailed:
            kill(self.process)
            raise

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        data = json.dumps(request).encode() + b"\n"
        try:
            # Between two calls a server reads its input, so this write does not block for long.
            while data:
                data = data[os.write(self.process.stdin.fileno(), data) :]
        except OSError:
            raise NoAnswer("the tools' process ended before the call; repeat it") from None
        return self._read(limit_s=limit_s)

    def _read(self, *, limit_s: float) -> dict[str, Any]:
        answer = read_line(self.process, limit_s=limit_s)
        if "failure" in answer:
            raise ServerFailed(f"{self._name}: the tools' process: {answer['failure']}")
        return answer


class ServerThreads:
    """A server for each thread of a pool; any thread may end them all."""

    def __init__(self, program: str) -> None:
        """Prepare the servers; each starts at its thread's first request.

        Args: program: the server's module, such as code_search.server. Each of the server's
        answers must have the field `cpu_s`, the CPU time that the server has used.
        """
        self._program = program
        self._own = threading.local()
        self._lock = threading.Lock()
        self._idle: set[_Server] = set()
        self._busy: set[_Server] = set()
        self._is_closed = False

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Send a request to this thread's server. Raises: NoAnswer, ServerFailed."""
        server = self._take()
        is_usable = False
        try:
            answer = server.ask(request, limit_s=limit_s)
            is_usable = answer["cpu_s"] < _RETIRES_AFTER_CPU_S
            return answer
        finally:
            self._give_back(server, is_usable=is_usable)

    def close(self) -> None:
        """Kill every server; a call in another thread ends with NoAnswer."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, set()
            for server in self._busy:
                # The server's thread, which reads its output, then drops the server.
                signal_group(server.process)
            busy = list(self._busy)
        for server in idle:
            kill(server.process)
        for server in busy:
            server.process.wait()

    def pids(self) -> list[int]:
        with self._lock:
            return [server.process.pid for server in (*self._idle, *self._busy)]

    def _take(self) -> _Server:
        own: _Server | None = getattr(self._own, "server", None)
        if own is not None and own.process.poll() is not None:
            self._drop(own)
            own = None
        if own is None:
            own = self._own.server = _Server(self._program)
        with self._lock:
            self._idle.discard(own)
            if not self._is_closed:
                self._busy.add(own)
                return own
        kill(own.process)
        raise NoAnswer("the tools are closed")

    def _give_back(self, server: _Server, *, is_usable: bool) -> None:
        with self._lock:
            self._busy.discard(server)
            if is_usable and not self._is_closed:
                self._idle.add(server)
                return
        self._drop(server)

    def _drop(self, server: _Server) -> None:
        self._own.server = None
        with self._lock:
            self._idle.discard(server)
        kill(server.process)


def signal_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its process group; return at once.

    The thread that reads the program's output waits for the program's end.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
