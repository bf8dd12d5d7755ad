"""Evaluations on environment actors: real actors, of a few lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import ray

from actors.environment.tasks import GeneratedTasks
from actors.types import Task
from service.run.environment_pool import EnvironmentPool

pytestmark = [pytest.mark.usefixtures("cluster")]


@ray.remote(num_cpus=0, max_concurrency=10)
class Slow:
    """An environment actor that has ended another rollout at each look, num_rollouts of them, and
    then stands still until it is told to answer."""

    def __init__(self, num_rollouts: int) -> None:
        self.story: list[str] = []
        self.num_rollouts = num_rollouts
        self.num_ended = 0
        self.may_answer = asyncio.Event()

    async def evaluate(self, tasks: Sequence[Task], **settings: float) -> list[str]:
        self.story.append("begun")
        try:
            while self.num_ended < self.num_rollouts:
                await asyncio.sleep(0.1)
            await self.may_answer.wait()
            return ["summary"]
        finally:
            self.story.append("ended")

    async def num_evaluated(self) -> int:
        self.num_ended = min(self.num_ended + 1, self.num_rollouts)
        return self.num_ended

    async def answer(self) -> None:
        self.may_answer.set()

    async def told(self) -> list[str]:
        return self.story


class Notices:
    """A recorder."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.num_alive: list[int] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def environment_actors(self, num_alive: int) -> None:
        self.num_alive.append(num_alive)


def make_pool(actor: Any, recorder: Notices, *, idle_s: float) -> EnvironmentPool:
    return EnvironmentPool(
        1,
        lambda actor_id: actor,
        term=1,
        frozen_after_s=60.0,
        queue=cast(Any, None),
        recorder=cast(Any, recorder),
        evaluation_idle_s=idle_s,
    )


async def test_an_evaluation_takes_as_long_as_rollouts_end() -> None:
    actor, recorder = Slow.remote(num_rollouts=5), Notices()
    await actor.answer.remote()
    pool = make_pool(actor, recorder, idle_s=6.0)
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(1)
    began = time.monotonic()
    assert await pool.evaluate(tasks) == ["summary"] and recorder.notices == []
    assert time.monotonic() - began > 6.0
    pool.kill()


async def test_an_evaluation_without_progress_is_ended_and_does_not_play_on() -> None:
    actor, recorder = Slow.remote(num_rollouts=0), Notices()
    pool = make_pool(actor, recorder, idle_s=2.0)
    assert await actor.told.remote() == []
    found = await pool.evaluate(GeneratedTasks("guessing", run_seed=0).held_out(1))
    assert found == [] and "part of an evaluation is missing" in recorder.notices[0]
    for _ in range(100):
        if (story := await actor.told.remote()) == ["begun", "ended"]:
            break
        await asyncio.sleep(0.1)
    assert story == ["begun", "ended"]
    pool.kill()
