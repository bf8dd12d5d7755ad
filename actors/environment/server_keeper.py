"""Runs a server, and ends all that it has started when it ends, or when whoever wanted it has.

    python -I -S server_keeper.py PID COMMAND...

PID is of the process that starts this one. A server may start others (a launcher such as npx, uvx
or `sh -c` does), and those outlive it and its user where nobody ends them. So two processes stand
between: the first, whom the user knows, passes signals on; the second, the keeper, becomes the
parent of all below it that lose theirs, so that none is out of its reach, and ends them when the
server, the first process or the user has ended. It is not the user's child, because Ray kills the
children of a worker that it ends. Standard input and output are the server's alone. Started by
`mcp_servers`; needs Linux, and nothing but Python's own library, because one is started for each
server.
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
"""For a server that is told to end."""
KILL_LIMIT_S = 2.0
_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# linux/prctl.h
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def main(user: int, command: Sequence[str]) -> int:
    """Run the command. Returns: its exit status, as a shell tells it."""
    try:
        watched = [os.pidfd_open(user), os.pidfd_open(os.getpid())]
    except ProcessLookupError:
        return 1
    if os.getppid() != user:
        # It was gone before it was watched.
        return 1
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        os._exit(_keep(command, watched))
    _let_go_of_the_pipes()
    for number in _TOLD_TO_END:
        signal.signal(number, lambda number, _: os.kill(keeper, number))
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) & 0xFF


def _keep(command: Sequence[str], watched: Sequence[int]) -> int:
    """Start the server and end it. watched: file descriptors of processes that it ends with."""
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_TOLD_TO_END):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # So that no server is left where the keeper itself is killed.
        server = subprocess.Popen(
            command, preexec_fn=lambda: libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    _let_go_of_the_pipes()
    status = _wait(server.pid, watched=watched, woken=woken)
    _end_all()
    return 128 + signal.SIGKILL if status is None else status


def _let_go_of_the_pipes() -> None:
    """The server's user sees at once that the server has closed its ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)


def _wait(server: int, *, watched: Sequence[int], woken: int) -> int | None:
    """Until the server ends (gives its status), a watched process does, or a signal says so."""
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
    """Status by process, of those that have ended."""
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
    """Kill whatever is below this process, until nothing is."""
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
    """Of this process, zombies too."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # PID (NAME) STATE PARENT …, and a name may hold spaces and parentheses.
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
