"""The weight board as a Ray actor: replicas pull from it, the trainer publishes to it.

A long poll is a replica's heartbeat. The board copies each published buffer into an object that
the board itself owns, so that the weights outlive the trainer rank that put them, and a replica
that starts later can still load the current version. Its owner is the run's supervisor; it is not
restarted, because a board without its objects would be a lie.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from actors.batch import Float32s
from actors.deadline import is_set_within, within
from actors.weights.board import (
    Board,
    BoardStatus,
    Command,
    CommandKind,
    Publication,
    PublishedGroup,
    PublishReport,
)
from actors.weights.errors import NotPublished, ReplicasLagging, WeightCommandFailed

MAX_POLL_S = 30.0
ADOPT_TIMEOUT_S = 300.0
PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 1.0


class WeightBoard:
    """`board.Board` with waiting. Every method is a coroutine; all run on one event loop."""

    def __init__(self, apply_limit_s: float = 120.0) -> None:
        self._board = Board(apply_limit_s=apply_limit_s)
        self._changed = asyncio.Event()
        self._actors: dict[str, ActorHandle] = {}

    # The trainer and the supervisor

    async def open_epoch(self, epoch: int) -> None:
        """Announce a new run (lease): from now on older ones are refused.

        Raises: StaleEpoch.
        """
        self._board.check_epoch(epoch)

    async def publish(self, epoch: int, version: int, groups: Sequence[PublishedGroup]) -> None:
        """Make (epoch, version) current and wake the replicas; returns before they have loaded it.

        Args: groups: each `buffer` an object reference to [num_bytes] uint8, put by the caller.
        Raises: StaleEpoch, StaleVersion; TimeoutError when a buffer cannot be fetched.
        """
        self._board.check_epoch(epoch)
        own = tuple([await self._adopt(group) for group in groups])
        self._board.publish(Publication(epoch=epoch, version=version, groups=own))
        self._wake()

    async def wait_published(
        self, version: int, min_replicas: int, timeout_s: float
    ) -> PublishReport:
        """Wait until every live replica, and at least min_replicas, hold the current publication.

        Raises: NotPublished when `version` is not the current one; ReplicasLagging at the end of
            timeout_s, with the names of the laggards.
        """
        started = time.monotonic()
        while True:
            self._board.forget_silent(now=time.monotonic())
            current = self._board.current
            if current is None or current.version != version:
                raise NotPublished(version, None if current is None else current.version)
            laggards = self._board.laggards()
            reports = self._board.reports(now=time.monotonic())
            if not laggards and len(reports) >= min_replicas:
                return PublishReport(
                    epoch=current.epoch,
                    version=version,
                    replicas=reports,
                    wall_s=time.monotonic() - started,
                )
            remaining_s = started + timeout_s - time.monotonic()
            if remaining_s <= 0:
                raise ReplicasLagging(version, laggards, len(reports), min_replicas)
            # Leases run out, and actors die, without an event.
            await self._wait_for_change(min(remaining_s, PROBE_PERIOD_S))
            await self._drop_dead(laggards)

    async def status(self) -> BoardStatus:
        self._board.forget_silent(now=time.monotonic())
        return self._board.status(now=time.monotonic())

    async def command(
        self,
        epoch: int,
        kind: CommandKind,
        payload: Any,
        version: int | None,
        timeout_s: float,
    ) -> None:
        """Have every member replica execute one step of vLLM's handshake and wait for all.

        After FINISH, (epoch, version) is the current publication.
        Raises: StaleEpoch, RendezvousNeeded, ValueError (see `Board.submit`);
            WeightCommandFailed when a replica fails or does not answer within timeout_s.
        """
        self._board.forget_silent(now=time.monotonic())
        sequence = self._board.submit(epoch, kind, payload=payload, version=version)
        self._wake()
        deadline = time.monotonic() + timeout_s
        while (silent := self._board.waiting_for(sequence)) and time.monotonic() < deadline:
            await self._wait_for_change(min(deadline - time.monotonic(), PROBE_PERIOD_S))
            await self._drop_dead(silent)
            self._board.forget_silent(now=time.monotonic())
        failures = self._board.close_command(sequence)
        if failures or silent:
            raise WeightCommandFailed(kind.value, failures, silent)
        if kind is CommandKind.FINISH and version is not None:
            self._board.publish(Publication(epoch=epoch, version=version))
            self._wake()

    # The replicas

    async def join(self, replica_id: str, actor: ActorHandle) -> None:
        """Tell the board by which actor it can see that the replica has died; optional."""
        self._actors[replica_id] = actor

    async def poll(
        self,
        replica_id: str,
        epoch: int | None,
        version: int | None,
        timeout_s: float,
        num_workers: int = 1,
    ) -> Publication | Command | None:
        """Say that the replica lives and holds (epoch, version); wait for what it must apply.

        Args: num_workers: processes of its engine that take part in a transfer group.
        Returns: None when nothing came up within timeout_s.
        """
        timeout_s = min(timeout_s, MAX_POLL_S)
        deadline = time.monotonic() + timeout_s
        self._board.heartbeat(
            replica_id,
            epoch,
            version=version,
            num_workers=num_workers,
            lease_s=timeout_s,
            now=time.monotonic(),
        )
        self._wake()
        while (work := self._board.next_for(replica_id, now=time.monotonic())) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            await self._wait_for_change(remaining_s)
        return work

    async def report(
        self,
        replica_id: str,
        epoch: int,
        version: int,
        load_s: float,
        parity: Float32s | None,
    ) -> None:
        """A replica has loaded (epoch, version)."""
        self._board.report(
            replica_id,
            epoch,
            version=version,
            load_s=load_s,
            parity=parity,
            now=time.monotonic(),
        )
        self._wake()

    async def acknowledge(self, replica_id: str, sequence: int, error: str | None) -> None:
        """A replica has executed a command (error None) or failed to."""
        self._board.acknowledge(replica_id, sequence, error=error)
        self._wake()

    async def leave(self, replica_id: str) -> None:
        """A replica shuts down in order, or is dead."""
        self._board.leave(replica_id)
        self._actors.pop(replica_id, None)
        self._wake()

    async def _drop_dead(self, replica_ids: Sequence[str]) -> None:
        for replica_id in replica_ids:
            if (actor := self._actors.get(replica_id)) is None:
                continue
            try:
                await within(PROBE_TIMEOUT_S, actor.__ray_ready__.remote())
            except ActorDiedError:
                await self.leave(replica_id)
            except (TimeoutError, RayError):
                # Busy, or out of reach for now: its lease decides.
                continue

    async def _adopt(self, group: PublishedGroup) -> PublishedGroup:
        buffer = await within(ADOPT_TIMEOUT_S, group.buffer)
        # In a thread: copying gigabytes would hold up every heartbeat.
        own = await asyncio.to_thread(ray.put, buffer)
        return PublishedGroup(manifest=group.manifest, checksum=group.checksum, buffer=own)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        await is_set_within(timeout_s, self._changed)


def start_board(*, name: str | None = None, apply_limit_s: float = 120.0) -> ActorHandle:
    """Start the board; under a name it can be found by `ray.get_actor` in the same namespace."""
    options: dict[str, Any] = {} if name is None else {"name": name}
    remote_class = ray.remote(num_cpus=0, max_restarts=0, **options)(WeightBoard)
    return remote_class.remote(apply_limit_s)
