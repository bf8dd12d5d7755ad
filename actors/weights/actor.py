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

A run's board is detached: board and engines outlive a supervisor that is replaced in time. When no
term has shown life for `orphan_timeout_s`, the board deletes the run's Serve applications and ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from actors.batch import Float32s
from actors.deadline import is_set_within, within
from actors.weights.board import (
    Board,
    BoardStatus,
    HoldOrder,
    NotPublished,
    Publication,
    Seat,
    StartStages,
    WeightGroup,
)
from actors.weights.logprob_check import CheckSample, CheckText

MAX_POLL_S = 30.0
# Of one buffer.
ADOPT_TIMEOUT_S = 300.0
PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 1.0
INVITATION_S = 2.0
BEAT_LEASE_S = 5.0
ORPHAN_CHECK_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a detached board keeps for the run that started it."""

    name: str
    """Of the board, as an actor; one run has one."""
    namespace: str
    orphan_timeout_s: float
    """Without a sign of life of any term for so long, all ends."""
    applications: tuple[str, ...]
    """Serve applications that end with the run."""
    deployment: Any = None
    """What the engines were started with; for a supervisor that takes them over."""


class WeightBoard:
    """`board.Board` with waiting. Every method is a coroutine; all run on one event loop."""

    def __init__(
        self, keeping: Keeping | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """keeping: None for a board that ends with whoever started it. clock: in seconds."""
        self._clock = clock
        self._board = Board(now=self._clock())
        self._num_moved = 0
        self._check: CheckText | None = None
        self._changed = asyncio.Event()
        self._actors: dict[str, ActorHandle] = {}
        self._seats: dict[str, Seat] = {}
        self._keeping = keeping
        self._seen_at = self._clock()
        if keeping is not None:
            this_actor = ray.get_runtime_context().current_actor
            watch = threading.Thread(
                target=self._end_when_orphaned, args=(keeping, this_actor), daemon=True
            )
            watch.start()

    # The trainer and the supervisor

    async def open_term(self, term: int) -> Any:
        """Announce a new run (lease): from now on older ones are refused.

        Returns: `Keeping.deployment`.
        Raises: StaleTerm.
        """
        self._board.check_term(term)
        self._seen_at = self._clock()
        return None if self._keeping is None else self._keeping.deployment

    async def publish(self, term: int, version: int, groups: Sequence[WeightGroup]) -> None:
        """Make (term, version) current and wake the replicas; returns before they have loaded it.

        Args: groups: each `buffer` an object reference to [num_bytes] uint8, put by the caller, or
            None where the caller will broadcast it.
        Raises: StaleTerm, StaleVersion; TimeoutError when a buffer cannot be fetched.
        """
        self._board.check_term(term)
        own = tuple([await self._adopt(group) for group in groups])
        publication = Publication(term=term, version=version, groups=own, check=self._check)
        self._board.publish(publication, now=self._clock())
        self._wake()

    async def set_check(self, check: CheckText | None) -> None:
        """Set the text that engines score after they have loaded, from the next publish on."""
        self._check = check

    async def num_moved(self) -> int:
        """A number that grows while a publish gets on: a buffer was fetched, or copied."""
        return self._num_moved

    async def wait_published(
        self, version: int, min_replicas: int, timeout_s: float
    ) -> BoardStatus:
        """Wait until every live replica, and at least min_replicas, hold the current publication.

        Returns: how it stands then, or at the end of timeout_s.
        Raises: NotPublished when `version` is not the current one.
        """
        deadline = self._clock() + timeout_s
        while True:
            status = await self.status()
            if status.version != version:
                raise NotPublished(
                    f"board: waiting for version {version}, but the current one is {status.version}"
                )
            remaining_s = deadline - self._clock()
            is_held = status.is_loaded and len(status.replicas) >= min_replicas
            if is_held or remaining_s <= 0:
                return status
            # Leases run out, and actors die, without an event.
            await self._wait_for_change(min(remaining_s, PROBE_PERIOD_S))
            await self._drop_dead(self._board.laggards())

    async def hold(self, is_held: bool) -> None:
        """Have every replica hold its turns, or go on."""
        self._board.hold(is_held)
        self._wake()

    async def status(self, term: int | None = None) -> BoardStatus:
        """How it stands. term: of the asking run, which so shows that it lives."""
        now = self._clock()
        if term is not None:
            self._board.check_term(term)
            self._seen_at = now
        self._board.forget_silent(now=now)
        return self._board.status(now=now)

    async def form_group(
        self, term: int, version: int, store: str, timeout_s: float
    ) -> Seat | None:
        """Seat replicas that answer within `INVITATION_S` for a broadcast of the publication.

        All of them, or some where broadcasts have failed (`Board.seat`); the others go on waiting.

        Args: store: where the caller, who is rank 0, meets them.
        Returns: the caller's own seat; None when nobody asked for one within timeout_s.
        Raises: StaleTerm.
        """
        self._board.check_term(term)
        deadline = self._clock() + timeout_s
        invited_at: float | None = None
        while True:
            now = self._clock()
            self._board.forget_silent(now=now)
            if self._board.is_past(term, version):
                return None
            waiting = self._board.waiting() if self._board.is_current(term, version) else ()
            if waiting and invited_at is None:
                invited_at = now
            closes_at = deadline if invited_at is None else invited_at + INVITATION_S
            is_complete = bool(waiting) and set(waiting) == set(self._board.laggards())
            if is_complete or now >= closes_at:
                break
            await self._wait_for_change(closes_at - now)
        # One that has frozen or died while it waited would hold up all others.
        answers = await asyncio.gather(*(self._answers(each) for each in waiting))
        present = [name for name, is_there in zip(waiting, answers, strict=True) if is_there]
        if not self._board.is_current(term, version):
            return None
        seats = self._board.seat(present, store=store)
        self._seats |= seats
        self._wake()
        return replace(next(iter(seats.values())), rank=0) if seats else None

    # The replicas

    async def join(self, replica_id: str, actor: ActorHandle) -> None:
        """A replica begins its start; by its actor the board sees later that it has died."""
        self._actors[replica_id] = actor
        self._board.starting(replica_id, work=0.0, now=self._clock())

    async def starting(self, replica_id: str, work: float) -> None:
        """A replica is still starting. work: grows while it gets on."""
        self._board.starting(replica_id, work=work, now=self._clock())

    async def started(self, replica_id: str, stages: StartStages) -> None:
        """A replica has started: the stages of its start."""
        self._board.started(replica_id, stages)

    async def poll(
        self,
        replica_id: str,
        term: int | None,
        version: int | None,
        timeout_s: float,
        num_workers: int = 1,
        is_held: bool = False,
    ) -> Publication | HoldOrder | None:
        """Say that the replica lives and holds (term, version); wait for what it must load or do.

        Args: num_workers: processes of its engine that take part in a broadcast. is_held: whether
            it holds its turns.
        Returns: None when nothing came up within timeout_s.
        """
        timeout_s = min(timeout_s, MAX_POLL_S)
        deadline = self._clock() + timeout_s
        self._board.heartbeat(
            replica_id,
            term,
            version=version,
            num_workers=num_workers,
            is_held=is_held,
            lease_s=timeout_s,
            now=self._clock(),
        )
        self._wake()
        while (work := self._board.next_for(replica_id)) is None:
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                return None
            await self._wait_for_change(remaining_s)
        return work

    async def take_seat(self, replica_id: str, timeout_s: float) -> Seat | None:
        """Wait for a place in the broadcast of the current publication.

        Returns: None when no group was formed within timeout_s; poll again.
        """
        timeout_s = min(timeout_s, MAX_POLL_S)
        deadline = self._clock() + timeout_s
        self._board.beat(replica_id, lease_s=timeout_s, now=self._clock())
        # One that was given and never fetched: its group has met without this replica.
        self._seats.pop(replica_id, None)
        self._board.ask_for_seat(replica_id)
        self._wake()
        try:
            while (seat := self._seats.pop(replica_id, None)) is None:
                remaining_s = deadline - self._clock()
                if remaining_s <= 0:
                    return None
                await self._wait_for_change(remaining_s)
            return seat
        finally:
            self._board.stop_asking(replica_id)

    async def beat(self, replica_id: str, num_loaded: int = 0) -> None:
        """A replica loads. num_loaded: grows while it gets on."""
        self._board.beat(replica_id, num_loaded=num_loaded, lease_s=BEAT_LEASE_S, now=self._clock())

    async def report(
        self,
        replica_id: str,
        term: int,
        version: int,
        check_logprobs: Float32s | None,
        check_samples: tuple[CheckSample, ...] = (),
        check_s: float = 0.0,
    ) -> None:
        """Record that a replica has loaded (term, version), and its scores of the text."""
        self._board.report(
            replica_id,
            term,
            version=version,
            check_logprobs=check_logprobs,
            check_samples=check_samples,
            check_s=check_s,
            now=self._clock(),
        )
        self._wake()

    async def leave(self, replica_id: str, is_in_order: bool = False) -> None:
        """A replica is dead or dying. is_in_order: it was asked to end."""
        self._board.leave(replica_id, is_in_order=is_in_order)
        self._actors.pop(replica_id, None)
        self._seats.pop(replica_id, None)
        self._wake()

    async def _drop_dead(self, replica_ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._answers(each) for each in replica_ids))

    async def _answers(self, replica_id: str) -> bool:
        """Whether a replica's process answers now. One that has died leaves the board."""
        if (actor := self._actors.get(replica_id)) is None:
            return True
        try:
            await within(PROBE_TIMEOUT_S, actor.__ray_ready__.remote())
        except ActorDiedError:
            await self.leave(replica_id)
            return False
        except (TimeoutError, RayError):
            # Busy, frozen, or out of reach for now: its lease decides.
            return False
        return True

    async def _adopt(self, group: WeightGroup) -> WeightGroup:
        if group.buffer is None:
            return group
        buffer = await within(ADOPT_TIMEOUT_S, group.buffer)
        self._num_moved += 1
        # In a thread: copying gigabytes would hold up every heartbeat.
        own = await asyncio.to_thread(ray.put, buffer)
        self._num_moved += 1
        return replace(group, buffer=own)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        await is_set_within(timeout_s, self._changed)

    def _end_when_orphaned(self, keeping: Keeping, this_actor: ActorHandle) -> None:
        while self._clock() - self._seen_at < keeping.orphan_timeout_s:
            time.sleep(ORPHAN_CHECK_S)
        log.error(
            "board: no term of this run has shown life for %g s; ending %s",
            keeping.orphan_timeout_s,
            ", ".join(keeping.applications),
        )
        # A second of imports, which the engines would wait for at every start.
        from ray import serve
        from ray.serve.exceptions import RayServeException

        for name in keeping.applications:
            # Serve may be gone already.
            with suppress(RayServeException, RayError, TimeoutError):
                serve.delete(name)
        ray.kill(this_actor)


def start_board(keeping: Keeping | None = None, *, strategy: Any = "DEFAULT") -> ActorHandle:
    """Start the board: of this process, or a run's own, which outlives its supervisor.

    strategy: Ray's, of its place. Raises: ValueError while another board has the name.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": strategy,
    }
    if keeping is not None:
        options |= {
            "name": keeping.name,
            "namespace": keeping.namespace,
            "lifetime": "detached",
        }
    return ray.remote(**options)(WeightBoard).remote(keeping)
