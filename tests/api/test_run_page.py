"""Tests of the web page's routes: the state of the run, the journal, a trajectory's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.record_builders import step_record
from worlds.parts.local_page import LocalPage
from worlds.parts.local_run import LocalRun
from worlds.parts.submission_service import Service

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.types import Outcome
from service.access.keys import digest_of
from service.api.app import create_app
from service.api.run_page import add_page
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings
from service.page.packed import empty_page

KEY = "0123456789abcdef"
PLAIN = HttpSettings(
    rollouts=RolloutSettings(),
    service=ServiceSettings(),
    algorithm=AlgorithmSettings(group_size=2),
    environments=("guessing",),
    key_digest=digest_of(KEY),
)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = await Service(tmp_path).begin()
    yield service
    service.store.close()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(LocalRun(service), PLAIN)
    add_page(app, LocalPage(service))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {KEY}"},
    ) as client:
        yield client


async def test_the_page_needs_no_key_but_its_data_does(client: httpx.AsyncClient) -> None:
    page = await client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200 and page.text == empty_page()
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    for path in ("run", "journal", "rollouts/a-0/trajectory"):
        answer = await client.get(f"/api/v1/{path}", headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 401


async def test_the_page_gets_only_new_steps_but_all_steps_after_a_recovery(
    client: httpx.AsyncClient, service: Service
) -> None:
    async def steps(**asked: int) -> tuple[int, list[int]]:
        answer = (await client.get("/api/v1/run", params=asked)).json()
        return answer["term"], answer["steps"].get("step", [])

    assert await steps() == (1, [])
    for step in (1, 2, 3):
        await service.recorder.step(step_record(step))
    assert await steps() == (1, [1, 2, 3])
    assert await steps(term=1, after=2) == (1, [3])
    assert await steps(term=7, after=2) == (1, [1, 2, 3])
    assert (await client.get("/api/v1/run", params={"after": -1})).status_code == 422


async def test_the_journal_is_listed_in_pages_and_with_filters(
    client: httpx.AsyncClient, service: Service
) -> None:
    assert (await client.get("/api/v1/journal")).json() == {"trajectories": [], "next": None}
    cut = group_of(1, [1, 0, 0], outcomes={2: Outcome.TRUNCATED_TOKENS})
    for step in (1, 2):
        await service.recorder.step(step_record(step))
    written(service.directory, step_of([group_of(0, [1, 0])]), step_of([cut], number=2))

    async def ids(**asked: Any) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            asked_now = asked if cursor is None else {**asked, "cursor": cursor}
            answer = (await client.get("/api/v1/journal", params=asked_now)).json()
            found += [line["id"] for line in answer["trajectories"]]
            if (cursor := answer["next"]) is None:
                return found

    everything = [f"g000001.0-{n}.a0" for n in range(3)] + [f"g000000.0-{n}.a0" for n in range(2)]
    for limit in (1, 2, 5, 100):
        assert await ids(limit=limit) == everything
    assert await ids(step=1) == everything[3:]
    assert await ids(outcome="truncated_tokens") == [everything[2]]
    assert await ids(task="task-g000000.0", limit=1) == everything[3:]
    assert await ids(task="other") == []


async def test_a_trajectory_is_found_by_its_id_its_rollout_and_its_task(
    client: httpx.AsyncClient, service: Service
) -> None:
    await service.recorder.step(step_record(1))
    step = step_of([group_of(0, [1, 0])])
    written(service.directory, step)
    names = ("g000000.0-1.a0", "g000000.0-1", "task-g000000.0-1")
    answers = [await client.get(f"/api/v1/rollouts/{name}/trajectory") for name in names]
    first, *others = [answer.json() for answer in answers]
    assert first["id"] == "g000000.0-1.a0" and others == [first, first]
    assert first["step"] == 1 and len(first["samples"][0]["ids"]) > 0
    unknown = await client.get("/api/v1/rollouts/task-9-7/trajectory")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not-in-journal")
