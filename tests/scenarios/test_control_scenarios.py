"""Test of an operator's control of a real run: pauses, checkpoints, a return, an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.runs.run_checks import check_lineage
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config

pytestmark = [pytest.mark.scenario, pytest.mark.chaos, pytest.mark.timeout(900)]

Json = dict[str, Any]
# The statuses of a rollout after its step: rollouts of groups without variance are evicted.
OVER = {"trained", "evicted"}


def until(find: Callable[[], Any], *, limit_s: float = STEP_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@contextmanager
def client_of(run: Run) -> Iterator[httpx.Client]:
    address = run.api_address(limit_s=START_S)
    with httpx.Client(base_url=f"{address}/api/v1", timeout=START_S) as client:
        until(lambda: client.get(f"{address}/readyz").status_code == 200, limit_s=START_S)
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Json:
    answer = client.post(path, json=body)
    assert answer.status_code in (200, 202), answer.text
    found: Json = answer.json()
    return found


def follow(client: httpx.Client, begun: Json) -> Json:
    """Wait for the end of an operation."""

    def look() -> Json | None:
        found: Json = client.get(f"/operations/{begun['id']}").json()
        return None if found["status"] == "running" else found

    found: Json = until(look, limit_s=START_S)
    assert found["status"] == "done", found
    return found


def submit(client: httpx.Client, name: str, count: int = 4) -> None:
    tasks = [{"id": f"{name}-{number}"} for number in range(count)]
    post(client, "/rollouts", environment="guessing", tasks=tasks)


def statuses(client: httpx.Client, name: str, count: int = 4) -> set[str]:
    found = [client.get(f"/rollouts/{name}-{number}").json() for number in range(count)]
    return {each["status"] for each in found}


def stays(client: httpx.Client, name: str, status: str, *, seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert statuses(client, name) == {status}
        time.sleep(0.2)


def trained(client: httpx.Client, name: str) -> None:
    until(lambda: statuses(client, name) <= OVER)


def test_operator_pauses_each_part_returns_to_a_checkpoint_and_evaluates(
    tmp_path: Path, small_model: str
) -> None:
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 100, "evaluate_every": 1000, "checkpoint_every": 1000},
        trainer={"num_ranks": 1},
        service={"port": 0},
        rollouts={"turn_deadline_s": 3, "episode_deadline_s": 6},
    )
    with running(config, tmp_path / "run", command="serve") as run, client_of(run) as client:
        # Training is paused: rollouts that have ended wait for their step.
        post(client, "/control/training/pause", reason="a look")
        submit(client, "a")
        until(lambda: statuses(client, "a") == {"finished"})
        stays(client, "a", "finished")
        post(client, "/control/training/resume")
        trained(client, "a")
        first = follow(client, post(client, "/checkpoints"))["checkpoint"]
        # Admission is paused: submitted tasks stay in the backlog.
        post(client, "/control/admission/pause")
        submit(client, "b")
        stays(client, "b", "queued")
        post(client, "/control/admission/resume")
        trained(client, "b")
        # Generation is paused for longer than the deadline of an episode: no rollout is lost.
        held = post(client, "/control/generation/pause")
        assert held["in_flight"]["engines_held"] == held["in_flight"]["engines"] == 1
        submit(client, "c")
        stays(client, "c", "running", seconds=4.0)
        # A checkpoint can be made during the pause. A return begins a term whose engines load the
        # weights and stay paused.
        second = follow(client, post(client, "/checkpoints"))["checkpoint"]
        assert second != first
        follow(client, post(client, f"/checkpoints/{first}/return"))
        until(lambda: client.get("/control").json()["phase"] == "paused", limit_s=START_S)
        assert client.get("/control").json()["in_flight"]["engines_held"] == 1
        gone = client.post(f"/checkpoints/{second}/return")
        assert gone.status_code == 410
        policies = client.get("/policies").json()
        assert policies["term"] == 2 and policies["trained_version"] == 1
        assert policies["policies"][0]["checkpoints"] == [first]
        assert statuses(client, "b") <= {"queued", "running"}
        assert statuses(client, "a") <= OVER
        post(client, "/control/generation/resume")
        # The rollouts of steps that were undone are played again, each once.
        trained(client, "b")
        trained(client, "c")
        asked = post(client, "/evaluations", temperature=0.8, num_samples=2, num_tasks=2)
        found = follow(client, asked)["evaluation"]
        assert found["num_tasks"] == 2 and set(found["pass_at"]) == {"1", "2"}
        calls = client.get("/control/calls").json()["calls"]
        assert {each["status"] for each in calls} == {200, 202, 410}
        post(client, "/stop", grace_seconds=60)
        assert run.wait(limit_s=STEP_S) == 130, run.output.read_text()
        check_lineage(run.events())
        [evaluation] = [each for each in run.history().evaluations if not each.is_scheduled]
        assert evaluation.temperature == 0.8
