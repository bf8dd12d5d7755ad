"""Tests of environments, lists, long polls and the feed, with the real queue and store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.parts.local_run import LocalRun, LocalSessions
from worlds.parts.submission_service import Service

from actors.algorithm import AlgorithmSettings
from actors.environment.registry import resolve
from actors.environment.settings import RolloutSettings
from actors.environment.task_data import data_schema_of
from service.api.app import create_app
from service.api.settings import HttpSettings
from service.api.waiting import wait_of
from service.config.sections import ServiceSettings
from service.gateway.routes import add_sessions

API = "/api/v1"
URL = f"{API}/rollouts"
SETTINGS = HttpSettings(
    rollouts=RolloutSettings(),
    service=ServiceSettings(max_samples_per_task=8),
    algorithm=AlgorithmSettings(group_size=2),
    environments=("guessing",),
    data_schemas={"guessing": data_schema_of(resolve("guessing", {})())},
)


def client_of(
    run: LocalRun, settings: HttpSettings = SETTINGS, sessions: LocalSessions | None = None
) -> httpx.AsyncClient:
    app = create_app(run, settings, stream_s=0.2)
    add_sessions(app, run, sessions or LocalSessions(run.service), settings)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=30
    )


@pytest.fixture
async def run(tmp_path: Path) -> LocalRun:
    return LocalRun(await Service(tmp_path).begin())


@pytest.fixture
async def client(run: LocalRun) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(run) as client:
        yield client


def batch(*ids: str, **fields: Any) -> dict[str, Any]:
    return {"environment": "guessing", "tasks": [{"id": each, "seed": 3} for each in ids], **fields}


async def feed_of(client: httpx.AsyncClient, after: int = 0) -> list[dict[str, Any]]:
    """Return the feed's entries after a number, without fields that are null."""
    found = (await client.get(f"{API}/feed", params={"after": after})).json()
    return [
        {name: value for name, value in entry.items() if value is not None}
        for entry in found["entries"]
    ]


def short(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("task", "member", "step", "reason")
    return [(each["kind"], *(each[name] for name in names if name in each)) for each in entries]


async def test_environments_are_listed_with_the_schema_of_their_tasks(
    client: httpx.AsyncClient,
) -> None:
    found = (await client.get(f"{API}/environments")).json()["environments"]
    assert [(each["id"], each["submit_to"]) for each in found] == [
        ("guessing", URL),
        ("session", f"{API}/sessions"),
    ]
    one = (await client.get(f"{API}/environments/guessing")).json()
    assert one == found[0] and one["data_schema"]["additionalProperties"] is False
    answer = await client.get(f"{API}/environments/chess")
    assert answer.status_code == 404 and "guessing, session" in answer.json()["detail"]

    wrong = {"environment": "guessing", "tasks": [{"id": "a"}, {"id": "b", "data": {"lwo": "x"}}]}
    answer = await client.post(URL, json=wrong)
    body = answer.json()
    assert answer.status_code == 422 and body["code"] == "task-data"
    assert "task 'b': data: unknown fields lwo; expected none; leave them out" in body["detail"]
    assert body["errors"][0]["loc"] == ["body", "tasks", 1, "data"]
    assert (await client.get(f"{URL}/a")).status_code == 404
    # Large bodies are validated in a thread.
    wrong["tasks"][1]["data"] = {"x": "y" * 100_000}
    assert (await client.post(URL, json=wrong)).json()["code"] == "task-data"
    answer = await client.post(URL, json={"environment": "session", "tasks": [{"id": "a"}]})
    assert answer.status_code == 422 and f"{API}/sessions" in answer.json()["detail"]


async def test_an_environment_without_a_schema_accepts_any_object(run: LocalRun) -> None:
    async with client_of(run, replace(SETTINGS, data_schemas={})) as client:
        one = (await client.get(f"{API}/environments/guessing")).json()
        assert one["data_schema"] == {"type": "object"}
        task = {"id": "a", "data": {"nonsense": 1}}
        answer = await client.post(URL, json={"environment": "guessing", "tasks": [task]})
        assert answer.status_code == 202


async def test_tasks_are_listed_in_order_by_status_batch_and_environment(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    for name, fields in (("a", {"batch": "night"}), ("b", {}), ("c", {"batch": "night"})):
        await client.post(URL, json=batch(name, **fields))
    await client.post(f"{URL}/c/cancel")
    await run.service.admit()

    async def ids(**query: Any) -> tuple[list[str], int | None]:
        found = (await client.get(URL, params=query)).json()
        return [each["id"] for each in found["rollouts"]], found["next"]

    assert await ids() == (["a", "b", "c"], None)
    assert await ids(limit=2) == (["a", "b"], 2)
    assert await ids(limit=2, cursor=2) == (["c"], None)
    assert await ids(batch="night") == (["a", "c"], None)
    assert await ids(batch="night", status="cancelled") == (["c"], None)
    assert await ids(status="running") == (["a", "b"], None)
    assert await ids(status="trained") == ([], None)
    assert await ids(environment="session") == ([], None)
    first = (await client.get(URL)).json()["rollouts"][0]
    assert first["batch"] == "night" and first["num_samples"] == 2 and "samples" not in first
    for query in ({"status": "odd"}, {"limit": 0}, {"limit": 9999}, {"cursor": -1}):
        assert (await client.get(URL, params=query)).status_code == 422
    assert await ids(environment="uploaded") == ([], None)
    answer = await client.get(URL, params={"environment": "nope"})
    assert answer.status_code == 422 and "expected one of guessing, session" in answer.text
    # The same id with another batch is another request, hence a conflict.
    answer = await client.post(URL, json=batch("a", batch="day"))
    assert answer.status_code == 409


async def test_sessions_are_listed_by_group_and_status(run: LocalRun) -> None:
    sessions = LocalSessions(run.service)
    async with client_of(run, sessions=sessions) as client:
        for name in ("p", "q"):
            answer = await client.post(f"{API}/sessions", json={"id": name})
            assert answer.status_code == 201
            if name == "p":
                keys = [each["reward_key"] for each in answer.json()["sessions"]]
                await sessions.admit()

        async def ids(**query: Any) -> tuple[list[str], str | None]:
            found = (await client.get(f"{API}/sessions", params=query)).json()
            return [each["id"] for each in found["sessions"]], found["next"]

        assert await ids() == (["p-0", "p-1", "q-0", "q-1"], None)
        assert await ids(limit=3) == (["p-0", "p-1", "q-0"], "2.0")
        assert await ids(cursor="2.0") == (["q-1"], None)
        assert await ids(group="q") == (["q-0", "q-1"], None)
        assert await ids(status="open") == (["p-0", "p-1"], None)
        assert await ids(status="queued", group="p") == ([], None)
        finish = {"authorization": f"Bearer {keys[1]}"}
        path = f"{API}/sessions/p-1/finish"
        assert (await client.post(path, json={"reward": 0.5}, headers=finish)).status_code == 200
        assert await ids(status="finished") == (["p-1"], None)
        assert (await client.get(f"{API}/sessions", params={"cursor": "x"})).status_code == 422
        entries = await feed_of(client)
        assert short(entries) == [
            ("accepted", "p"),
            ("session_opened", "p", 0),
            ("session_opened", "p", 1),
            ("accepted", "q"),
            ("session_ended", "p", 1),
        ]
        assert entries[-1]["session_status"] == "finished" and entries[-1]["reward"] == 0.5
    sessions.close()


async def test_a_client_may_wait_for_a_task_a_session_and_the_feed(run: LocalRun) -> None:
    sessions = LocalSessions(run.service)
    async with client_of(run, sessions=sessions) as client:
        await client.post(URL, json=batch("a"))
        await client.post(f"{API}/sessions", json={"id": "p"})
        wait = {"prefer": "respond-async, wait=20"}

        async def later(work: Any) -> None:
            await asyncio.sleep(0.2)
            await work

        began = time.monotonic()
        for path, change in (
            (f"{API}/sessions/p-0", sessions.admit()),
            (f"{API}/sessions/p-0", client.delete(f"{API}/sessions/p-0")),
            (f"{URL}/a", client.post(f"{URL}/a/cancel")),
            (f"{API}/feed?after=6", client.post(URL, json=batch("b"))),
        ):
            answer, _ = await asyncio.gather(client.get(path, headers=wait), later(change))
            assert answer.status_code == 200
            assert answer.headers["preference-applied"] == "wait=20"
        assert time.monotonic() - began < 10
        # An ended or unknown task is answered at once; without news, the wait ends after its time.
        for path in (f"{URL}/a", f"{API}/sessions/p-0"):
            assert (await client.get(path, headers=wait)).status_code == 200
        assert (await client.get(f"{URL}/none", headers=wait)).status_code == 404
        answer = await client.get(f"{URL}/b", headers={"prefer": "wait=1"})
        assert answer.json()["status"] in ("queued", "running")
        assert time.monotonic() - began < 10
    sessions.close()


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        (None, 0),
        ("wait=5", 5),
        ('WAIT = "7"', 7),
        ("a, wait=99;b", 60),
        ("wait=x", 0),
        ("await=3", 0),
    ],
)
def test_only_wait_is_read_from_the_prefer_header(prefer: str | None, seconds: int) -> None:
    assert wait_of(prefer) == seconds


async def test_the_feed_reports_each_final_result_once_despite_a_crash(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    service = run.service
    await client.post(URL, json=batch("a", "b", "c", "d"))
    await client.post(f"{URL}/d/cancel")
    await service.admit()
    service.play()
    await service.train()
    # Trained, but not in a checkpoint yet: the run may still return to an older one.
    assert short(await feed_of(client)) == [("accepted", each) for each in "abcd"] + [
        ("cancelled", "d")
    ]
    await service.commit()
    seen = await feed_of(client)
    assert short(seen[5:]) == [
        *(("admitted", task) for task in "abc"),
        *(("trained", task, member, 1) for task in "ab" for member in (0, 1)),
    ]
    assert {entry["outcome"] for entry in seen[8:]} == {"completed"} and seen[8]["reward"] == 0.0

    await client.post(URL, json=batch("e"))
    await service.admit()
    service.play()
    await service.train()
    run.service = service = await service.restart()
    more = await feed_of(client, after=seen[-1]["number"])
    assert await feed_of(client) == [*seen, *more] and short(more) == [("accepted", "e")]
    await service.admit()
    service.play()
    await service.train()
    await service.commit()
    found = await feed_of(client)
    assert found[: len(seen) + 1] == [*seen, *more]
    assert short(found[len(seen) + 1 :]) == [
        ("admitted", "e"),
        *(("trained", task, member, 2) for task in "ce" for member in (0, 1)),
    ]
    assert [entry["number"] for entry in found] == list(range(1, len(found) + 1))


async def test_the_feed_says_which_entries_a_lost_checkpoint_makes_void(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    await run.service.commit()
    await client.post(URL, json=batch("a", "b"))
    await run.service.admit()
    run.service.play()
    await run.service.train()
    await run.service.commit()
    before = await feed_of(client)
    run.service = await run.service.restart(passed_over={"step-1"})
    [entry] = await feed_of(client, after=before[-1]["number"])
    assert (entry["kind"], entry["step"], entry["void_after"]) == ("went_back", 0, 0)
    await run.service.admit()
    run.service.play()
    await run.service.train()
    await run.service.commit()
    again = await feed_of(client, after=entry["number"])
    assert short(again) == short(before)[2:]


async def test_a_cursor_before_the_oldest_kept_entry_is_410(tmp_path: Path) -> None:
    limits = ServiceSettings(keep_feed_entries=3)
    run = LocalRun(await Service(tmp_path, settings=limits).begin())
    async with client_of(run) as client:
        for name in "abc":
            await client.post(URL, json=batch(name))
            await client.post(f"{URL}/{name}/cancel")
        kept = await feed_of(client)
        assert [entry["number"] for entry in kept] == [4, 5, 6]
        for path in (f"{API}/feed?after=1", f"{API}/events?after=2"):
            answer = await client.get(path)
            assert answer.status_code == 410 and answer.json()["code"] == "feed-cut"
            assert "after=3" in answer.json()["detail"]
        assert len(await feed_of(client, after=3)) == 3


async def test_a_cursor_above_the_newest_entry_is_410(client: httpx.AsyncClient) -> None:
    for newest in (0, 1):
        for path in (f"{API}/feed?after=2", f"{API}/events?after=999999"):
            answer = await client.get(path)
            assert answer.status_code == 410 and answer.json()["code"] == "feed-ahead"
            assert f"continue with after={newest}" in answer.json()["detail"]
        assert await feed_of(client, after=newest) == []
        await client.post(URL, json=batch(f"a{newest}"))
    assert len(await feed_of(client, after=1)) == 1


async def test_events_are_the_feed_and_resume_after_the_last_id(client: httpx.AsyncClient) -> None:
    await client.post(URL, json=batch("a", "b"))
    answer = await client.get(f"{API}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block.startswith("id: ")]
    assert [block.split("\n")[:2] for block in blocks] == [
        ["id: 1", "event: accepted"],
        ["id: 2", "event: accepted"],
    ]
    data = json.loads(blocks[0].split("\n")[2].removeprefix("data: "))
    assert data["task"] == "a" and "reward" not in data
    later = await client.get(f"{API}/events?after=0", headers={"last-event-id": "1"})
    assert "id: 1\n" not in later.text and "id: 2\n" in later.text
    # Without entries, a comment shows that the connection is alive.
    assert ": waiting" in (await client.get(f"{API}/events?after=2")).text
    answer = await client.get(f"{API}/events", headers={"last-event-id": "x"})
    assert answer.status_code == 422
