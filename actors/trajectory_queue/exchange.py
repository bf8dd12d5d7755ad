"""Take assignments from the queue, play them, and send the finished trajectories to the queue.

Invariant: every assignment becomes exactly one trajectory that is sent to the queue. Exceptions:
- If the queue cannot be reached, `run` raises. The supervisor gives the rollouts to another actor.
- If the queue dies, the exchange drops its rollouts, and the next queue hands them out again.
- `stop` cancels rollouts that are stored (`is_durable`). Another actor delivers them later.

An actor holds at most `num_slots` rollouts. A rollout counts until its trajectory has been sent, so
a full queue slows down the actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from actors.deadline import TaskSet, is_set_within, retry, within
from actors.trajectory_queue.codec import TrajectoryBlock, decode, encode
from actors.trajectory_queue.messages import GroupToScore
from actors.types import Outcome, RolloutAssignment, Trajectory, TrajectorySummary, summarize
from actors.user_code import describe

logger = logging.getLogger(__name__)

Play = Callable[[RolloutAssignment], Awaitable[Trajectory]]
ScoreGroup = Callable[[GroupToScore, Sequence[Trajectory]], Awaitable[list[Trajectory]]]

POLL_S = 1.0
"""Longest time that a request for assignments waits in the queue, in seconds."""
TICK_S = 0.02
"""Time in seconds within which finished trajectories are collected and sent together."""
MAX_BLOCK = 64
"""Largest number of trajectories that are sent together."""
QUEUE_DEADLINE_S = 60.0
"""Longest time to wait for the queue's answer, in seconds; for a poll, POLL_S is added."""
# Number of groups that one actor scores at the same time.
MAX_GROUPS_IN_SCORING = 16


class QueueUnreachable(Exception):
    """The trajectory queue did not answer; another actor must get this actor's rollouts."""


class QueueDied(Exception):
    """The queue that handed out this actor's rollouts died; the next queue hands them out again."""


class RolloutExchange:
    """The exchange of rollouts between the queue and a process that plays them.

    All methods are called in one event loop.
    """

    def __init__(
        self,
        play: Play,
        *,
        actor_id: str,
        queue: Any,
        environments: Collection[str],
        num_slots: int,
        is_durable: bool = False,
    ) -> None:
        """Create an exchange; `run` starts it.

        Args:
            play: Plays one rollout to its end. If `play` raises, the rollout counts as an
                infrastructure error. `stop` and the queue's death cancel the call. After the
                queue's death, a new attempt may begin before the cancelled call ends.
            queue: Handle of the trajectory queue actor.
            environments: Names of the environments whose tasks are taken.
            num_slots: Number of rollouts held at a time, >= 1.
            is_durable: Whether the rollouts are stored, so that another actor can deliver those
                that `stop` cancels. If not, they are sent with the outcome `cancelled`.
        """
        self._play_one = play
        self._actor_id = actor_id
        self._queue = queue
        self._environments = tuple(environments)
        self._num_slots = num_slots
        self._is_durable = is_durable
        self._plays: set[asyncio.Task[None]] = set()
        self._finished: list[Trajectory] = []
        self._num_deaths_seen = 0
        """Number of the queue's deaths so far; rollouts taken before the last death are dropped."""
        self._num_sending = 0
        self._is_taking = False
        self._is_running = False
        self._is_stopping = False
        # One waiter for each event: if two loops clear one, a wake-up can be lost.
        self._has_free_slots = asyncio.Event()
        self._has_finished = asyncio.Event()

    async def run(self) -> None:
        """Take, play and send rollouts until `stop`.

        Raises: QueueUnreachable; RuntimeError if it runs already.
        """
        if self._is_running:
            raise RuntimeError(f"actor {self._actor_id}: run was called twice; call it once")
        self._is_running = True
        self._is_taking = True
        loops = [asyncio.create_task(self._take_forever()), asyncio.create_task(self._send_all())]
        try:
            await asyncio.gather(*loops)
        finally:
            for task in (*loops, *self._plays):
                task.cancel()
            self._is_running = False

    async def stop(self, *, drain_s: float = 0.0, limit_s: float = 30.0) -> None:
        """Take no more rollouts, and let the current rollouts end for up to drain_s seconds.

        Then cancel the rollouts that still run, and wait up to limit_s seconds until all results
        are sent and `run` ends.
        """
        self._is_stopping = True
        self._has_free_slots.set()
        loop = asyncio.get_running_loop()
        drain_end = loop.time() + drain_s
        while loop.time() < drain_end and self._plays:
            await asyncio.wait(tuple(self._plays), timeout=drain_end - loop.time())
        end = loop.time() + limit_s
        while self._is_running and loop.time() < end:
            self._cancel_all()
            await asyncio.sleep(0.02)
        self._cancel_all()

    # -- taking and playing ------------------------------------------------------------------

    async def _take_forever(self) -> None:
        try:
            while not self._is_stopping:
                free = self._free_slots()
                if free <= 0:
                    await self._wait_for(self._has_free_slots)
                    continue
                try:
                    assignments = await self._take(free)
                except QueueDied:
                    await self._begin_anew()
                    continue
                num_deaths = self._num_deaths_seen
                for assignment in assignments:
                    task = asyncio.create_task(self._play(assignment, num_deaths))
                    self._plays.add(task)
                    task.add_done_callback(partial(self._on_end, assignment, num_deaths))
        finally:
            self._is_taking = False
            self._has_finished.set()

    def _free_slots(self) -> int:
        held = len(self._plays) + len(self._finished) + self._num_sending
        return self._num_slots - held

    async def _take(self, max_count: int) -> list[RolloutAssignment]:
        # The call is not repeated, because a lost answer may have contained assignments.
        call = self._queue.take_rollouts.remote(
            self._actor_id, max_count, POLL_S, self._environments
        )
        try:
            assignments: list[RolloutAssignment] = await within(POLL_S + QUEUE_DEADLINE_S, call)
        except ActorUnavailableError as error:
            raise QueueDied(describe(error)) from error
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"take_rollouts: {describe(error)}") from error
        return assignments

    async def _begin_anew(self) -> None:
        """Drop this actor's rollouts after the queue's death. Raises: QueueUnreachable."""
        self._num_deaths_seen += 1
        for task in self._plays:
            task.cancel()
        self._finished.clear()

        # The new queue hands the rollouts out again.
        async def give_back() -> None:
            call = self._queue.give_back.remote(self._actor_id)
            await within(QUEUE_DEADLINE_S, call)

        try:
            await retry(give_back, on=ActorUnavailableError, limit_s=QUEUE_DEADLINE_S)
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"give_back: {describe(error)}") from error

    async def _play(self, assignment: RolloutAssignment, num_deaths: int) -> None:
        self._keep(await play_once(self._play_one, assignment), num_deaths)

    def _on_end(
        self, assignment: RolloutAssignment, num_deaths: int, task: asyncio.Task[None]
    ) -> None:
        self._plays.discard(task)
        # If the task is not cancelled, `_play` has kept the trajectory that the play returned.
        if not task.cancelled():
            return
        if self._is_durable:
            self._has_finished.set()
            self._has_free_slots.set()
        else:
            cancelled = Trajectory.of(assignment, Outcome.CANCELLED, detail="cancelled by a stop")
            self._keep(cancelled, num_deaths)

    def _keep(self, trajectory: Trajectory, num_deaths: int) -> None:
        """Keep a finished trajectory, unless the queue has died since its rollout was taken.

        num_deaths: how often the queue had died when the rollout was taken.
        """
        if num_deaths == self._num_deaths_seen:
            self._finished.append(trajectory)
            self._has_finished.set()
        else:
            self._has_free_slots.set()

    def _cancel_all(self) -> None:
        for task in self._plays:
            # Cancel each once: a second cancellation would interrupt the play's cleanup.
            if not task.cancelling():
                task.cancel()

    # -- handing over ------------------------------------------------------------------------

    async def _send_all(self) -> None:
        while self._is_taking or self._plays or self._finished:
            if not self._finished:
                await self._wait_for(self._has_finished)
                continue
            # Plays that have just finished are still in the set.
            await asyncio.sleep(0)
            if self._plays and len(self._finished) < MAX_BLOCK:
                await asyncio.sleep(TICK_S)
            block = self._finished[:MAX_BLOCK]
            del self._finished[: len(block)]
            self._num_sending = len(block)
            await self._send(block)
            self._num_sending = 0
            self._has_free_slots.set()

    async def _send(self, block: Sequence[Trajectory]) -> None:
        encoded = encode(block)
        summaries = _summaries(block, encoded)

        async def put() -> None:
            # Pass the block by value: the queue stores its own copy, which outlives this actor.
            call = self._queue.put.remote(self._actor_id, encoded, summaries)
            try:
                await within(QUEUE_DEADLINE_S, call)
            except (RayError, TimeoutError) as error:
                logger.warning("put: %s", describe(error))
                raise

        try:
            await retry(
                put,
                on=(RayError, TimeoutError),
                limit_s=QUEUE_DEADLINE_S,
                first_pause_s=0.5,
            )
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"put: {describe(error)}") from error

    async def _wait_for(self, event: asyncio.Event) -> None:
        event.clear()
        await is_set_within(POLL_S, event)


class GroupExchange:
    """An exchange that takes groups to be scored together, and returns them with their rewards.

    The exchange runs concurrently with the episodes. If the actor dies while it scores a group,
    the queue hands the group out again, so that the scoring functions may be called twice.
    """

    def __init__(
        self,
        score: ScoreGroup,
        *,
        actor_id: str,
        queue: Any,
        environments: Collection[str],
    ) -> None:
        """Create an exchange; `run` starts it.

        Args:
            score: Function that scores a group, and returns the group's trajectories with their
                rewards. If the scoring fails, it returns them with the outcome `reward_error`.
        """
        self._score_group = score
        self._actor_id = actor_id
        self._queue = queue
        self._environments = tuple(environments)
        self._scoring = TaskSet()

    async def run(self) -> None:
        """Take, score and return groups until cancelled; repeat failed calls to the queue."""
        try:
            while True:
                await self._take()
        finally:
            self._scoring.cancel()

    async def _take(self) -> None:
        if len(self._scoring) >= MAX_GROUPS_IN_SCORING:
            await asyncio.wait(self._scoring, return_when=asyncio.FIRST_COMPLETED)
            return
        call = self._queue.take_group.remote(self._actor_id, POLL_S, self._environments)
        try:
            group = await within(POLL_S + QUEUE_DEADLINE_S, call)
        except (RayError, TimeoutError) as error:
            # If the queue is lost permanently, the exchange of rollouts ends and cancels this one.
            logger.warning("take_group: %s", describe(error))
            await asyncio.sleep(POLL_S)
            return
        if group is not None:
            self._scoring.begin(self._score(group))

    async def _score(self, group: GroupToScore) -> None:
        block, summaries = None, []
        try:
            blocks = await within(QUEUE_DEADLINE_S, asyncio.gather(*group.blocks))
        except (RayError, TimeoutError) as error:
            logger.warning(
                "group %s is not scored and is played again, because its payloads are lost: %s",
                group.group_id,
                describe(error),
            )
        else:
            played = [decode(blocks[each.block], each.row) for each in group.trajectories]
            scored = await self._score_group(group, played)
            block = encode(scored)
            summaries = _summaries(scored, block)

        async def put() -> None:
            call = self._queue.put_group.remote(self._actor_id, group.group_id, block, summaries)
            await within(QUEUE_DEADLINE_S, call)

        # The call may be repeated, because the queue accepts a group only once.
        with suppress(RayError, TimeoutError):
            await retry(
                put, on=(RayError, TimeoutError), limit_s=QUEUE_DEADLINE_S, first_pause_s=0.5
            )


def _summaries(
    trajectories: Sequence[Trajectory], block: TrajectoryBlock
) -> list[TrajectorySummary]:
    pairs = enumerate(trajectories)
    return [summarize(each, num_bytes=block.row_num_bytes(row)) for row, each in pairs]


async def play_once(play: Play, assignment: RolloutAssignment) -> Trajectory:
    """Play a rollout. If `play` raises, return an empty trajectory that ended by this error."""
    try:
        return await play(assignment)
    except Exception as error:
        # Catch every error of a rollout, so that it costs only the rollout and not its slot.
        logger.exception("rollout %s: playing it raised", assignment.rollout_id)
        return Trajectory.of(assignment, Outcome.INFRASTRUCTURE_ERROR, detail=describe(error))
