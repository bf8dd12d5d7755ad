"""Evaluations on environment actors: real actors, of a few lines."""

from __future__ import annotations

import asyncio
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
    """An environment actor whose evaluations never end by themselves."""

    def __init__(self) -> None:
        self.story: list[str] = []

    async def evaluate(self, tasks: Sequence[Task]) -> None:
        self.story.append("begun")
        try:
            await asyncio.sleep(600)
        finally:
            self.story.append("ended")

    async def told(self) -> list[str]:
        return self.story


class Notices:
    """A recorder."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


async def test_an_evaluation_past_its_time_is_ended_and_does_not_play_on() -> None:
    actor, recorder = Slow.remote(), Notices()
    pool = EnvironmentPool(
        1,
        lambda actor_id: actor,
        term=1,
        frozen_after_s=60.0,
        queue=cast(Any, None),
        recorder=cast(Any, recorder),
        evaluation_deadline_s=2.0,
    )
    assert await actor.told.remote() == []
    found = await pool.evaluate(GeneratedTasks("guessing", run_seed=0).held_out(1))
    assert found == [] and "part of an evaluation is missing" in recorder.notices[0]
    for _ in range(100):
        if (story := await actor.told.remote()) == ["begun", "ended"]:
            break
        await asyncio.sleep(0.1)
    assert story == ["begun", "ended"]
    pool.kill()
