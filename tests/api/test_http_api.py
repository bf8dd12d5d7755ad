"""Tests of the HTTP API with the real submission queue and store: status codes and problems."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.parts.local_run import LocalRun
from worlds.parts.submission_service import Service

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.metrics import ApiMetrics
from service.access.keys import digest_of
from service.api.app import create_app
from service.api.callers import Callers
from service.api.guards import Guards
from service.api.schemas import SubmitAnswer
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings
from service.intake.submission import SubmissionView

KEY = "0123456789abcdef"
URL = "/api/v1/rollouts"
SETTINGS = HttpSettings(
    rollouts=RolloutSettings(),
    service=ServiceSettings(max_samples_per_task=8, max_tasks_per_request=4, max_body_kib=4),
    algorithm=AlgorithmSettings(group_size=2),
    environments=("guessing",),
)


def client_of(
    run: LocalRun, settings: HttpSettings = SETTINGS, **headers: str
) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(run, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def run(tmp_path: Path) -> LocalRun:
    settings = ServiceSettings(max_waiting_tasks=4)
    return LocalRun(await Service(tmp_path, settings=settings).begin())


@pytest.fixture
async def client(run: LocalRun) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(run) as client:
        yield client


def batch(*ids: str, **fields: Any) -> dict[str, Any]:
    return {"environment": "guessing", "tasks": [{"id": each, "seed": 3} for each in ids], **fields}


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status and body["code"] == code and body["detail"]
    assert body["type"].endswith(code) and body["title"] and body["instance"].startswith("/")
    return body


async def test_a_batch_is_queued_and_followed_to_its_training_step(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    answer = await client.post(URL, json=batch("a", "b"))
    assert answer.status_code == 202
    body = answer.json()
    # The body is written by hand, without the model that describes it.
    assert json.loads(SubmitAnswer.model_validate(body).model_dump_json()) == body
    assert body["accepted"] == 2 and body["queue"] == {"waiting": 2, "capacity": 4}
    assert [(item["id"], item["place"], item["ahead"]) for item in body["rollouts"]] == [
        ("a", 1, 0),
        ("b", 2, 1),
    ]
    await run.service.admit()
    assert (await client.get(f"{URL}/a")).json()["status"] == "running"
    run.service.play()
    await run.service.train()
    found = (await client.get(f"{URL}/a")).json()
    assert found["status"] == "trained" and found["reward"] == 0.0
    assert found["outcomes"] == {"completed": 2} and found["policy_versions"] == [0, 0]
    first = found["samples"][0]
    assert (first["status"], first["step"], first["outcome"]) == ("trained", 1, "completed")
    assert first["turns"] == 1 and first["sampled_tokens"] == 2


async def test_a_repeated_request_creates_no_new_task(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    first = await client.post(URL, json=batch("a"))
    assert first.headers["location"] == f"{URL}/a"
    again = await client.post(URL, json=batch("a"))
    assert again.status_code == 202 and again.json()["accepted"] == 0
    assert again.json()["rollouts"][0]["place"] == first.json()["rollouts"][0]["place"]
    assert not again.json()["rollouts"][0]["is_new"]
    assert run.service.submissions.backlog.waiting == 1
    other = {"environment": "guessing", "tasks": [{"id": "a", "seed": 3, "data": {"high": 9}}]}
    for changed in (batch("a", num_samples=4), other):
        body = problem(await client.post(URL, json=changed), 409, "id-conflict")
        assert "a" in body["detail"]


async def test_an_idempotency_key_is_valid_for_one_request_only(
    run: LocalRun, client: httpx.AsyncClient
) -> None:
    named = {"Idempotency-Key": "nightly 17"}
    assert (await client.post(URL, json=batch("a"), headers=named)).json()["accepted"] == 1
    again = await client.post(URL, json=batch("a"), headers=named)
    assert again.status_code == 202 and again.json()["accepted"] == 0
    for other in (batch("b"), batch("a", "b"), batch("a", num_samples=4)):
        answer = await client.post(URL, json=other, headers=named)
        body = problem(answer, 422, "idempotency-key-reused")
        assert body["errors"] == [{"loc": ["header", "Idempotency-Key"]}]
    assert (await client.get(f"{URL}/b")).status_code == 404
    # The key is stored with the tasks, so it survives a restart as they do.
    later = LocalRun(await run.service.restart())
    async with client_of(later) as client:
        answer = await client.post(URL, json=batch("b"), headers=named)
        problem(answer, 422, "idempotency-key-reused")
        other = {"Idempotency-Key": "nightly 18"}
        both = [*named.items(), *other.items()]
        problem(await client.post(URL, json=batch("c"), headers=both), 400, "repeated-header")
        assert (await client.post(URL, json=batch("a", "b"), headers=other)).json()["accepted"] == 1
        for bad in ("", " ", "x" * 256, "tab\tbed"):
            answer = await client.post(URL, json=batch("c"), headers={"Idempotency-Key": bad})
            problem(answer, 422, "invalid-request")


async def test_a_missing_seed_is_derived_from_the_id(client: httpx.AsyncClient) -> None:
    body = {"environment": "guessing", "tasks": [{"id": "x"}]}
    assert (await client.post(URL, json=body)).json()["accepted"] == 1
    assert (await client.post(URL, json=body)).json()["accepted"] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (batch(), "tasks"),
        (batch("a", "a"), "more than once"),
        (batch("no/slash"), "body.tasks.0.id"),
        (batch("a", surprise=1), "surprise"),
        ({"tasks": [{"id": "a"}]}, "environment"),
        ({"environment": "guessing", "tasks": [{"id": "a", "seed": -1}]}, "seed"),
        ({"environment": "guessing", "tasks": [{"id": "a", "seed": True}]}, "seed"),
        ([], "body"),
        ("text", "body"),
    ],
)
async def test_the_error_of_a_wrong_body_names_the_place(
    client: httpx.AsyncClient, body: Any, words: str
) -> None:
    found = problem(await client.post(URL, json=body), 422, "invalid-request")
    assert words in json.dumps(found) and found["errors"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "at character 1"),
        ('{"environment": }', "at character 16"),
        ("\xff", "can't decode byte 0xff"),
        ("[" * 4000, "recursion"),
        ("9" * 4000 + "9" * 1000, "digits"),
    ],
)
async def test_the_error_of_a_body_that_is_not_json_says_why_and_what_to_send(
    run: LocalRun, text: str, words: str
) -> None:
    larger = replace(SETTINGS, service=ServiceSettings(max_body_kib=8))
    async with client_of(run, larger) as client:
        answer = await client.post(
            URL, content=text.encode("latin-1"), headers={"content-type": "application/json"}
        )
    detail = problem(answer, 400, "malformed-body")["detail"]
    assert words in detail and "send one JSON object" in detail


async def test_a_missing_body_is_reported_as_missing(client: httpx.AsyncClient) -> None:
    assert problem(await client.post(URL), 422, "invalid-request")["detail"].startswith("body")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_body_of_another_format_is_415(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    content = json.dumps(batch("a")).encode()
    answer = await client.post(URL, content=content, headers=headers)
    assert "expected" in problem(answer, 415, "unsupported-media-type")["detail"]
    utf8 = {"content-type": "application/json; charset=utf-8"}
    assert (await client.post(URL, content=content, headers=utf8)).status_code == 202
    # A request without a body needs no content type.
    assert (await client.post(f"{URL}/a/cancel")).status_code == 200


async def test_an_error_repeats_only_a_part_of_the_request(client: httpx.AsyncClient) -> None:
    long = "x" * 3000
    for body in (batch("a", environment=long), batch("a", **{long: 1}), batch(long)):
        assert len((await client.post(URL, json=body)).text) < 1500
    assert len((await client.get(f"/{long}")).text) < 1500
    many = {"environment": "guessing", "tasks": [{"id": "a b"}] * 100}
    assert len(problem(await client.post(URL, json=many), 422, "invalid-request")["errors"]) == 20


async def test_a_stalled_body_is_abandoned(run: LocalRun) -> None:
    guarded = Guards(
        create_app(run, SETTINGS),
        max_body_bytes=4096,
        max_session_body_bytes=4096,
        callers=Callers(run, first_digest=None),
        body_limit_s=0.1,
    )

    async def stalling() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(URL, content=stalling())
    assert "0.1 s" in problem(answer, 408, "body-too-slow")["detail"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"\\ud800"'])
async def test_data_that_json_cannot_represent_is_refused(
    client: httpx.AsyncClient, value: str
) -> None:
    text = '{"environment": "guessing", "tasks": [{"id": "a", "data": {"x": VALUE}}]}'
    text = text.replace("VALUE", value)
    answer = await client.post(
        URL, content=text.encode(), headers={"content-type": "application/json"}
    )
    assert "plain JSON" in problem(answer, 422, "invalid-request")["detail"]


@pytest.mark.parametrize("depth", [65, 480, 900])
async def test_data_is_accepted_up_to_a_depth_of_64(client: httpx.AsyncClient, depth: int) -> None:
    def text(levels: int) -> bytes:
        data = '{"x": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
        head = '{"environment": "guessing", "tasks": [{"id": "a", "seed": 3, "data": '
        return (head + data + "}]}").encode()

    headers = {"content-type": "application/json"}
    refused = await client.post(URL, content=text(depth), headers=headers)
    assert "nested at most 64 deep" in problem(refused, 422, "invalid-request")["detail"]
    assert (await client.post(URL, content=text(64), headers=headers)).status_code == 202


async def test_an_environment_that_the_run_lacks_is_refused_with_the_known_ones(
    client: httpx.AsyncClient,
) -> None:
    body = problem(
        await client.post(URL, json=batch("a", environment="chess")), 422, "unknown-environment"
    )
    assert "'chess'" in body["detail"] and "guessing" in body["detail"]


@pytest.mark.parametrize(
    "fields", [{"num_samples": 1}, {"num_samples": 9}, {"num_samples": 3, "least": 4}]
)
async def test_numbers_of_rollouts_out_of_range_are_refused(
    client: httpx.AsyncClient, fields: dict[str, int]
) -> None:
    task = {"id": "a", "num_samples": fields["num_samples"]}
    if "least" in fields:
        task["min_usable_samples"] = fields["least"]
    answer = await client.post(URL, json={"environment": "guessing", "tasks": [task]})
    assert "min_group_size" in problem(answer, 422, "num-samples")["detail"]


async def test_too_many_tasks_and_too_large_bodies_are_413(client: httpx.AsyncClient) -> None:
    problem(await client.post(URL, json=batch(*"abcde")), 413, "too-many-tasks")
    large = {"environment": "guessing", "tasks": [{"id": "a", "data": {"x": "y" * 5000}}]}
    body = problem(await client.post(URL, json=large), 413, "body-too-large")
    assert "4096" in body["detail"]

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    # Without a length in the header, the bytes are counted as they arrive.
    problem(await client.post(URL, content=in_pieces()), 413, "body-too-large")


async def test_a_full_backlog_is_429_with_a_time_to_retry(client: httpx.AsyncClient) -> None:
    assert (await client.post(URL, json=batch(*"abc"))).status_code == 202
    answer = await client.post(URL, json=batch("d", "e"))
    problem(answer, 429, "queue-full")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await client.get(f"{URL}/d")).status_code == 404


async def test_a_batch_larger_than_the_backlog_is_413(tmp_path: Path) -> None:
    run = LocalRun(await Service(tmp_path, settings=ServiceSettings(max_waiting_tasks=3)).begin())
    async with client_of(run) as client:
        body = problem(await client.post(URL, json=batch(*"abcd")), 413, "batch-too-large")
        assert "expected at most 3" in body["detail"] and "split the batch" in body["detail"]
        assert (await client.post(URL, json=batch(*"abc"))).status_code == 202
        # Only new tasks need room.
        assert (await client.post(URL, json=batch(*"abcd"))).status_code == 429


async def test_a_cancelled_task_stays_cancelled(client: httpx.AsyncClient, run: LocalRun) -> None:
    await client.post(URL, json=batch("a", "b", "c"))
    for _ in range(2):
        answer = await client.post(f"{URL}/c/cancel")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
    assert await run.service.admit() == ["a", "b"]
    run.service.play()
    await run.service.train()
    problem(await client.post(f"{URL}/a/cancel"), 409, "already-over")


async def test_a_task_in_a_training_step_cannot_be_cancelled(
    client: httpx.AsyncClient, run: LocalRun
) -> None:
    await client.post(URL, json=batch("a", "b"))
    await run.service.admit()
    run.service.play()
    run.service.take()
    body = problem(await client.post(f"{URL}/a/cancel"), 409, "already-over")
    assert "a training step has it" in body["detail"]
    assert (await client.get(f"{URL}/a")).json()["status"] == "finished"
    await run.service.train()
    assert (await client.get(f"{URL}/a")).json()["status"] == "trained"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"num_samples": "eight"}, "num_samples: got 'eight', expected a valid integer"),
        ({"num_samples": 0}, "num_samples: got 0, expected greater than or equal to 1"),
        ({"id": "a b"}, "id: got 'a b', expected it to match pattern"),
        ({"num_sampels": 3}, "0.num_sampels: there is no such field; did you mean 'num_samples'?"),
        ({"task_id": "a"}, "0.task_id: there is no such field; expected one of id, seed, data"),
        ({"batch": "b"}, "0.batch: there is no such field; did you mean 'body.batch'?"),
    ],
)
async def test_the_error_of_a_wrong_value_names_what_was_expected(
    client: httpx.AsyncClient, entry: dict[str, Any], words: str
) -> None:
    body = batch("a")
    body["tasks"][0] |= entry
    assert words in problem(await client.post(URL, json=body), 422, "invalid-request")["detail"]


async def test_an_unknown_field_is_named_before_the_one_that_is_missing(
    client: httpx.AsyncClient,
) -> None:
    body = {"environment": "guessing", "tasks": [{"task_id": "a"}]}
    found = problem(await client.post(URL, json=body), 422, "invalid-request")
    assert "body.tasks.0.task_id: there is no such field" in found["detail"]
    assert [each["loc"][-1] for each in found["errors"]] == ["id", "task_id"]


async def test_unknown_objects_and_routes_are_404(client: httpx.AsyncClient) -> None:
    problem(await client.get(f"{URL}/nobody"), 404, "unknown-rollout")
    problem(await client.post(f"{URL}/nobody/cancel"), 404, "unknown-rollout")
    body = problem(await client.get("/api/v2/rollouts"), 404, "not-found")
    assert "did you mean POST /api/v1/rollouts, GET /api/v1/rollouts" in body["detail"]
    assert "/keys" not in body["detail"]
    body = problem(await client.get("/no/such/place/here"), 404, "not-found")
    assert body["detail"].endswith("there is no route /no/such/place/here; /docs lists all routes")
    answer = await client.delete(f"{URL}/a")
    body = problem(answer, 405, "method-not-allowed")
    assert "got DELETE" in body["detail"] and "expected GET" in body["detail"]
    assert answer.headers["allow"] == "GET"


async def test_all_routes_except_the_probes_need_the_key(run: LocalRun) -> None:
    settings = replace(SETTINGS, key_digest=digest_of(KEY))
    async with client_of(run, settings) as client:
        answer = await client.post(URL, json=batch("a"))
        problem(answer, 401, "wrong-key")
        assert answer.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer wrong", f"Basic {KEY}", KEY, "Bearer"):
            answer = await client.get(f"{URL}/a", headers={"authorization": header})
            problem(answer, 401, "wrong-key")
        problem(await client.get("/openapi.json"), 401, "wrong-key")
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        right = {"authorization": f"Bearer {KEY}"}
        assert (await client.post(URL, json=batch("a"), headers=right)).status_code == 202


async def test_ready_says_what_is_missing(client: httpx.AsyncClient, run: LocalRun) -> None:
    run.behind_s = 29.0
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["engines"] == {"ready": 1, "total": 2}
    run.behind_s = 31.0
    answer = await client.get("/readyz")
    assert answer.status_code == 503 and not answer.json()["ready"]
    assert "1 of 2 engines" in answer.json()["reasons"][0]
    run.is_gone = True
    body = problem(await client.get("/readyz"), 503, "not-available")
    assert "supervisor died" in body["detail"]


async def test_a_run_that_has_not_started_accepts_no_tasks(tmp_path: Path) -> None:
    async with client_of(LocalRun(Service(tmp_path))) as client:
        answer = await client.post(URL, json=batch("a"))
        problem(answer, 503, "not-available")
        assert answer.headers["retry-after"]


class Broken(LocalRun):
    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        raise ZeroDivisionError("a secret of ours")


async def test_an_unexpected_error_is_answered_without_its_text(run: LocalRun) -> None:
    async with client_of(Broken(run.service)) as client:
        body = problem(await client.get(f"{URL}/a"), 500, "internal-error")
    assert "secret" not in body["detail"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "mine.example"])
async def test_loopback_answers_under_its_own_names_and_allowed_ones(
    run: LocalRun, host: str
) -> None:
    service = replace(SETTINGS.service, allowed_hosts=("mine.example",))
    async with client_of(run, replace(SETTINGS, service=service)) as client:
        answer = await client.get("/healthz", headers={"host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "localhost.evil.example:8000", ""])
async def test_another_name_for_loopback_is_refused(run: LocalRun, host: str) -> None:
    async with client_of(run) as client:
        answer = await client.post(URL, json=batch("a"), headers={"host": host})
        problem(answer, 421, "unknown-host")
        problem(await client.get("/healthz", headers={"host": host}), 421, "unknown-host")
    assert await run.submission("a") is None


async def test_an_api_beyond_loopback_answers_under_any_name(run: LocalRun) -> None:
    service = replace(SETTINGS.service, host="0.0.0.0")
    settings = replace(SETTINGS, service=service, key_digest=digest_of(KEY))
    async with client_of(run, settings) as client:
        answer = await client.get("/healthz", headers={"host": "rayloom.example"})
    assert answer.status_code == 200


async def test_a_retry_after_a_resume_with_another_default_creates_no_new_task(
    run: LocalRun,
) -> None:
    async with client_of(run) as client:
        assert (await client.post(URL, json=batch("a"))).json()["accepted"] == 1
    later = LocalRun(await run.service.restart())
    settings = replace(SETTINGS, algorithm=AlgorithmSettings(group_size=4))
    async with client_of(later, settings) as client:
        again = (await client.post(URL, json=batch("a"))).json()
        assert again["accepted"] == 0 and again["rollouts"][0]["num_samples"] == 2
        problem(await client.post(URL, json=batch("a", num_samples=4)), 409, "id-conflict")


async def test_tasks_of_too_many_bytes_wait_for_room(tmp_path: Path) -> None:
    limits = ServiceSettings(max_waiting_mib=1, max_body_kib=2048)
    run = LocalRun(await Service(tmp_path, settings=limits).begin())
    async with client_of(run, replace(SETTINGS, service=limits)) as client:

        async def send(name: str) -> httpx.Response:
            task = {"id": name, "data": {"text": "x" * 700_000}}
            return await client.post(URL, json={"environment": "guessing", "tasks": [task]})

        assert (await send("a")).status_code == 202
        answer = await send("b")
        assert "1.3 MiB" in problem(answer, 429, "queue-full")["detail"]
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        await run.service.admit()
        assert (await send("b")).status_code == 202


async def test_an_ended_task_is_forgotten_when_more_tasks_than_the_limit_have_ended(
    tmp_path: Path,
) -> None:
    limits = ServiceSettings(keep_ended_tasks=2)
    run = LocalRun(await Service(tmp_path, settings=limits).begin())
    async with client_of(run) as client:
        for name in "abc":
            assert (await client.post(URL, json=batch(name))).status_code == 202
            assert (await client.post(f"{URL}/{name}/cancel")).json()["status"] == "cancelled"
        body = problem(await client.get(f"{URL}/a"), 404, "unknown-rollout")
        assert "keep_ended_tasks" in body["detail"]
        assert (await client.get(f"{URL}/b")).json()["status"] == "cancelled"
        assert (await client.post(f"{URL}/b/cancel")).status_code == 200
        again = (await client.post(URL, json=batch("c"))).json()
        assert again["accepted"] == 0 and again["rollouts"][0]["status"] == "cancelled"


async def test_requests_are_counted_by_route_and_status_not_by_path(run: LocalRun) -> None:
    metrics, settings = ApiMetrics(), replace(SETTINGS, key_digest=digest_of(KEY))
    transport = httpx.ASGITransport(app=create_app(run, settings, metrics=metrics))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post(URL, json=batch("a", "b"))
        await client.post(URL, json=batch("a", "b"), headers=headers)
        for name in ("a", "b", "unknown"):
            await client.get(f"{URL}/{name}", headers=headers)
        await client.get("/of/a/stranger", headers=headers)
        await client.request("STRANGE", "/healthz", headers=headers)
    counted = {
        tuple(sample.labels.values()): sample.value
        for family in metrics.gained.collect()
        for sample in family.samples
        if sample.name == "rayloom_http_requests_total"
    }
    assert counted == {
        ("", "POST", "401"): 1,
        (URL, "POST", "202"): 1,
        (URL + "/{rollout_id}", "GET", "200"): 2,
        (URL + "/{rollout_id}", "GET", "404"): 1,
        ("", "GET", "404"): 1,
        ("/healthz", "other", "405"): 1,
    }


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"environment": "guessing", "environment": "x", "tasks": [{"id": "a"}]}', "environment"),
        ('{"environment": "guessing", "tasks": [{"id": "a", "id": "b"}]}', "id"),
        ('{"environment": "guessing", "tasks": [{"id": "a", "data": {"q": 1, "q": [2]}}]}', "q"),
        ('{"environment": "guessing", "tasks": [{"id": "a", "data": {"": [1], "": [2]}}]}', ""),
    ],
)
async def test_a_duplicate_key_in_an_object_is_refused(
    client: httpx.AsyncClient, run: LocalRun, body: str, key: str
) -> None:
    json_type = {"content-type": "application/json"}
    for content in (body.encode(), body.encode("utf-16")):
        answer = await client.post(URL, content=content, headers=json_type)
        assert f"got the key {key!r} twice" in problem(answer, 400, "malformed-body")["detail"]
    assert run.service.submissions.backlog.waiting == 0


async def test_keys_that_differ_only_in_a_number_are_not_duplicates(
    client: httpx.AsyncClient,
) -> None:
    data = {"a: [1]": 1, "a: [2]": 2, "text": '{"q": 1, "q": 2}', "lists": [{"q": [1]}, {"q": [2]}]}
    body = {"environment": "guessing", "tasks": [{"id": "a", "data": data}]}
    assert (await client.post(URL, json=body)).status_code == 202


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "stauts=trained",
            "query.stauts: this route has no such parameter, expected one of status",
        ),
        ("stauts=trained", "did you mean status?"),
        ("limit=1&limit=2", "query.limit: got it 2 times, expected it once"),
    ],
)
async def test_an_unknown_or_repeated_query_parameter_is_refused(
    client: httpx.AsyncClient, query: str, words: str
) -> None:
    assert words in problem(await client.get(f"{URL}?{query}"), 422, "invalid-request")["detail"]
    answer = await client.post(f"{URL}?dry_run=true", json=batch("a"))
    assert "no query parameters" in problem(answer, 422, "invalid-request")["detail"]
    assert (await client.get(f"{URL}/a")).status_code == 404


async def test_an_error_names_json_types_instead_of_python_types(
    client: httpx.AsyncClient,
) -> None:
    for task, words in (
        ({"id": "a", "data": [1]}, "data: got a list, expected an object"),
        ({"id": {"a": 1}}, "id: got an object, expected a valid string"),
    ):
        answer = await client.post(URL, json={"environment": "guessing", "tasks": [task]})
        assert words in problem(answer, 422, "invalid-request")["detail"]
