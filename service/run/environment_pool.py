"""The environment actors of one term: a pool of players that plays evaluations too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost, wait_while_moving, within
from actors.types import Task, TrajectorySummary
from service.run.actor_pool import ENVIRONMENT_ACTORS, ActorPool, Member
from service.run.remote_handles import await_reply
from service.run.restartable_queue import RestartableQueue
from service.telemetry.recorder import RunRecorder

EVALUATION_LOOK_S = 2.0


class EnvironmentPool(ActorPool):
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
        """As ActorPool. evaluation_idle_s: an evaluation in which no rollout has ended for as long
        is given up."""
        super().__init__(
            num_actors,
            start_actor,
            kind=ENVIRONMENT_ACTORS,
            term=term,
            frozen_after_s=frozen_after_s,
            queue=queue,
            recorder=recorder,
            show_answering=recorder.environment_actors,
        )
        self._evaluation_idle_s = evaluation_idle_s

    async def evaluate(
        self, tasks: Sequence[Task], *, temperature: float = 0.0, slots_share: float = 1.0
    ) -> list[TrajectorySummary]:
        """Play tasks, shared out over the actors. slots_share: as `EnvironmentActor.evaluate`.

        A share whose actor dies is left out: an evaluation is a measurement, not work to be kept.
        One that makes no progress is ended too.
        """
        size = len(self._members)
        shares = [list(tasks[index::size]) for index in range(size)]
        answers = await asyncio.gather(
            *(
                self._evaluate(member, share, temperature=temperature, slots_share=slots_share)
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

    async def _evaluate(
        self, member: Member, share: list[Task], **settings: float
    ) -> list[TrajectorySummary]:
        """Raises: ActorLost when the actor dies, or no rollout ends for too long."""
        playing = member.actor.evaluate.remote(share, **settings)
        answer = asyncio.ensure_future(playing)
        name = f"{ENVIRONMENT_ACTORS.name} {member.actor_id}"

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
