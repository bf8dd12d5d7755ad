"""Signs of life of who holds a run, by which a live holder is told from a dead one.

The newest epoch's holder renews its row every few seconds and takes it away when its run ends. On
the holder's own machine its process is asked as well, so that one that was killed is gone at once.
A run without a row (one of an older layout too) is held by nobody.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import psutil
from sqlalchemy import delete, insert, select

from service.store import tables
from service.store.run_store import RunStore

RENEW_EVERY_S = 3.0
# Also what the clocks of two machines may differ by.
TOLERANCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """name: HOST:PID of the supervisor. Times: seconds since 1970."""

    name: str
    acquired_at: float
    renewed_at: float


def own_name() -> str:
    """This process, as the lease names it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def renew(store: RunStore, *, epoch: int) -> None:
    """Show that the holder of `epoch` is alive. Raises: LeaseLost, StoreError."""
    table = tables.presence
    with store.fenced(epoch) as connection:
        connection.execute(delete(table).where(table.c.epoch == epoch))
        connection.execute(insert(table).values(epoch=epoch, renewed_at=time.time()))


def release(store: RunStore, *, epoch: int) -> None:
    """Hold the run no longer. Raises: LeaseLost, StoreError."""
    with store.fenced(epoch) as connection:
        connection.execute(delete(tables.presence).where(tables.presence.c.epoch == epoch))


def live_holder(store: RunStore, *, now: float) -> Holder | None:
    """Who holds the run now; None for nobody. now: seconds since 1970."""
    leases, presence = tables.leases, tables.presence
    query = select(leases.c.holder, leases.c.acquired_at, presence.c.renewed_at)
    query = query.join(presence, presence.c.epoch == leases.c.epoch)
    with store.reading() as connection:
        row = connection.execute(query.where(leases.c.epoch == store.newest_epoch())).first()
    if row is None:
        return None
    holder = Holder(name=row.holder, acquired_at=row.acquired_at, renewed_at=row.renewed_at)
    is_alive = _lives_here(holder)
    if is_alive is None:
        is_alive = now - holder.renewed_at < TOLERANCE_S
    return holder if is_alive else None


def _lives_here(holder: Holder) -> bool | None:
    """Whether its process lives on this machine; None for one of another machine."""
    host, _, pid = holder.name.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        process = psutil.Process(int(pid))
        # Another process may have been given its number since.
        is_same = process.create_time() <= holder.acquired_at
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
