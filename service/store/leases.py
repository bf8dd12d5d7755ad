"""The lease of a run's database, which allows one supervisor at a time to write.

Each lease has a number, its term. Only the supervisor with the newest term may write. This module
finds out whether a term is the newest, and whether its owner is alive.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Connection, Row, select

from actors.trajectory_queue.messages import QueueSnapshot
from service.store import tables
from service.store.errors import LeaseLost, StoreError
from service.store.lineage import Checkpoint
from service.store.tables import RunKind

RENEW_EVERY_S = 3.0
# Seconds without a renewal after which an owner on another machine counts as dead.
TOLERANCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write to a run's database, and the state from which the run continues.

    A lease is valid until the next lease, which has a higher term, is acquired.
    """

    term: int
    parent: Checkpoint | None
    """The checkpoint from which this term continues; None if it starts without a checkpoint."""
    queue_snapshot: QueueSnapshot | None
    """The queue's state at the parent checkpoint; None without a parent."""
    curriculum: Mapping[str, tuple[float, ...]] | None = None
    """Shares of passed samples in the newest groups at the parent checkpoint, by task or by
    environment; None without a parent or a curriculum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """A supervisor that is alive and has the newest lease."""

    name: str
    """HOST:PID of the supervisor."""
    term: int
    acquired_at: float
    """Seconds since 1970, by the owner's clock."""
    silent_s: float
    """Seconds since the owner last renewed its lease, by the database's clock."""

    def __str__(self) -> str:
        return f"{self.name} (term {self.term}, since {_utc(self.acquired_at)})"


def check_kind(stored: RunKind | None, asked: RunKind) -> None:
    """Check that the command that resumes a run is the command that began the run.

    Args: stored: the command that began the run; None if the run is new. asked: the command that
    now starts or resumes the run.
    Raises: StoreError if the two commands differ.
    """
    if stored is not None and stored is not asked:
        raise StoreError(
            f"the run was begun by `rayloom {stored.value}`, got `rayloom {asked.value}`; expected "
            "the same command, because all steps of a run use either the configuration's tasks or "
            f"submitted ones: resume with `rayloom {stored.value} --resume`, or start a new run"
        )


def newest_lease(connection: Connection) -> Row[Any] | None:
    leases = tables.leases
    return connection.execute(select(leases).order_by(leases.c.term.desc()).limit(1)).first()


def check_term(connection: Connection, term: int) -> None:
    """Check that `term` is the newest term. Raises: LeaseLost."""
    newest = newest_lease(connection)
    if newest is None or newest.term != term:
        raise lost(term, newest)


def lost(term: int, newest: Row[Any] | None) -> LeaseLost:
    if newest is None:
        return LeaseLost(
            f"this supervisor had term {term} of the run, but the run's database has no term: it "
            "was replaced meanwhile"
        )
    return LeaseLost(
        f"taken over by {newest.owner} (term {newest.term}, since {_utc(newest.acquired_at)}); "
        f"this supervisor had term {term} of the run and stops without writing"
    )


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def own_name() -> str:
    """Return the name by which a lease identifies this process: HOST:PID."""
    return f"{socket.gethostname()}:{os.getpid()}"


def process_of(owner: str) -> str:
    """Return a text that identifies a process, even if another process gets the same PID later.

    The text contains the machine and the time of the process's start. On Linux this time is counted
    from the machine's boot, so a change of the clock has no effect on it.

    owner: HOST:PID. Returns: an empty text if no such process runs on this machine.
    """
    host, _, pid = owner.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit() or not _is_running(int(pid)):
        return ""
    return f"{_machine()} {_started(int(pid))}"


def is_alive_here(owner: str, process: str) -> bool | None:
    """Return whether the owner's process is alive; None if this machine cannot find out.

    process: the text that `process_of` returned when the owner acquired the lease.
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
    """Return a text that differs between machines, boots of a machine, and containers.

    Two processes that have the same text and the same PID never run at the same time.
    """
    if not sys.platform.startswith("linux"):
        return f"boot-{psutil.boot_time():.0f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    if not sys.platform.startswith("linux"):
        return f"{psutil.Process(pid).create_time():.2f}"
    # The process's start, in ticks since the boot. The program's name, which comes before the start
    # in parentheses, may contain spaces and parentheses itself.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
