"""The process that owns a lease: its name, and whether it is alive on this machine."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil


def own_name() -> str:
    """Return the name of this process in its lease, HOST:PID."""
    return f"{socket.gethostname()}:{os.getpid()}"


def process_of(owner: str) -> str:
    """Return a text that identifies the owner's process, even among processes with the same PID.

    The text does not depend on a clock that can be set. It is empty if no such process runs on this
    machine.
    """
    host, _, pid = owner.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit() or not _is_running(int(pid)):
        return ""
    return f"{_machine()} {_started(int(pid))}"


def is_alive_here(owner: str, process: str) -> bool | None:
    """Return whether the owner's process is alive; None if this machine cannot find out.

    process: the text of `process_of` when the lease was acquired.
    """
    host, _, pid = owner.rpartition(":")
    if not pid.isdigit():
        # A name without a PID is not the name of a process.
        return False
    if host != socket.gethostname() or not process.startswith(f"{_machine()} "):
        return None
    return process_of(owner) == process


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _machine() -> str:
    """Return a name of the scope in which PIDs are unique: a kernel's boot and a container."""
    if not sys.platform.startswith("linux"):
        return f"boot-{psutil.boot_time():.0f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    if not sys.platform.startswith("linux"):
        return f"{psutil.Process(pid).create_time():.2f}"
    # In ticks since the boot; the name before it may contain spaces and parentheses.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
