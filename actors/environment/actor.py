"""The Ray actor that holds many episodes: assignments in, finished trajectories out.

Invariant: every assignment that was taken becomes exactly one trajectory handed to the queue, or
`run` raises, and the supervisor then gives this actor's rollouts to another one. A slot is free
again only when its trajectory has been handed over, so a full queue slows the actor down.
Started by the supervisor: `ray.remote(EnvironmentActor).options(...).remote(...)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from actors.deadline import is_set_within, retry, within
from actors.environment.protocol import Environment
from actors.environment.registry import UnknownEnvironment, resolve
from actors.environment.rendering import load_renderer
from actors.environment.settings import EnvironmentActorSettings
from actors.environment.turn_loop import play_episode
from actors.environment.user_code import describe
from actors.policy import PolicyClient
from actors.trajectory_queue.codec import encode
from actors.types import (
    Outcome,
    RolloutAssignment,
    Task,
    Trajectory,
    TrajectorySummary,
    summarize,
)

logger = logging.getLogger(__name__)

PolicyFactory = Callable[[], PolicyClient]


class QueueUnreachable(Exception):
    """The trajectory queue did not answer; this actor's rollouts must be given to another one."""


class QueueDied(Exception):
    """The queue that had this actor's rollouts is gone; its successor gives them out anew."""


class EnvironmentActor:
    """An asynchronous Ray actor; plain arguments, so that it can be started anywhere."""

    def __init__(
        self,
        settings: EnvironmentActorSettings,
        *,
        actor_id: str,
        tokenizer_path: str,
        make_policy: PolicyFactory,
        queue: Any,
    ) -> None:
        """tokenizer_path: a directory or hub name. queue: handle of the trajectory queue actor.

        Raises: UnknownEnvironment, BadEnvironmentOptions.
        """
        self._settings = settings
        self._actor_id = actor_id
        self._queue = queue
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None
        self._renderer = load_renderer(
            tokenizer_path,
            template_options=settings.rollouts.template_options,
            history=settings.rollouts.history,
        )
        self._makers = {
            name: resolve(name, options) for name, options in settings.environments.items()
        }
        self._episodes: set[asyncio.Task[None]] = set()
        self._evaluations: set[asyncio.Task[Trajectory]] = set()
        self._num_evaluated = 0
        self._evaluation_slots = asyncio.Semaphore(settings.rollouts.slots_per_actor)
        self._finished: list[Trajectory] = []
        self._num_deaths_seen = 0
        """Of the queue: what was taken before the last one is not kept."""
        self._num_sending = 0
        self._is_taking = False
        self._is_running = False
        self._is_stopping = False
        # One waiter each: an event that two loops clear can lose a wake-up.
        self._has_free_slots = asyncio.Event()
        self._has_finished = asyncio.Event()

    async def run(self) -> None:
        """Take, play and hand over until `stop`.

        Raises: QueueUnreachable; RuntimeError when it runs already.
        """
        if self._is_running:
            raise RuntimeError("environment actor: run was called twice; call it once")
        self._is_running = True
        self._is_taking = True
        loops = [asyncio.create_task(self._take_forever()), asyncio.create_task(self._send_all())]
        try:
            await asyncio.gather(*loops)
        finally:
            for task in (*loops, *self._episodes):
                task.cancel()
            self._is_running = False

    async def ping(self) -> None:
        """Answer; an actor whose event loop is blocked does not."""

    async def num_evaluated(self) -> int:
        """A number that grows while an evaluation gets on: the episodes of all that have ended."""
        return self._num_evaluated

    async def stop(self, *, drain_s: float = 0.0, limit_s: float = 30.0) -> None:
        """Take nothing more; give episodes drain_s to end, cancel the rest, hand all of it over.

        Returns when `run` has ended, or after limit_s beyond the drain.
        """
        self._is_stopping = True
        self._has_free_slots.set()
        loop = asyncio.get_running_loop()
        drain_end = loop.time() + drain_s
        while loop.time() < drain_end and self._episodes:
            await asyncio.wait(tuple(self._episodes), timeout=drain_end - loop.time())
        end = loop.time() + limit_s
        while self._is_running and loop.time() < end:
            self._cancel_all()
            await asyncio.sleep(0.02)
        self._cancel_all()

    async def evaluate(
        self, tasks: Sequence[Task], *, temperature: float = 0.0
    ) -> list[TrajectorySummary]:
        """Play each task once, beside the training episodes and counted apart from them.

        Returns: one summary a task, in their order; nothing goes to the queue.
        """
        assignments = [_evaluation(task) for task in tasks]
        plays = [
            asyncio.create_task(self._evaluate_one(assignment, temperature=temperature))
            for assignment in assignments
        ]
        self._evaluations.update(plays)
        try:
            await asyncio.wait(plays) if plays else None
        finally:
            self._evaluations.difference_update(plays)
            for play in plays:
                play.cancel()
        return [
            summarize(
                Trajectory.of(assignment, Outcome.CANCELLED, detail="the actor was stopped")
                if play.cancelled()
                else play.result(),
                num_bytes=0,
            )
            for assignment, play in zip(assignments, plays, strict=True)
        ]

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
                    self._episodes.add(task)
                    task.add_done_callback(partial(self._on_end, assignment, num_deaths))
        finally:
            self._is_taking = False
            self._has_finished.set()

    def _free_slots(self) -> int:
        held = len(self._episodes) + len(self._finished) + self._num_sending
        return self._settings.rollouts.slots_per_actor - held

    async def _take(self, max_count: int) -> list[RolloutAssignment]:
        # Not tried again: an answer that was lost may have held assignments.
        settings = self._settings
        call = self._queue.take_rollouts.remote(
            self._actor_id, max_count, settings.poll_s, tuple(self._makers)
        )
        limit_s = settings.poll_s + settings.queue_deadline_s
        try:
            assignments: list[RolloutAssignment] = await within(limit_s, call)
        except ActorUnavailableError as error:
            raise QueueDied(describe(error)) from error
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"take_rollouts: {describe(error)}") from error
        return assignments

    async def _begin_anew(self) -> None:
        """Drop what is held, and tell the queue.

        Raises: QueueUnreachable.
        """
        self._num_deaths_seen += 1
        for task in self._episodes:
            task.cancel()
        self._finished.clear()
        settings = self._settings

        async def give_back() -> None:
            call = self._queue.give_back.remote(self._actor_id)
            await within(settings.queue_deadline_s, call)

        try:
            await retry(give_back, on=ActorUnavailableError, limit_s=settings.queue_deadline_s)
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"give_back: {describe(error)}") from error

    async def _play(self, assignment: RolloutAssignment, num_deaths: int) -> None:
        self._keep(await self._episode(assignment), num_deaths)

    def _on_end(
        self, assignment: RolloutAssignment, num_deaths: int, task: asyncio.Task[None]
    ) -> None:
        self._episodes.discard(task)
        # A task that is cancelled before its first step never runs at all.
        if task.cancelled():
            cancelled = Trajectory.of(
                assignment, Outcome.CANCELLED, detail="cancelled before it began"
            )
            self._keep(cancelled, num_deaths)

    def _keep(self, trajectory: Trajectory, num_deaths: int) -> None:
        """num_deaths: of the queue, that were seen when its rollout was taken."""
        if num_deaths == self._num_deaths_seen:
            self._finished.append(trajectory)
            self._has_finished.set()
        else:
            self._has_free_slots.set()

    async def _episode(
        self, assignment: RolloutAssignment, *, temperature: float | None = None
    ) -> Trajectory:
        rollouts = self._settings.rollouts
        if temperature is not None:
            rollouts = replace(rollouts, temperature=temperature)
        try:
            return await play_episode(
                assignment,
                make_environment=self._maker(assignment.task.environment),
                policy=self._client(),
                renderer=self._renderer,
                settings=rollouts,
                max_context_tokens=self._settings.max_context_tokens,
                keeps_last_observation=self._settings.keeps_last_observation,
            )
        except Exception as error:
            # The outermost frame of an episode: an error of ours must cost one rollout, not a slot.
            logger.exception("rollout %s: the turn loop raised", assignment.rollout_id)
            return Trajectory.of(assignment, Outcome.INFRASTRUCTURE_ERROR, detail=describe(error))

    def _maker(self, name: str) -> Callable[[], Environment]:
        def refuse() -> Environment:
            raise UnknownEnvironment(
                f"environment actor: got a task of {name!r}, expected one of "
                f"{', '.join(self._makers)}; add it to the run's environments"
            )

        return self._makers.get(name, refuse)

    def _client(self) -> PolicyClient:
        # Made within the event loop that uses it, and only when there is something to play.
        if self._policy is None:
            self._policy = self._make_policy()
        return self._policy

    async def _evaluate_one(
        self, assignment: RolloutAssignment, *, temperature: float
    ) -> Trajectory:
        async with self._evaluation_slots:
            trajectory = await self._episode(assignment, temperature=temperature)
        self._num_evaluated += 1
        return trajectory

    def _cancel_all(self) -> None:
        for task in (*self._episodes, *self._evaluations):
            # Once each: a second cancellation would cut the environment's closing short.
            if not task.cancelling():
                task.cancel()

    # -- handing over ------------------------------------------------------------------------

    async def _send_all(self) -> None:
        while self._is_taking or self._episodes or self._finished:
            if not self._finished:
                await self._wait_for(self._has_finished)
                continue
            if len(self._finished) < self._settings.max_block:
                await asyncio.sleep(self._settings.tick_s)
            block = self._finished[: self._settings.max_block]
            del self._finished[: len(block)]
            self._num_sending = len(block)
            await self._send(block)
            self._num_sending = 0
            self._has_free_slots.set()

    async def _send(self, block: Sequence[Trajectory]) -> None:
        encoded = encode(block)
        summaries = [
            summarize(trajectory, num_bytes=encoded.row_num_bytes(row))
            for row, trajectory in enumerate(block)
        ]
        settings = self._settings

        async def put() -> None:
            # By value: the queue stores it as its own, so that it outlives this actor.
            call = self._queue.put.remote(self._actor_id, encoded, summaries)
            try:
                await within(settings.queue_deadline_s, call)
            except (RayError, TimeoutError) as error:
                logger.warning("put: %s", describe(error))
                raise

        try:
            await retry(
                put,
                on=(RayError, TimeoutError),
                limit_s=settings.queue_deadline_s,
                first_pause_s=0.5,
            )
        except (RayError, TimeoutError) as error:
            raise QueueUnreachable(f"put: {describe(error)}") from error

    async def _wait_for(self, event: asyncio.Event) -> None:
        event.clear()
        await is_set_within(self._settings.poll_s, event)


def _evaluation(task: Task) -> RolloutAssignment:
    rollout_id = f"evaluation-{task.task_id}"
    return RolloutAssignment(
        rollout_id=rollout_id, group_id=rollout_id, group_number=-1, attempt=0, task=task
    )
