"""Tests of the requests of `helm test` with the real application of the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from worlds.builders.queue_builders import end, take_all
from worlds.parts.local_run import LocalRun, LocalSessions
from worlds.parts.submission_service import Service
from worlds.servers.helm_chart import CHART, CPU_DEV, VARIANTS, arguments_of, one, rendered

from actors.deadline import within
from actors.types import Outcome
from deploy.train_job import RunArguments
from service.api.app import create_app
from service.api.settings import KEY_VARIABLE, http_settings
from service.config.tree import Config
from service.gateway.routes import add_sessions
from service.intake.listing import TaskFilter

# Each test starts a process and a server. Together they take twenty seconds.
pytestmark = [pytest.mark.proof, pytest.mark.chart]

KEY = "the key of the API, of a release"
LIMIT_S = 60.0
MIXTURE = {
    **yaml.safe_load((CHART.parent / "docs" / "examples" / "mixture.yaml").read_text("utf-8")),
    "tasks": None,
}


@contextlib.asynccontextmanager
async def serving(
    config: Config, directory: Path, *, outcome: Outcome = Outcome.COMPLETED
) -> AsyncIterator[tuple[str, LocalRun]]:
    """Serve the API of a configuration on this machine; admitted tasks end with the outcome."""
    os.environ[KEY_VARIABLE] = KEY
    settings = http_settings(config)
    service = await Service(directory, settings=config.service).begin()
    run, sessions = LocalRun(service), LocalSessions(service, config.sessions)
    app = create_app(run, settings)
    add_sessions(app, run, sessions, settings)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
    )

    async def play() -> None:
        while True:
            await sessions.admit()
            for assignment in take_all(service.queue, environments=settings.environments):
                end(service.queue, assignment, outcome=outcome)
            service.drain()
            await asyncio.sleep(0.02)

    work = [asyncio.create_task(each) for each in (server.serve(), play())]
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", run
    finally:
        server.should_exit = True
        work[1].cancel()
        await asyncio.gather(*work, return_exceptions=True)
        sessions.close()
        service.store.close()


async def checked(
    values: dict[str, Any],
    *files: Path,
    directory: Path,
    outcome: Outcome = Outcome.COMPLETED,
) -> tuple[str, list[dict[str, Any]]]:
    """Run the container's program and return its output and the tasks that it submitted."""
    manifests = rendered(values, *files)
    config = RunArguments.model_validate(arguments_of(manifests)).read_config()
    container = one(manifests, "Pod")["spec"]["containers"][0]
    told = json.loads(next(e["value"] for e in container["env"] if e["name"] == "RELEASE_CHECK"))
    told["checks"] = [each for each in told["checks"] if each in ("health", "rollout", "session")]
    async with serving(config, directory, outcome=outcome) as (address, run):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            *container["args"],
            env={
                **os.environ,
                "RELEASE_CHECK": json.dumps({**told, "api": address, "limit_s": 10}),
                KEY_VARIABLE: KEY,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await within(LIMIT_S, process.communicate())
        page = await run.tasks(TaskFilter(), after=0, limit=100)
    views = [
        {"status": each.status.value, "environment": each.environment, "n": len(each.rollouts)}
        for each in page.items
    ]
    return printed.decode(), views


def with_tasks(tasks: dict[str, Any], directory: Path) -> Path:
    """Write a copy of values-cpu-dev with other tasks, because Helm would merge the options."""
    values = yaml.safe_load(CPU_DEV.read_text("utf-8"))
    values["config"]["tasks"] = tasks
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize("files", VARIANTS.values(), ids=list(VARIANTS))
async def test_the_check_of_every_value_set_is_accepted_by_its_api(
    files: tuple[Path, ...], tmp_path: Path
) -> None:
    printed, [task] = await checked({}, *files, directory=tmp_path)
    assert printed == "ok health\nok rollout\n"
    assert task == {"status": "cancelled", "environment": "guessing", "n": 2}


@pytest.mark.parametrize("least", [3, 16])
async def test_as_many_rollouts_are_played_as_a_group_needs(least: int, tmp_path: Path) -> None:
    config = {"algorithm": {"min_group_size": least}}
    printed, [task] = await checked({"config": config}, directory=tmp_path)
    assert printed == "ok health\nok rollout\n" and task["n"] == least


async def test_one_environment_of_a_mixture_is_played(tmp_path: Path) -> None:
    printed, [task] = await checked({"config": MIXTURE}, directory=tmp_path)
    assert printed == "ok health\nok rollout\n"
    assert task["environment"] in MIXTURE["mixture"]


async def test_the_check_plays_an_entry_of_a_mixture_that_needs_no_data(tmp_path: Path) -> None:
    reads = {"tasks": {"environment": "reasoning_gym", "file": "/opt/a.jsonl"}}
    config = {**MIXTURE, "mixture": {"a": reads, "z": MIXTURE["mixture"]["fit"]}}
    printed, [task] = await checked({"config": config}, directory=tmp_path)
    assert printed == "ok health\nok rollout\n" and task["environment"] == "z"


async def test_a_release_for_external_agents_is_checked_with_a_turn_of_a_session(
    tmp_path: Path,
) -> None:
    tasks = {"environment": "session", "evaluation_tasks": 0}
    printed, [task] = await checked({}, with_tasks(tasks, tmp_path), directory=tmp_path)
    assert printed == "ok health\nok session\n"
    assert task == {"status": "cancelled", "environment": "session", "n": 2}


async def test_an_environment_that_needs_data_gets_minimal_data_by_its_schema(
    tmp_path: Path,
) -> None:
    tasks = {"environment": "reasoning_gym", "file": "/opt/tasks.jsonl"}
    printed, [task] = await checked({}, with_tasks(tasks, tmp_path), directory=tmp_path)
    assert printed == "ok health\nok rollout\n" and task["environment"] == "reasoning_gym"


@pytest.mark.parametrize(
    ("values", "outcome", "words"),
    [
        (
            {"test": {"task": {"data": {"high": "x"}}}},
            Outcome.COMPLETED,
            "FAILED rollout: the task is refused: status 422",
        ),
        ({}, Outcome.ENVIRONMENT_ERROR, "FAILED rollout: its rollouts ended as environment_error"),
    ],
)
async def test_a_task_that_cannot_be_played_is_reported_with_the_value_to_set(
    values: dict[str, Any], outcome: Outcome, words: str, tmp_path: Path
) -> None:
    printed, _ = await checked(values, directory=tmp_path, outcome=outcome)
    assert words in printed and "set test.task to a task that this environment plays" in printed
