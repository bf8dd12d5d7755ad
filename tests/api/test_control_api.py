"""Tests of the operators' routes with the real control: status codes and recorded calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.parts.control_world import LocalControl, World

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import KeptTokens, RolloutSettings, StructuredOutputs
from service.api.app import create_app
from service.api.control_routes import add_control
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings

SETTINGS = HttpSettings(
    rollouts=RolloutSettings(),
    service=ServiceSettings(),
    algorithm=AlgorithmSettings(group_size=2),
    environments=("guessing",),
)


async def served(tmp_path: Path) -> tuple[LocalControl, httpx.AsyncClient]:
    world = World(tmp_path)
    await world.begin()
    run: Any = LocalControl(world)
    app = create_app(run, SETTINGS)
    add_control(app, run)
    transport = httpx.ASGITransport(app=app)
    return run, httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1")


async def test_parts_are_paused_and_resumed_and_readyz_says_so(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    answer = await client.post("/control/training/pause", json={"reason": "a look"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["phase"] == "paused" and body["in_flight"]["step"] == 7
    assert [(each["part"], each["reason"]) for each in body["paused"]] == [("training", "a look")]
    ready = await client.get("http://localhost/readyz")
    assert ready.status_code == 503 and "paused: training (a look)" in ready.json()["reasons"][0]
    assert (await client.get("/control")).json()["paused"] == body["paused"]
    assert (await client.post("/control/training/resume")).json()["paused"] == []
    assert (await client.get("http://localhost/readyz")).status_code == 200
    assert (await client.post("/control/engines/pause", json={})).status_code == 422
    assert (await client.post("/control/training/pause", json={"for": 3})).status_code == 422
    run.is_gone = True
    assert (await client.get("/control")).status_code == 503


async def test_checkpoints_are_requested_listed_and_restored(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    ids = [run.world.commit(step) for step in (2, 4)]
    listed = (await client.get("/checkpoints")).json()["checkpoints"]
    assert [each["id"] for each in listed] == ids[::-1]
    assert listed[0]["step"] == 4 and listed[0]["bytes"] > 0 and listed[0]["can_go_back"]
    answer = await client.post("/checkpoints")
    assert answer.status_code == 202 and answer.json()["status"] == "running"
    found = await client.get("http://localhost" + answer.headers["location"])
    assert found.status_code == 200 and found.json() == answer.json()
    answer = await client.post("/checkpoints/step-000003-t1/return")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown")
    (run.world.place.checkpoints / ids[0] / "manifest.json").unlink(missing_ok=True)
    for file in (run.world.place.checkpoints / ids[0]).iterdir():
        file.unlink()
    answer = await client.post(f"/checkpoints/{ids[0]}/return")
    assert (answer.status_code, answer.json()["code"]) == (410, "gone")
    answer = await client.post(f"/checkpoints/{ids[1]}/return")
    assert answer.status_code == 202 and answer.json()["checkpoint"] == ids[1]
    answer = await client.post(f"/checkpoints/{ids[1]}/return")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await client.get("/operations/op-77")).status_code == 404
    assert (await client.get("/operations/a%2Fb")).status_code in (404, 422)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"num_samples": 2}, "temperature above 0"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1, "num_samples": 2, "ks": [4]}, "at most num_samples"),
        ({"num_tasks": 1, "tasks": ["a"]}, "expected one of them"),
        ({"tasks": ["a", "a"]}, "more than once"),
        ({"num_tasks": 9}, "expected at most 3"),
        ({"policy": 3}, "policy"),
        ({"top_p": 0.9}, "top_p is 0.9 with temperature 0"),
        ({"top_p": 0, "temperature": 1}, "top_p"),
        ({"top_k": 5}, "top_k is 5 with temperature 0"),
        ({"top_k": -1, "temperature": 1}, "top_k"),
        ({"min_p": 1.5, "temperature": 1}, "min_p"),
        ({"structured_outputs": {}}, "structured_outputs has nothing; expected one of json"),
        ({"structured_outputs": {"regex": "["}}, "is not a regular expression"),
        ({"structured_outputs": {"json": {"type": 3}}}, "is not a JSON schema"),
        ({"structured_outputs": {"words": []}}, "structured_outputs"),
    ],
)
async def test_an_impossible_evaluation_is_refused_with_422(
    body: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, client = await served(tmp_path)
    answer = await client.post("/evaluations", json=body)
    assert answer.status_code == 422 and words in answer.text


async def test_an_evaluation_is_followed_until_its_results(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    body = {"temperature": 0.7, "num_samples": 4, "num_tasks": 2, "ks": [1, 2]}
    answer = await client.post("/evaluations", json=body)
    assert answer.status_code == 202
    run.world.term.go_on.set()
    async with asyncio.timeout(30.0):
        while True:
            found = (await client.get(f"/operations/{answer.json()['id']}")).json()
            if found["status"] != "running":
                break
            await asyncio.sleep(0.005)
    assert found["evaluation"]["pass_at"] == {"1": 0.5, "2": pytest.approx(5 / 6)}
    assert found["evaluation"]["outcomes"] == {"completed": 8}


async def test_an_evaluation_samples_with_the_options_of_its_body(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    body = {
        "temperature": 0.7, "num_tasks": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "structured_outputs": {"regex": "[0-9]+"},
    }  # fmt: skip
    run.world.term.engines_read_text = False
    answer = await client.post("/evaluations", json=body)
    assert answer.status_code == 409 and "need engines that read text" in answer.text
    run.world.term.engines_read_text = True
    assert (await client.post("/evaluations", json=body)).status_code == 202
    term = run.world.term
    term.go_on.set()
    async with asyncio.timeout(30.0):
        while not term.asked:
            await asyncio.sleep(0.005)
    assert term.asked[0][1].kept == KeptTokens(
        top_p=0.9, top_k=5, min_p=0.1, structured_outputs=StructuredOutputs(regex="[0-9]+")
    )


async def test_policies_and_the_stop_are_answered(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    body = (await client.get("/policies")).json()
    assert [each["version"] for each in body["policies"]] == [3, 2]
    assert body["policies"][0]["replicas"][0]["id"] == "a"
    for sent, grace_s in (({}, None), ({"grace_seconds": 1.5}, 1.5)):
        answer = await client.post("/stop", json=sent)
        assert answer.status_code == 202 and answer.json() == {"phase": "training"}
        assert run.stops[-1] == grace_s
    for text in ('{"grace_seconds": -1}', '{"grace_seconds": 1e999}'):
        headers = {"content-type": "application/json"}
        assert (await client.post("/stop", content=text, headers=headers)).status_code == 422
    assert len(run.stops) == 2


async def test_calls_that_change_something_are_recorded_with_their_answers(
    tmp_path: Path,
) -> None:
    _, client = await served(tmp_path)
    await client.post("/control/admission/pause", json={"reason": "look"})
    await client.get("/checkpoints")
    await client.post("/checkpoints/step-000009-t1/return")
    calls = (await client.get("/control/calls")).json()["calls"]
    assert [(each["call"], each["status"]) for each in calls] == [
        ("POST /api/v1/checkpoints/step-000009-t1/return", 404),
        ("POST /api/v1/control/admission/pause", 200),
    ]
    assert calls[1]["body"] == '{"reason":"look"}' and '"phase": "paused"' in calls[1]["answer"]
    assert "has no checkpoint" in calls[0]["answer"] and calls[0]["at"] > 0
    assert len((await client.get("/control/calls", params={"limit": 1})).json()["calls"]) == 1


async def test_a_body_may_be_omitted_if_no_field_is_required(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    [paused] = (await client.post("/control/training/pause")).json()["paused"]
    assert (paused["part"], paused["reason"]) == ("training", "")
    assert (await client.post("/control/training/resume")).status_code == 200
    assert (await client.post("/evaluations")).status_code == 202
    assert (await client.post("/stop")).status_code == 202
    assert run.stops == [None]
    headers = {"content-type": "application/json"}
    answer = await client.post("/control/training/pause", content=b"null", headers=headers)
    assert answer.status_code == 200


async def test_an_evaluation_without_tasks_is_refused(tmp_path: Path) -> None:
    _, client = await served(tmp_path)
    answer = await client.post("/evaluations", json={"tasks": []})
    assert answer.status_code == 422 and "body.tasks: got a list, expected it to" in answer.text


async def test_a_field_for_a_route_without_fields_is_refused(tmp_path: Path) -> None:
    run, client = await served(tmp_path)
    commit = run.world.commit(2)
    paths = ("/checkpoints", f"/checkpoints/{commit}/return", "/control/training/resume")
    for path in (*paths, "/rollouts/a/cancel"):
        for body, where in (({"step": 3}, "body.step: this route has no such field"), ([], "body")):
            answer = await client.post(path, json=body)
            assert answer.status_code == 422 and answer.json()["detail"].startswith(where), path
    answer = await client.post(
        "/checkpoints", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["code"] == "malformed-body"
    assert (await client.get("/control/calls")).json()["calls"] == []
    for content in (b"{}", b"null", b" \r\n", b""):
        answer = await client.post(
            "/control/training/resume",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 200, content
