"""The environment actors of one term: started, watched, replaced when they die or freeze.

Invariant: a dead actor's rollouts are given back to the queue before its successor starts, so that
none is lost and none is counted twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost, wait_while_moving, within
from actors.metrics import Part
from actors.types import Task, TrajectorySummary
from service.run.remote_handles import await_reply, reason_of
from service.run.restartable_queue import RestartableQueue
from service.telemetry.recorder import RunRecorder

log = logging.getLogger("rayloom.environments")

EVALUATION_LOOK_S = 2.0
STOP_DEADLINE_S = 40.0
# A death within EARLY_DEATH_S of the start is early; so many in a row end the term.
MAX_EARLY_DEATHS = 5
EARLY_DEATH_S = 30.0
START_DEADLINE_S = 300.0
PING_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    actor_id: str
    actor: ActorHandle


class EnvironmentPool:
    """Keeps the actors alive, and plays evaluations on them."""

    def __init__(
        self,
        num_actors: int,
        start_actor: Callable[[str], ActorHandle],
        *,
        term: int,
        frozen_after_s: float,
        queue: RestartableQueue,
        recorder: RunRecorder,
        evaluation_idle_s: float,
    ) -> None:
        """start_actor: starts an actor, given its id. term: part of the ids, which never repeat.

        frozen_after_s: an actor that answers nothing for as long is replaced. evaluation_idle_s:
        an evaluation in which no rollout has ended for as long is given up.
        """
        self._start_actor = start_actor
        self._term = term
        self._frozen_after_s = frozen_after_s
        self._queue = queue
        self._recorder = recorder
        self._evaluation_idle_s = evaluation_idle_s
        self._numbers = itertools.count()
        self._answering: set[str] = set()
        """Ids of the actors that have answered, and not died since."""
        self._members = [self._new_member() for _ in range(num_actors)]

    async def watch(self) -> None:
        """Run every actor and replace those that die; never returns.

        Raises: ActorLost when actors die at once, again and again, or the queue is lost.
        """
        tasks = [asyncio.create_task(self._keep_alive(slot)) for slot in range(len(self._members))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def evaluate(self, tasks: Sequence[Task]) -> list[TrajectorySummary]:
        """Play tasks at temperature 0, shared out over the actors.

        A share whose actor dies is left out: an evaluation is a measurement, not work to be kept.
        One that makes no progress is ended too.
        """
        size = len(self._members)
        shares = [list(tasks[index::size]) for index in range(size)]
        answers = await asyncio.gather(
            *(
                self._evaluate(member, share)
                for member, share in zip(list(self._members), shares, strict=True)
                if share
            ),
            return_exceptions=True,
        )
        found: list[TrajectorySummary] = []
        for result in answers:
            if isinstance(result, ActorLost):
                self._recorder.notice(f"part of an evaluation is missing: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                found += result
        return found

    async def _evaluate(self, member: _Member, share: list[Task]) -> list[TrajectorySummary]:
        """Raises: ActorLost when the actor dies, or no rollout ends for too long."""
        playing = member.actor.evaluate.remote(share)
        answer = asyncio.ensure_future(playing)
        name = f"environment actor {member.actor_id}"

        async def progress() -> dict[int, int]:
            with suppress(RayError, TimeoutError):
                return {0: await within(EVALUATION_LOOK_S, member.actor.num_evaluated.remote())}
            return {}

        idle_s = self._evaluation_idle_s
        try:
            await wait_while_moving([answer], progress, idle_s=idle_s, look_s=EVALUATION_LOOK_S)
            if not answer.done():
                raise ActorLost(f"the {name} has ended no rollout for {idle_s:g} s")
            return await await_reply(answer, name=name, deadline_s=idle_s)
        finally:
            answer.cancel()
            # Of an answer that came, nothing; else what is still played, beside the training.
            ray.cancel(playing)

    async def stop(self) -> None:
        """Let the actors hand over what they hold, then end them."""
        stops = [
            await_reply(
                member.actor.stop.remote(), name="environment actor", deadline_s=STOP_DEADLINE_S
            )
            for member in self._members
        ]
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("not stopped in order, ended at once: %s", result)
        self.kill()

    def kill(self) -> None:
        for member in self._members:
            ray.kill(member.actor)

    async def _keep_alive(self, slot: int) -> None:
        num_early_deaths = 0
        while True:
            member = self._members[slot]
            started = time.monotonic()
            cause = await self._run_to_death(member)
            lived_s = time.monotonic() - started
            num_early_deaths = 0 if lived_s > EARLY_DEATH_S else num_early_deaths + 1
            if num_early_deaths >= MAX_EARLY_DEATHS:
                raise ActorLost(
                    f"environment actors died {num_early_deaths} times in a row within "
                    f"{EARLY_DEATH_S:g} s of their start; the last: {cause}"
                )
            ray.kill(member.actor)
            num_released = await self._queue.release_actor(member.actor_id)
            self._members[slot] = self._new_member()
            self._recorder.replaced(
                Part.ENVIRONMENT_ACTOR,
                f"environment actor {member.actor_id} died ({cause}); {num_released} rollouts "
                f"are played again by {self._members[slot].actor_id}",
            )

    async def _run_to_death(self, member: _Member) -> str:
        """Run the actor. Returns: why it ended, once it has stopped, died or frozen."""
        ends = [
            asyncio.create_task(self._until_stopped(member)),
            asyncio.create_task(self._until_frozen(member)),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end for end in ends if end.done()).result()
        finally:
            for end in ends:
                end.cancel()
            self._answering.discard(member.actor_id)
            self._recorder.environment_actors(len(self._answering))

    async def _until_stopped(self, member: _Member) -> str:
        try:
            await member.actor.run.remote()
        except RayError as error:
            return reason_of(error)
        return "it stopped by itself"

    async def _until_frozen(self, member: _Member) -> str:
        limit_s = self._frozen_after_s
        try:
            await within(START_DEADLINE_S, member.actor.ping.remote())
            self._answering.add(member.actor_id)
            self._recorder.environment_actors(len(self._answering))
            while True:
                await within(limit_s, member.actor.ping.remote())
                await asyncio.sleep(PING_EVERY_S)
        except TimeoutError:
            return (
                f"it answered nothing for {limit_s:g} s; either its process is frozen, or an "
                "environment blocks the event loop, where it should await"
            )
        except RayError as error:
            return reason_of(error)

    def _new_member(self) -> _Member:
        actor_id = f"environment-{self._term}-{next(self._numbers)}"
        return _Member(actor_id=actor_id, actor=self._start_actor(actor_id))
