"""Run a server for another process, and end all processes of the server when one of the two ends.

    python -I -S server_keeper.py PID COMMAND...

COMMAND starts the server. PID is the id of the process that starts this program and uses the server
(`mcp_servers`), called the user here. Launchers such as npx, uvx or `sh -c` start other processes,
which would outlive the server and the user. Therefore the program consists of two processes:
- The first process is the user's child. It starts the second, and passes signals on to it.
- The second process, the keeper, starts the server, and adopts the server's orphaned descendants.
  It ends all of them when the server, the first process or the user has ended. It is not the
  user's child, because Ray kills the children of a worker that it ends.

Only the server has the standard input and output. The program imports only the standard library, so
that it costs little. It needs Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 1.0
"""Seconds that a server has to end after SIGTERM."""
KILL_LIMIT_S = 2.0
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# linux/prctl.h
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def main(user: int, command: Sequence[str]) -> int:
    """Run the command, and return its exit status, as a shell reports it."""
    try:
        watched = [os.pidfd_open(user), os.pidfd_open(os.getpid())]
    except ProcessLookupError:
        return 1
    if os.getppid() != user:
        # The user ended before it was watched.
        return 1
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        os._exit(_keep(command, watched))
    _release_pipes()
    for number in _END_SIGNALS:
        signal.signal(number, lambda number, _: os.kill(keeper, number))
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) & 0xFF


def _keep(command: Sequence[str], watched: Sequence[int]) -> int:
    """Run the server until it or a watched process ends, or a signal arrives; then kill the rest.

    watched: pidfds of processes. Returns: the server's exit status, as a shell reports it.
    """
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_END_SIGNALS):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # The server gets SIGKILL if the keeper itself is killed.
        server = subprocess.Popen(
            command, preexec_fn=lambda: libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    _release_pipes()
    status = _wait(server.pid, watched=watched, woken=woken)
    _end_all()
    return 128 + signal.SIGKILL if status is None else status


def _release_pipes() -> None:
    """Replace standard input and output by /dev/null, so that only the server holds the pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)


def _wait(server: int, *, watched: Sequence[int], woken: int) -> int | None:
    """Wait until the server or a watched process ends, or until GRACE_S after a signal to end.

    watched: pidfds of processes. woken: a pipe to which each signal that arrives is written.
    Returns: the server's exit status; None if the server still runs.
    """
    poller = select.poll()
    for end in (*watched, woken):
        poller.register(end, select.POLLIN)
    until: float | None = None
    while until is None or time.monotonic() < until:
        left_ms = None if until is None else 1000 * max(until - time.monotonic(), 0)
        ready = {end for end, _ in poller.poll(left_ms)}
        if ready.intersection(watched):
            return None
        numbers = os.read(woken, 4096) if woken in ready else b""
        if (status := _reaped().get(server)) is not None:
            return status
        if until is None and set(numbers) - {signal.SIGCHLD}:
            os.kill(server, signal.SIGTERM)
            until = time.monotonic() + GRACE_S
    return None


def _reaped() -> dict[int, int]:
    found: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        code = os.waitstatus_to_exitcode(status)
        found[process] = code if code >= 0 else 128 - code


def _end_all() -> None:
    end = time.monotonic() + KILL_LIMIT_S
    while (below := _descendants()) and time.monotonic() < end:
        for process in below:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.005)
        _reaped()


def _descendants() -> list[int]:
    """Return the ids of this process's descendants, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # PID (NAME) STATE PARENT …; a name may contain spaces and parentheses.
                parent = int(
                    (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                )
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
