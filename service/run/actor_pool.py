"""Start the actors that play a term's rollouts, watch them, and replace dead or frozen ones.

Invariant: a dead actor's rollouts are returned to the queue before a new actor takes its slot, so
that no rollout is lost and none is counted twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost, race, within
from actors.metrics import Part
from service.remote_calls import await_reply, reason_of
from service.run.recorder import RunRecorder
from service.run.restartable_queue import RestartableQueue

log = logging.getLogger("rayloom.pool")

STOP_DEADLINE_S = 40.0
# Number of early deaths in a row that end the term. A death is early if it occurs less than
# EARLY_DEATH_S after the actor's start.
MAX_EARLY_DEATHS = 5
EARLY_DEATH_S = 30.0
START_DEADLINE_S = 300.0
PING_EVERY_S = 5.0


class ActorPool:
    """A pool that keeps its actors alive; each actor has the methods `run`, `ping` and `stop`.

    The constructor starts the actors; they play rollouts while `watch` runs. There is a subclass
    for each kind of actor. It sets the names of its actors in ids and messages.
    """

    part: Part
    kind: str
    """Name of this kind of actor in messages, such as `gateway`."""
    id_prefix: str
    """Beginning of an actor's id, before the term and a number: `gateway` in gateway-2-0."""
    resumption: str
    """Words in the message about a dead actor, between `7 rollouts` and the new actor's id.

    Example: `are played again by`
    """
    why_blocked: str
    """The likely reason, for messages, why the event loop of such an actor does not answer."""

    def __init__(
        self,
        num_actors: int,
        start_actor: Callable[[str], ActorHandle],
        *,
        term: int,
        frozen_after_s: float,
        queue: RestartableQueue,
        recorder: RunRecorder,
        show_answering: Callable[[int], None] = lambda num_answering: None,
    ) -> None:
        """Start the actors.

        Args: start_actor: function that starts the actor with the given id. term: number of the
        term; it is a part of each actor's id, so that later terms never repeat an id.
        frozen_after_s: seconds without an answer after which an actor is replaced. show_answering:
        function that is called with the number of answering actors whenever this number changes.
        """
        self._start_actor = start_actor
        self._term = term
        self._frozen_after_s = frozen_after_s
        self._queue = queue
        self._recorder = recorder
        self._show_answering = show_answering
        self._numbers = itertools.count()
        self._answering: set[str] = set()
        """Ids of the living actors that have answered at least once."""
        self.actors: dict[str, ActorHandle] = {}
        """The current actors by id; an actor may be starting, or be dead and not yet replaced."""
        for _ in range(num_actors):
            self._start_next()

    async def watch(self) -> None:
        """Run every actor and replace dead ones; never return.

        Raises: ActorLost if actors die again and again right after their start, or if the queue is
            lost.
        """
        tasks = [asyncio.create_task(self._keep_alive(actor_id)) for actor_id in self.actors]
        try:
            await asyncio.gather(*tasks)
            # Only a pool without actors reaches this line.
            await asyncio.Event().wait()
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Let the actors send their results, then end them."""
        actors = dict(self.actors)
        stops = [
            await_reply(actor.stop.remote(), name=self.kind, deadline_s=STOP_DEADLINE_S)
            for actor in actors.values()
        ]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for actor_id, result in zip(actors, results, strict=True):
            if isinstance(result, BaseException):
                log.warning("an actor did not stop in order and was killed: %s", result)
            else:
                self._heard(actor_id, result)
            self._ended(actor_id)
        self.kill()

    def kill(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)

    async def _keep_alive(self, actor_id: str) -> None:
        """Run an actor and its successors, one after the other; never return."""
        num_early_deaths = 0
        while True:
            started = time.monotonic()
            cause = await self._run_to_death(actor_id)
            lived_s = time.monotonic() - started
            num_early_deaths = 0 if lived_s > EARLY_DEATH_S else num_early_deaths + 1
            if num_early_deaths >= MAX_EARLY_DEATHS:
                raise ActorLost(
                    f"{self.kind}s died {num_early_deaths} times in a row within "
                    f"{EARLY_DEATH_S:g} s of their start; the last: {cause}"
                )
            ray.kill(self.actors[actor_id])
            num_released = await self._queue.release_actor(actor_id)
            dead_id, actor_id = actor_id, self._start_next()
            del self.actors[dead_id]
            self._recorder.replaced(
                self.part,
                f"{self.kind} {dead_id} died ({cause}); {num_released} rollouts "
                f"{self.resumption} {actor_id}",
            )

    async def _run_to_death(self, actor_id: str) -> str:
        """Run the actor until it stops, dies or freezes; return the reason why it ended."""
        try:
            async with race(self._until_stopped(actor_id), self._until_frozen(actor_id)) as ends:
                cause: str = next(end for end in ends if end.done()).result()
                return cause
        finally:
            self._answering.discard(actor_id)
            self._show_answering(len(self._answering))
            self._ended(actor_id)

    async def _until_stopped(self, actor_id: str) -> str:
        try:
            await self.actors[actor_id].run.remote()
        except RayError as error:
            return reason_of(error)
        return "it stopped by itself"

    async def _until_frozen(self, actor_id: str) -> str:
        limit_s, actor = self._frozen_after_s, self.actors[actor_id]
        try:
            self._heard(actor_id, await within(START_DEADLINE_S, actor.ping.remote()))
            self._answering.add(actor_id)
            self._show_answering(len(self._answering))
            while True:
                self._heard(actor_id, await within(limit_s, actor.ping.remote()))
                await asyncio.sleep(PING_EVERY_S)
        except TimeoutError:
            return (
                f"it answered nothing for {limit_s:g} s; either its process is frozen, or "
                f"{self.why_blocked}"
            )
        except RayError as error:
            return reason_of(error)

    def _heard(self, actor_id: str, answer: Any) -> None:
        """Process an actor's answer to `ping` or `stop`. Subclasses may override this method."""

    def _ended(self, actor_id: str) -> None:
        """React to the end of an actor. Subclasses may override this method."""

    def _start_next(self) -> str:
        """Start another actor, and return its id."""
        actor_id = f"{self.id_prefix}-{self._term}-{next(self._numbers)}"
        self.actors[actor_id] = self._start_actor(actor_id)
        return actor_id


class GatewayPool(ActorPool):
    """The pool of the gateway, the one actor of a run that serves the sessions of clients."""

    part = "gateway"
    kind = "gateway"
    id_prefix = "gateway"
    resumption = "continue from their stored turns with"
    why_blocked = "its event loop is overloaded"
