"""The weight board as a Ray actor: replicas pull from it, the trainer publishes to it.

    board = start_board()                                               # the run's supervisor
    await board.publish.remote(term, version, groups)                  # the trainer's rank 0
    work = await board.poll.remote(replica, term, version, 5.0)        # each replica, for ever
    await board.report.remote(replica, term, version, check_logprobs)  # after it has loaded
    status = await board.wait_published.remote(version, 1, 60.0)        # the training loop

A poll that waits is a replica's heartbeat. The board copies each published buffer into an object
of its own, so that the weights outlive the trainer rank that put them, and a replica that starts
later can still load the current version. Not restarted: its state refers to objects that die with
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
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
    NotPublished,
    Publication,
    ReplicasLagging,
    WeightCommandFailed,
    WeightGroup,
)

MAX_POLL_S = 30.0
ADOPT_TIMEOUT_S = 300.0
PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 1.0
RPC_MARGIN_S = 10.0


class WeightBoard:
    """`board.Board` with waiting. Every method is a coroutine; all run on one event loop."""

    def __init__(self, apply_limit_s: float = 120.0) -> None:
        self._board = Board(apply_limit_s=apply_limit_s)
        self._changed = asyncio.Event()
        self._actors: dict[str, ActorHandle] = {}

    # The trainer and the supervisor

    async def open_term(self, term: int) -> None:
        """Announce a new run (lease): from now on older ones are refused.

        Raises: StaleTerm.
        """
        self._board.check_term(term)

    async def publish(self, term: int, version: int, groups: Sequence[WeightGroup]) -> None:
        """Make (term, version) current and wake the replicas; returns before they have loaded it.

        Args: groups: each `buffer` an object reference to [num_bytes] uint8, put by the caller.
        Raises: StaleTerm, StaleVersion; TimeoutError when a buffer cannot be fetched.
        """
        self._board.check_term(term)
        own = tuple([await self._adopt(group) for group in groups])
        self._board.publish(Publication(term=term, version=version, groups=own))
        self._wake()

    async def wait_published(
        self, version: int, min_replicas: int, timeout_s: float
    ) -> BoardStatus:
        """Wait until every live replica, and at least min_replicas, hold the current publication.

        Raises: NotPublished when `version` is not the current one; ReplicasLagging at the end of
            timeout_s, with the names of the laggards.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            if status.version != version:
                raise NotPublished(
                    f"board: waiting for version {version}, but the current one is {status.version}"
                )
            laggards = self._board.laggards()
            if not laggards and len(status.replicas) >= min_replicas:
                return status
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ReplicasLagging(
                    f"board: version {version} is not held by {list(laggards)}; "
                    f"{len(status.replicas)} replicas are live, expected at least {min_replicas}; "
                    "look at the replicas' logs"
                )
            # Leases run out, and actors die, without an event.
            await self._wait_for_change(min(remaining_s, PROBE_PERIOD_S))
            await self._drop_dead(laggards)

    async def status(self) -> BoardStatus:
        self._board.forget_silent(now=time.monotonic())
        return self._board.status()

    async def command(
        self,
        term: int,
        kind: CommandKind,
        payload: Any,
        version: int | None,
        timeout_s: float,
    ) -> None:
        """Have every member replica execute one step of vLLM's handshake and wait for all.

        After FINISH, (term, version) is the current publication.
        Raises: StaleTerm, RendezvousNeeded, ValueError (see `Board.submit`);
            WeightCommandFailed when a replica fails or does not answer within timeout_s.
        """
        self._board.forget_silent(now=time.monotonic())
        sequence = self._board.submit(term, kind, payload=payload, version=version)
        self._wake()
        deadline = time.monotonic() + timeout_s
        while (silent := self._board.waiting_for(sequence)) and time.monotonic() < deadline:
            await self._wait_for_change(min(deadline - time.monotonic(), PROBE_PERIOD_S))
            await self._drop_dead(silent)
            self._board.forget_silent(now=time.monotonic())
        failures = self._board.close_command(sequence)
        if failures or silent:
            raise WeightCommandFailed(
                f"board: command {kind.value} failed on {dict(failures)} and was not answered by "
                f"{list(silent)}; initialise the transfer again"
            )
        if kind is CommandKind.FINISH and version is not None:
            self._board.publish(Publication(term=term, version=version))
            self._wake()

    # The replicas

    async def join(self, replica_id: str, actor: ActorHandle) -> None:
        """Tell the board by which actor it can see that the replica has died; optional."""
        self._actors[replica_id] = actor

    async def poll(
        self,
        replica_id: str,
        term: int | None,
        version: int | None,
        timeout_s: float,
        num_workers: int = 1,
    ) -> Publication | Command | None:
        """Say that the replica lives and holds (term, version); wait for what it must apply.

        Args: num_workers: processes of its engine that take part in a transfer group.
        Returns: None when nothing came up within timeout_s.
        """
        timeout_s = min(timeout_s, MAX_POLL_S)
        deadline = time.monotonic() + timeout_s
        self._board.heartbeat(
            replica_id,
            term,
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
        term: int,
        version: int,
        check_logprobs: Float32s | None,
    ) -> None:
        """A replica has loaded (term, version), and scores `board.check_tokens` so."""
        self._board.report(
            replica_id,
            term,
            version=version,
            check_logprobs=check_logprobs,
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

    async def _adopt(self, group: WeightGroup) -> WeightGroup:
        buffer = await within(ADOPT_TIMEOUT_S, group.buffer)
        # In a thread: copying gigabytes would hold up every heartbeat.
        own = await asyncio.to_thread(ray.put, buffer)
        return replace(group, buffer=own)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        await is_set_within(timeout_s, self._changed)


def start_board(*, apply_limit_s: float = 120.0) -> ActorHandle:
    return ray.remote(num_cpus=0, max_restarts=0)(WeightBoard).remote(apply_limit_s)


class BoardClient:
    """The trainer's end of vLLM's own weight-transfer backends (NCCL, CUDA IPC), over the board.

    Implements vLLM's `VLLMWeightSyncClient` protocol: each of its four calls becomes a command that
    the board hands to every replica, and returns when all have executed it. So the trainer needs no
    addresses of engines, and every call has a deadline.

    Before each `send_weights()` set `version` to what is being sent: vLLM's trainer engines do not
    pass one when they finish.
    """

    def __init__(
        self,
        board: ActorHandle,
        term: int,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        """timeout_s: of each command."""
        self._board = board
        self._term = term
        self._timeout_s = timeout_s
        self.version: int | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transfer on every live replica; rank offsets are dealt out by the board."""
        self._run(CommandKind.INIT, init_info)

    def start_weight_update(self) -> None:
        """Pause every replica, keeping its requests, and open the update."""
        self._run(CommandKind.START, None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have every replica receive one chunk; runs beside the trainer's own broadcast."""
        self._run(CommandKind.UPDATE, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, set the version and resume; the version is then the current one.

        Raises: ValueError when neither the argument nor `self.version` says what was sent.
        """
        version = self.version if weight_version is None else int(weight_version)
        if version is None:
            raise ValueError(
                "weights: no version to finish with; set client.version before sending"
            )
        self._run(CommandKind.FINISH, None, version=version)

    def _run(self, kind: CommandKind, payload: Any, *, version: int | None = None) -> None:
        reference = self._board.command.remote(self._term, kind, payload, version, self._timeout_s)
        ray.get(reference, timeout=self._timeout_s + RPC_MARGIN_S)
