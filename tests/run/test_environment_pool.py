"""Tests of evaluations on environment actors, with small real actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from worlds.builders.record_builders import lost_calls
from worlds.builders.trajectory_builders import make_summary

from actors.environment.evaluation import Played
from actors.environment.settings import Sampling
from actors.environment.tasks import GeneratedTasks
from actors.metrics import Metrics
from actors.types import RolloutAssignment
from actors.user_code import LostCalls
from service.run.actor_pool import EnvironmentPool, EvaluationFiles
from service.telemetry.user_calls import UserCalls

pytestmark = [pytest.mark.usefixtures("cluster")]


@ray.remote(num_cpus=0, max_concurrency=10)
class Slow:
    """An environment actor that ends one rollout per call of `num_evaluated`.

    After `num_rollouts` it makes no progress, and it answers only after `answer` was called.
    """

    def __init__(self, num_rollouts: int) -> None:
        self.story: list[str] = []
        self.num_rollouts = num_rollouts
        self.num_ended = 0
        self.may_answer = asyncio.Event()

    async def evaluate(self, plays: Sequence[RolloutAssignment], **settings: float) -> list[Played]:
        self.story.append("begun")
        try:
            while self.num_ended < self.num_rollouts:
                await asyncio.sleep(0.1)
            await self.may_answer.wait()
            return [
                Played(
                    summary=replace(make_summary("g000000.0-0"), task_id=each.task.task_id),
                    line=ray.put(f"{each.task.task_id} {each.rollout_id[-1]}".encode()),
                )
                for each in plays
            ]
        finally:
            self.story.append("ended")

    async def num_evaluated(self) -> int:
        self.num_ended = min(self.num_ended + 1, self.num_rollouts)
        return self.num_ended

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def ping(self) -> tuple[tuple[LostCalls, ...], int]:
        return (lost_calls("my.py:score"),), 300

    async def stop(self) -> tuple[tuple[LostCalls, ...], int]:
        return (lost_calls("my.py:score", count=10),), 300

    async def answer(self) -> None:
        self.may_answer.set()

    async def told(self) -> list[str]:
        return self.story


class Notices:
    """A recorder that keeps its notices."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.num_alive: list[int] = []
        self.metrics = Metrics()
        self.user_calls = UserCalls(self.metrics, self.notice)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def environment_actors(self, num_alive: int) -> None:
        self.num_alive.append(num_alive)


def make_pool(
    actors: Sequence[Any], recorder: Notices, *, idle_s: float, directory: Path, keep: int = 2
) -> EnvironmentPool:
    left = list(actors)
    return EnvironmentPool(
        len(left),
        lambda actor_id: left.pop(0),
        term=1,
        frozen_after_s=60.0,
        queue=cast(Any, None),
        recorder=cast(Any, recorder),
        evaluation_idle_s=idle_s,
        files=EvaluationFiles(directory / "evaluations", keep=keep, notice=recorder.notice),
    )


TWO_SAMPLES = Sampling(num_samples=2, temperature=1.0)


@pytest.mark.proof
@pytest.mark.slow
async def test_an_evaluation_continues_as_long_as_rollouts_end(tmp_path: Path) -> None:
    actor, recorder = Slow.remote(num_rollouts=5), Notices()
    await actor.answer.remote()
    pool = make_pool([actor], recorder, idle_s=6.0, directory=tmp_path)
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(1)
    began = time.monotonic()
    assert len(await pool.evaluate(tasks, Sampling(), file="step-1")) == 1
    assert recorder.notices == [] and time.monotonic() - began > 6.0
    pool.kill()


async def test_an_evaluation_is_divided_among_actors_and_its_files_have_each_rollout(
    tmp_path: Path,
) -> None:
    actors, recorder = [Slow.remote(num_rollouts=1) for _ in range(2)], Notices()
    for actor in actors:
        await actor.answer.remote()
    pool = make_pool(actors, recorder, idle_s=60.0, directory=tmp_path)
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(3)
    for step in (1, 2, 3):
        found = await pool.evaluate(tasks, TWO_SAMPLES, file=f"step-{step}")
    assert [each.task_id for each in found] == [task.task_id for task in tasks for _ in range(2)]
    files = sorted((tmp_path / "evaluations").iterdir())
    assert [file.name for file in files] == ["step-2.jsonl", "step-3.jsonl"]
    assert files[1].read_text().splitlines() == [
        f"{task.task_id} {sample}" for task in tasks for sample in range(2)
    ]
    assert recorder.notices == []
    pool.kill()


@pytest.mark.proof
@pytest.mark.slow
async def test_rollouts_that_cannot_be_stored_are_reported_once_and_still_count(
    tmp_path: Path,
) -> None:
    actor, recorder = Slow.remote(num_rollouts=1), Notices()
    await actor.answer.remote()
    pool = make_pool([actor], recorder, idle_s=60.0, directory=tmp_path / "gone")
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(1)
    for _ in range(2):
        assert len(await pool.evaluate(tasks, TWO_SAMPLES, file="step-1")) == 2
    (notice,) = recorder.notices
    assert "evaluation step-1 is not in" in notice and "No such file" in notice
    assert not (tmp_path / "gone").exists()
    pool.kill()


@pytest.mark.proof
@pytest.mark.slow
async def test_an_evaluation_without_progress_is_ended_on_its_actor_too(
    tmp_path: Path,
) -> None:
    actor, recorder = Slow.remote(num_rollouts=0), Notices()
    pool = make_pool([actor], recorder, idle_s=2.0, directory=tmp_path)
    assert await actor.told.remote() == []
    tasks = GeneratedTasks("guessing", run_seed=0).held_out(1)
    found = await pool.evaluate(tasks, Sampling(), file="step-1")
    assert found == [] and "part of an evaluation is missing" in recorder.notices[0]
    for _ in range(100):
        if (story := await actor.told.remote()) == ["begun", "ended"]:
            break
        await asyncio.sleep(0.1)
    assert story == ["begun", "ended"]
    pool.kill()


async def test_lost_calls_are_reported_while_an_actor_runs_and_at_its_end(
    tmp_path: Path,
) -> None:
    actor, recorder = Slow.remote(num_rollouts=1), Notices()
    pool = make_pool([actor], recorder, idle_s=60.0, directory=tmp_path)
    memory = recorder.metrics.parts.worker_memory
    watching = asyncio.create_task(pool.watch())
    async with asyncio.timeout(60.0):
        while not recorder.notices:
            await asyncio.sleep(0.02)
    assert "my.py:score: 1 call was ended at its limit" in recorder.notices[0]
    (shown,) = memory.collect()
    assert shown.samples[0].value == 300
    await pool.stop()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert "my.py:score: 10 calls were" in recorder.notices[1]
    assert memory.collect() == []
