"""Calls to the merge actor that survive its death: a new actor repeats the call.

The merge actor builds the training batch of each step. It has no state: each result depends only on
the arguments of its call. Ray frees the objects of a dead process. The shards that the actor
returns are therefore copied, so that the calling process owns them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost
from actors.merge.actor import BuiltStep
from actors.trajectory_queue.messages import StepInput
from service.remote_calls import await_reply, reason_of
from service.run.remote_handles import MERGE_DEADLINE_S

# Number of actors that try a call before its error is raised.
MAX_ATTEMPTS = 3
# Limit for fetching the built shards, in order to store them again.
FETCH_DEADLINE_S = 60.0


class RestartableMerge:
    """Builds training batches in the merge actor, and replaces the actor if it dies or is late.

    The new actor repeats the call.
    Raises: ActorLost if MAX_ATTEMPTS actors die or are late in one call; PayloadsLost if data of
        finished rollouts are lost; ScoresLost, from `build`, if a rank died with its scores.
    """

    def __init__(
        self, start_actor: Callable[[], ActorHandle], *, on_restart: Callable[[str], None]
    ) -> None:
        """Start the actor. on_restart: called with a sentence each time the actor is replaced."""
        self._start_actor = start_actor
        self._on_restart = on_restart
        self._actor = start_actor()

    async def plan(self, step_input: StepInput, version: int) -> tuple[Any, ...]:
        """Divide the rows that the trainer must score into one shard for each rank.

        Returns: a reference to each shard.
        """

        async def plan() -> tuple[Any, ...]:
            return await _own(await self._ask("plan", step_input, version))

        return await self._again(plan)

    async def build(
        self,
        step_input: StepInput,
        version: int,
        scores: Sequence[Any],
        republished: Sequence[int],
    ) -> BuiltStep:
        """Build the batch of a step; the result has a reference to a shard for each rank.

        scores: references to the scores of the shards of `plan`; empty if `plan` was not called.
        republished: versions that restarted ranks published without training a new step.
        """

        async def build() -> BuiltStep:
            built = await self._ask("build", step_input, version, scores, republished)
            return replace(built, shards=await _own(built.shards))

        return await self._again(build)

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._actor, method).remote(*arguments)
        return await await_reply(call, name="merge actor", deadline_s=MERGE_DEADLINE_S)

    async def _again(self, call: Callable[[], Any]) -> Any:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await call()
            except ActorLost as loss:
                if attempt == MAX_ATTEMPTS:
                    raise
                self.kill()
                self._actor = self._start_actor()
                self._on_restart(f"{loss}; a new merge actor makes the batch again")
        raise AssertionError("unreachable: the last attempt returns or raises")


async def _own(references: Sequence[Any]) -> tuple[Any, ...]:
    """Copy Ray objects, so that this process owns the copies; return references to the copies."""
    try:
        return await asyncio.to_thread(_put_again, list(references))
    except RayError as error:
        raise ActorLost(f"the merge actor died: {reason_of(error)}") from error


def _put_again(references: list[Any]) -> tuple[Any, ...]:
    return tuple(ray.put(each) for each in ray.get(references, timeout=FETCH_DEADLINE_S))
