"""Tests of the client of the HTTP API: with a served run, and with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.runs.served_run import ServedRun, served

from actors.environment.tasks import write_tasks
from actors.types import Task
from service.api.schemas import TaskBody
from service.cli.submit import submit_file
from service.client import ApiError, Client, NoAnswer
from service.gateway.bodies import FinishBody, SessionsBody

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ServedRun]:
    with served(tmp_path) as world:
        yield world


@pytest.fixture
def client(world: ServedRun) -> Iterator[Client]:
    with Client(world.url) as client:
        yield client


def tasks(*names: str) -> list[TaskBody]:
    return [TaskBody(id=name) for name in names]


def test_a_client_submits_waits_for_lists_cancels_and_follows_tasks(
    world: ServedRun, client: Client
) -> None:
    assert client.ready().phase == "training"
    assert [each.id for each in client.environments()] == ["guessing", "session"]
    first = client.submit("guessing", tasks("a", "b", "c"), batch="night", idempotency_key="k")
    assert (
        first.accepted == 3 and client.submit("guessing", tasks("a"), batch="night").accepted == 0
    )
    assert client.cancel("c").status == "cancelled"
    with pytest.raises(TimeoutError, match="task a is queued after 0 s"):
        client.wait("a", limit_s=0)
    world.may_play.set()
    assert client.wait("a").status == "trained" and client.wait("b", limit_s=30).reward == 0.0
    assert [each.id for each in client.rollouts(batch="night")] == ["a", "b", "c"]
    assert [each.id for each in client.rollouts(status=client.cancel("c").status)] == ["c"]
    kinds = []
    for entry in client.follow():
        kinds.append(entry.kind)
        if kinds.count("trained") == 4:
            break
    assert kinds[:4] == ["accepted"] * 3 + ["cancelled"]
    with pytest.raises(ApiError, match="409 id-conflict: 1 ids are taken") as refused:
        client.submit("guessing", [TaskBody(id="a", seed=9)], batch="night")
    assert refused.value.status == 409
    assert client.stop(grace_s=1.0).phase == "training"


def test_sessions_are_made_finished_and_discarded(client: Client) -> None:
    made = client.create_sessions(SessionsBody(id="p"), idempotency_key="once")
    assert made.is_new and not client.create_sessions(SessionsBody(id="p")).is_new
    first, second = made.sessions
    assert client.session("p-0", wait_s=1).status == "queued"
    finish = FinishBody(reward=0.5)
    found = client.finish("p-0", finish, reward_key=first.reward_key)
    assert (found.status, found.reward) == ("finished", 0.5)
    with pytest.raises(ApiError, match="403 forbidden"):
        client.finish("p-1", finish, reward_key=second.agent_key)
    assert client.discard("p-1").status == "discarded"
    assert [each.status for each in client.sessions(group="p")] == ["finished", "discarded"]


def client_with(handler: Handler, *, patience_s: float = 60.0) -> tuple[Client, list[float]]:
    """Return a client that the handler answers, and a list of the pauses between its requests."""
    pauses: list[float] = []
    transport = httpx.MockTransport(handler)
    return Client(
        "http://x", patience_s=patience_s, transport=transport, sleep=pauses.append
    ), pauses


def answers(*script: httpx.Response | Exception) -> Handler:
    """Return a handler that gives these answers in order and then repeats the last one."""
    left = list(script)

    def answer(request: httpx.Request) -> httpx.Response:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return answer


STOPPED = httpx.Response(202, json={"phase": "stopping", "of a newer service": 1})


def problem(status: int, **headers: str) -> httpx.Response:
    body = {"code": "some-code", "detail": "why"}
    return httpx.Response(status, json=body, headers=headers)


def test_a_request_that_may_succeed_later_is_repeated_after_a_pause() -> None:
    again = [
        httpx.ConnectError("refused"),
        problem(503, **{"retry-after": "7"}),
        httpx.Response(502, text="<html>"),
        problem(500),
        problem(429, **{"retry-after": "9"}),
    ]
    client, pauses = client_with(answers(*again, STOPPED))
    assert client.stop().phase == "stopping"
    assert len(pauses) == 5 and 7 <= pauses[1] < 9 and 9 <= pauses[4] < 11.5
    assert 0.5 <= pauses[0] < 0.7 and 4 <= pauses[3] < 5.1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (problem(409), "409 some-code: why"),
        (problem(422), "422 some-code: why"),
        (problem(503, **{"x-should-retry": "false"}), "503 some-code"),
        (httpx.Response(404, text="<html>"), "no problem document"),
    ],
)
def test_an_error_that_would_not_change_is_raised_without_a_retry(
    answer: httpx.Response, words: str
) -> None:
    client, pauses = client_with(answers(answer))
    with pytest.raises(ApiError, match=words):
        client.stop()
    assert pauses == []


def test_a_client_gives_up_when_its_patience_ends() -> None:
    client, pauses = client_with(answers(httpx.ConnectError("refused")), patience_s=0.1)
    with pytest.raises(NoAnswer, match="check that the service is running"):
        client.stop()
    assert pauses == []
    client, _ = client_with(answers(problem(503)), patience_s=0.1)
    with pytest.raises(ApiError, match="503"):
        client.stop()
    client, _ = client_with(answers(httpx.Response(200, text="<html>welcome")))
    with pytest.raises(NoAnswer, match="is not of type StopAnswer"):
        client.stop()
    client, _ = client_with(answers(problem(429, **{"retry-after": "1"})))
    with pytest.raises(ApiError, match="429"):
        client.submit("guessing", tasks("a"), waits_for_room=False)


def test_silence_is_told_once_for_each_request_that_nothing_answers() -> None:
    told: list[str] = []
    script = answers(httpx.ConnectError("refused"), httpx.ConnectError("refused"), STOPPED)
    client = Client(
        "http://x:8000", patience_s=300, tell=told.append,
        transport=httpx.MockTransport(script), sleep=lambda _: None,
    )  # fmt: skip
    assert client.stop().phase == "stopping"
    assert told == ["nothing answers at http://x:8000; trying for 300 s"]


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000", "x", "", "ftp://x", "http://"])
def test_an_address_without_http_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{url}'.* expected .*http://HOST:8000; correct it"):
        Client(url)


def submitted(directory: Path, client: Client, **options: Any) -> int:
    results = directory / "results"
    return submit_file(
        directory / "tasks.jsonl", client, results_file=results, batch="file", **options
    )


def task(name: str, environment: str = "guessing") -> Task:
    return Task(task_id=name, environment=environment, seed=1)


def results_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "results").read_text().splitlines()]


def test_an_interrupted_file_is_continued_with_its_remaining_tasks(
    world: ServedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.may_play.set()
    names = [f"task-{number}" for number in range(20)]
    write_tasks(
        tmp_path / "tasks.jsonl",
        [Task(task_id=name, environment="guessing", seed=1) for name in names],
    )
    with Client(world.url) as client:
        # The file has more tasks than one request or the backlog may hold.
        assert submitted(tmp_path, client) == 0
        results = results_of(tmp_path)
        assert [line["id"] for line in results] == names
        assert {line["status"] for line in results} == {"trained"} and results[0]["reward"] == 0.0
        assert "20 of 20 tasks are over, 20 trained, mean reward 0.000" in capsys.readouterr().out

        # Cut the results off in the middle of their last line.
        file = tmp_path / "results"
        file.write_bytes(file.read_bytes()[:-7])
        before = world.num_requests
        assert submitted(tmp_path, client) == 0 and world.num_requests == before + 1
        assert [line["id"] for line in results_of(tmp_path)] == names
        assert submitted(tmp_path, client) == 0 and world.num_requests == before + 1
        assert len(list(client.rollouts())) == 20


def test_submitting_without_waiting_ends_when_the_file_is_accepted(
    world: ServedRun, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [task("a")])
    with Client(world.url) as client:
        assert submitted(tmp_path, client, waits=False) == 0 and results_of(tmp_path) == []


def test_the_exit_code_is_2_for_a_refusal_and_1_for_no_answer(
    world: ServedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [task("a", "chess")])
    with Client(world.url) as client:
        assert submitted(tmp_path, client) == 2
    assert "unknown-environment" in capsys.readouterr().err
    silent, _ = client_with(answers(httpx.ConnectError("refused")), patience_s=0.1)
    assert submitted(tmp_path, silent) == 1
    assert "the same command continues from here" in capsys.readouterr().err
