"""The weight board as a Ray actor, to which the trainer publishes and from which replicas pull.

    board = start_board()                                               # the run's supervisor
    await board.publish.remote(term, version, groups)                  # the trainer's rank 0
    work = await board.poll.remote(replica, term, version, 5.0)        # each replica, repeatedly
    await board.report.remote(replica, term, version, scores)          # after it has loaded
    status = await board.wait_published.remote(version, 1, 60.0)        # the training loop

Each start or recovery of a run begins a new term. A waiting `poll` shows that its replica is alive.
The board copies each published buffer into an object that it owns, so that the weights outlive the
trainer rank. The board is not restarted, because its objects die with it.

A run's board is a detached actor: if a new supervisor replaces a dead one in time, board and
engines continue. After `orphan_timeout_s` without a call of a supervisor, the board deletes the
run's Serve applications and ends.
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
from ray.exceptions import RayError

from actors.deadline import is_set_within, within
from actors.deaths import ACTOR_DEATHS
from actors.weights.board import (
    Board,
    BoardStatus,
    NotPublished,
    Publication,
    Seat,
    StartStages,
    WeightGroup,
)
from actors.weights.logprob_check import CheckText, EngineScores

MAX_POLL_S = 30.0
# Time limit for one buffer.
ADOPT_TIMEOUT_S = 300.0
PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 1.0
INVITATION_S = 2.0
BEAT_LEASE_S = 5.0
ORPHAN_CHECK_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """The settings with which a board outlives the process that started it (a detached actor).

    A new supervisor of the run finds the board by its name, and takes the engines over.
    """

    name: str
    """Name of the board's actor; each run has one."""
    namespace: str
    orphan_timeout_s: float
    """Time in seconds after which the board and the applications end if no term calls the board."""
    applications: tuple[str, ...]
    """Names of the applications in Ray Serve that are deleted when the run ends; the first has the
    engines."""
    engines: Any = None
    """The settings of the engines."""


class WeightBoard:
    """A `board.Board` whose callers can wait. All methods are coroutines on one event loop."""

    def __init__(
        self, keeping: Keeping | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the board.

        Args: keeping: settings of a detached board; None for a board that ends with the process
        that started it. clock: returns seconds.
        """
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

    # Methods for the trainer and the supervisor

    async def open_term(self, term: int) -> Keeping | None:
        """Record that the run begins a new term (by a start or a recovery); refuse older terms.

        Returns: the settings with which the board was started; None if it is not detached.
        Raises: StaleTerm if a newer term is known.
        """
        self._board.check_term(term)
        self._seen_at = self._clock()
        return self._keeping

    async def publish(self, term: int, version: int, groups: Sequence[WeightGroup]) -> None:
        """Make (term, version) current and wake the replicas, without waiting for their loading.

        Args: groups: the packed weights; each `buffer` is an object reference to [num_bytes] uint8
            that the caller has put, or None if the caller broadcasts it.
        Raises: StaleTerm if a newer term is known; StaleVersion if the term has published a later
            version; TimeoutError if a buffer cannot be fetched.
        """
        self._board.check_term(term)
        own = tuple([await self._adopt(group) for group in groups])
        publication = Publication(term=term, version=version, groups=own, check=self._check)
        self._board.publish(publication, now=self._clock())
        self._wake()

    async def set_check(self, check: CheckText | None) -> None:
        """Set the text that engines score each time that they have loaded new weights.

        The text applies to publications after this call.
        check: None for the text of `board.check_tokens`.
        """
        self._check = check

    async def num_moved(self) -> int:
        """Return how often `publish` has fetched or copied a buffer, a measure of its progress."""
        return self._num_moved

    async def wait_published(
        self, version: int, min_replicas: int, timeout_s: float
    ) -> BoardStatus:
        """Wait until all live replicas, and at least min_replicas, hold the current publication.

        Returns: the status after the wait, which ends after timeout_s at the latest.
        Raises: NotPublished if `version` is not the current version.
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
            # Leases expire, and actors die, without an event.
            await self._wait_for_change(min(remaining_s, PROBE_PERIOD_S))
            await asyncio.gather(*(self._answers(each) for each in self._board.laggards()))

    async def hold(self, is_held: bool) -> None:
        """Order every replica to interrupt its turns and sample nothing (is_held), or to resume."""
        self._board.hold(is_held)
        self._wake()

    async def status(self, term: int | None = None) -> BoardStatus:
        """Return the board's status.

        term: the term of the supervisor that calls, which shows the board that it is alive; None
        for any other caller.
        """
        now = self._clock()
        if term is not None:
            self._board.check_term(term)
            self._seen_at = now
        self._board.forget_silent(now=now)
        return self._board.status(now=now)

    async def form_group(
        self, term: int, version: int, store: str, timeout_s: float
    ) -> Seat | None:
        """Form a group of replicas to which the trainer broadcasts the weights.

        Wait up to timeout_s for the first replica that wants to take part, and then up to
        `INVITATION_S` for the others. After failed broadcasts the group is smaller, so that a
        faulty replica is found (`Board.seat`). The other replicas wait for the next group.

        Args: store: address at which the replicas meet the trainer, which has rank 0.
        Returns: the trainer's own place in the group; None if no replica takes part, or if
            `version` is no longer the current version.
        Raises: StaleTerm if a newer term is known.
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
        # A replica that froze or died while it waited would block the group.
        answers = await asyncio.gather(*(self._answers(each) for each in waiting))
        present = [name for name, is_there in zip(waiting, answers, strict=True) if is_there]
        if not self._board.is_current(term, version):
            return None
        seats = self._board.seat(present, store=store)
        self._seats |= seats
        self._wake()
        return replace(next(iter(seats.values())), rank=0) if seats else None

    # Methods for the replicas

    async def join(self, replica_id: str, actor: ActorHandle) -> None:
        """Register a replica that begins its start. actor: the handle by which the board sees
        whether the replica has died.
        """
        self._actors[replica_id] = actor
        self._board.starting(replica_id, work=0.0, now=self._clock())

    async def starting(self, replica_id: str, work: float) -> None:
        """Record that a replica is still starting, and how much work its start has done.

        work: CPU seconds plus MiB read. The number stops growing if the start hangs.
        """
        self._board.starting(replica_id, work=work, now=self._clock())

    async def started(self, replica_id: str, stages: StartStages) -> None:
        """Record that a replica has started, with the stages of its start."""
        self._board.started(replica_id, stages)

    async def poll(
        self,
        replica_id: str,
        term: int | None,
        version: int | None,
        timeout_s: float,
        num_workers: int = 1,
        is_held: bool = False,
    ) -> Publication | bool | None:
        """Record that a replica is alive and has (term, version), and return its next work.

        Args: num_workers: number of the processes of the replica's engine that take part in a
            broadcast. is_held: whether the replica has paused its turns. timeout_s: longest time
            to wait for work.
        Returns: a publication to load; True or False, the order to pause or to resume the turns;
            None if there was no work in time.
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
        """Wait up to timeout_s for a place in a broadcast of the current publication.

        Returns: the place; None if no group was formed in time. The replica must then poll again.
        """
        timeout_s = min(timeout_s, MAX_POLL_S)
        deadline = self._clock() + timeout_s
        self._board.beat(replica_id, lease_s=timeout_s, now=self._clock())
        # Drop a seat that was given and never fetched: its group has met without this replica.
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
        """Record that a replica is loading. num_loaded: number of parts that it has loaded."""
        self._board.beat(replica_id, num_loaded=num_loaded, lease_s=BEAT_LEASE_S, now=self._clock())

    async def report(
        self,
        replica_id: str,
        term: int,
        version: int,
        scores: EngineScores | None,
    ) -> None:
        """Record that a replica has loaded (term, version).

        scores: results of the check text (`set_check`) with the new weights: log-probabilities
        and continuations. None if the engine did not score a text.
        """
        self._board.report(replica_id, term, version=version, scores=scores, now=self._clock())
        self._wake()

    async def leave(self, replica_id: str, is_in_order: bool = False) -> None:
        """Remove a replica whose process is dead or about to end.

        is_in_order: whether the replica was asked to end; False after a failure.
        """
        self._board.leave(replica_id, is_in_order=is_in_order)
        self._actors.pop(replica_id, None)
        self._seats.pop(replica_id, None)
        self._wake()

    async def _answers(self, replica_id: str) -> bool:
        """Return whether a replica's process answers now. Remove a dead replica from the board."""
        if (actor := self._actors.get(replica_id)) is None:
            return True
        try:
            await within(PROBE_TIMEOUT_S, actor.__ray_ready__.remote())
        except ACTOR_DEATHS:
            await self.leave(replica_id)
            return False
        except (TimeoutError, RayError):
            # It is busy, frozen or unreachable; it stays until its lease expires.
            return False
        return True

    async def _adopt(self, group: WeightGroup) -> WeightGroup:
        if group.buffer is None:
            return group
        buffer = await within(ADOPT_TIMEOUT_S, group.buffer)
        self._num_moved += 1
        # Use a thread, because copying gigabytes would block every heartbeat.
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
            "board: no term of this run has called the board for %g s; ending %s",
            keeping.orphan_timeout_s,
            ", ".join(keeping.applications),
        )
        # Imported here, because engines would wait a second for the import at every start.
        from ray import serve
        from ray.serve.exceptions import RayServeException

        for name in keeping.applications:
            # Serve may be gone already.
            with suppress(RayServeException, RayError, TimeoutError):
                serve.delete(name)
        ray.kill(this_actor)


def start_board(keeping: Keeping | None = None, *, strategy: Any = "DEFAULT") -> ActorHandle:
    """Start a board, and return its handle.

    Args: keeping: settings of a run's board, which outlives its supervisor; None for a board that
        ends with this process. strategy: Ray's scheduling strategy for the actor.
    Raises: ValueError if another board with this name exists.
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
