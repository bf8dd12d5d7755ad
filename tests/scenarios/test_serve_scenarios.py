"""Test of `rayloom serve`: a client over HTTP, dead parts, kill -9 and a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from worlds.runs.run_checks import check_lineage
from worlds.runs.run_driver import ENGINE, START_S, STEP_S, Run, running, small_config
from worlds.servers.otlp_collector import Collector, attributes, collecting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KEY = "a key of the scenario, long enough"
OVER = {"trained", "evicted", "cancelled"}


class Api:
    """The API of a run that is being served."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def submit(self, *ids: str, **fields: Any) -> httpx.Response:
        tasks = [{"id": each} for each in ids]
        body = {"environment": "guessing", "tasks": tasks, **fields}
        deadline = time.monotonic() + START_S
        while True:
            answer = self.client.post("/api/v1/rollouts", json=body)
            # The API answers 404 until its route exists, and 503 until the run has its lease.
            is_early = answer.status_code in (404, 503)
            if not is_early or time.monotonic() > deadline:
                return answer
            time.sleep(0.2)

    def get(self, task_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/api/v1/rollouts/{task_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_ready(self, *, is_ready: bool, limit_s: float) -> list[str]:
        """Wait until the run is ready, or is not; return the reasons of /readyz."""
        deadline = time.monotonic() + limit_s
        while True:
            answer = self.client.get("/readyz")
            # Until the route exists, Serve itself answers with 404.
            body = {} if answer.status_code == 404 else answer.json()
            if answer.status_code == (200 if is_ready else 503):
                return list(body.get("reasons", [body.get("detail", "")]))
            assert time.monotonic() < deadline, body
            time.sleep(0.1)

    def wait_until_over(self, *ids: str, limit_s: float) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + limit_s
        while True:
            found = {each: self.get(each) for each in ids}
            if all(view["status"] in OVER for view in found.values()):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.5)


@contextmanager
def api_of(run: Run) -> Iterator[Api]:
    address = run.api_address(limit_s=START_S)
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=headers, timeout=START_S) as client:
        yield Api(client)


def test_service_trains_submitted_tasks_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: str
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 400, "evaluate_every": 1000, "checkpoint_every": 2},
        trainer={"num_ranks": 1},
        service={"port": 0, "max_waiting_tasks": 24},
        inference={"publish_deadline_s": 8},
    )
    first = [f"first-{number}" for number in range(8)]
    later = [f"later-{number}" for number in range(20)]
    with running(config, tmp_path / "run", command="serve") as run, api_of(run) as api:
        reasons = api.wait_ready(is_ready=False, limit_s=START_S)
        assert any("starting" in reason for reason in reasons)
        # Accepted while the engines still start.
        assert api.submit(*first).json()["accepted"] == 8
        api.wait_ready(is_ready=True, limit_s=START_S)
        check_refusals(api)
        found = api.wait_until_over(*first, limit_s=2 * STEP_S)
        check_finalised(found)
        assert {sample["step"] for view in found.values() for sample in view["samples"]} == {1, 2}
        assert [found[each]["policy_versions"] for each in (first[0], first[-1])] == [
            [0, 0],
            [1, 1],
        ]
        check_page(api)
        assert api.submit(*first).json()["accepted"] == 0
        run.kill_part(ENGINE)
        (reason,) = api.wait_ready(is_ready=False, limit_s=STEP_S)
        assert "0 of 1 engines hold the current version" in reason
        assert "a publication may take 8 s" in reason
        wait_for_gauge(run, "rayloom_engines_ready", 0)
        api.wait_ready(is_ready=True, limit_s=START_S)
        wait_for_gauge(run, "rayloom_engines_ready", 1)
        # The run notices the death of an idle trainer too.
        run.kill_part("ray::TrainerRankActor")
        run.wait_for_log("a new group is at version 2", limit_s=START_S)
        api.wait_ready(is_ready=True, limit_s=STEP_S)
        assert api.submit(*later).json()["accepted"] == 20
        answer = api.submit(*(f"many-{number}" for number in range(20)))
        assert answer.status_code == 429 and answer.headers["retry-after"]
        wait_for_waiting_tasks(run, limit_s=STEP_S)
        run.advance(1, limit_s=STEP_S)
        run.process.kill()
    # The second half of the run is traced.
    with collecting() as collector:
        traced = ["--resume", "--set", f"tracing.endpoint={collector.url}"]
        again = running(config, tmp_path / "run", traced, command="serve")
        finish(again, first, later)
        check_traces(collector, later)


def check_page(api: Api) -> None:
    """Check the page after two steps: it needs no key, and its requests get steps and texts."""
    page = api.client.get("/", headers={"authorization": ""})
    assert page.status_code == 200 and "Rayloom" in page.text
    # A task is over when its step takes it, but the step's row comes when the step is trained.
    deadline = time.monotonic() + STEP_S
    while (found := api.client.get("/api/v1/run").json())["steps"].get("step") != [1, 2]:
        assert time.monotonic() < deadline, found["steps"]
        time.sleep(0.2)
    assert found["live"]["phase"] == "training"
    assert [table["caption"] for table in found["live"]["tables"]] == ["Window", "Queue", "Engines"]
    assert api.client.get("/api/v1/run", params={"term": 1, "after": 2}).json()["steps"] == {}
    listed = api.client.get("/api/v1/journal", params={"task": "first-0"}).json()["trajectories"]
    assert len(listed) == 4 and {line["step"] for line in listed} == {1}
    tokens = api.client.get("/api/v1/rollouts/first-0-3/trajectory").json()
    assert tokens["task"] == "first-0" and tokens["note"] == ""
    assert "Guess my number" in "".join(tokens["samples"][0]["texts"])


def finish(again: AbstractContextManager[Run], first: list[str], later: list[str]) -> None:
    """Resume after the kill, and check that all accepted tasks end."""
    with again as run, api_of(run) as api:
        assert api.submit(*first, *later).json()["accepted"] == 0
        check_finalised(api.wait_until_over(*later, limit_s=START_S))
        assert api.client.post("/api/v1/stop", json={"grace_seconds": 60}).status_code == 202
        assert run.wait(limit_s=STEP_S) == 130, run.output.read_text()
        check_lineage(run.events())
        left = [item for item in run.events() if item.kind != "admitted"]
        assert len(left) == 4 * len(first + later)
        assert run.wait_until_gone(limit_s=STEP_S) == []


def check_traces(collector: Collector, submitted: list[str]) -> None:
    """Check that each rollout that was trained after the kill has its own complete trace."""
    traces = collector.traces()
    trained = [each for each in traces.values() if "optimiser step" in each.spans]
    tasks = {attributes(each.root)["rayloom.task_id"] for each in trained}
    # Groups without a signal, which may be most of them, are not trained.
    assert tasks and tasks <= set(submitted)
    assert len(trained) == 4 * len(tasks)
    for each in trained:
        assert {"wait for admission", "attempt", "wait for the step", "train"} <= each.spans.keys()
        [(began, ended)] = each.seconds("rollout")
        for name in each.spans:
            assert all(began <= start <= stop <= ended for start, stop in each.seconds(name)), name


def gauge(run: Run, name: str) -> float:
    """Return the current value of a metric of the whole run."""
    text = httpx.get(f"http://{run.metrics_address(limit_s=STEP_S)}/metrics").text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    (sample,) = samples
    assert sample.labels == {"run": "small"}
    return sample.value


def wait_for_gauge(run: Run, name: str, wanted: float) -> None:
    """Wait for a gauge's value: it changes within seconds, and the run's state lasts longer."""
    deadline = time.monotonic() + STEP_S
    while (value := gauge(run, name)) != wanted:
        assert time.monotonic() < deadline, f"{name} is {value}, not {wanted}"
        time.sleep(0.1)


def wait_for_waiting_tasks(run: Run, *, limit_s: float) -> None:
    """Wait for waiting tasks: the gauge changes within seconds, and a step takes longer."""
    deadline = time.monotonic() + limit_s
    while (waiting := gauge(run, "rayloom_service_waiting_tasks")) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert waiting <= 20
    assert gauge(run, "rayloom_service_waiting_tasks_limit") == 24


def check_finalised(found: dict[str, dict[str, Any]]) -> None:
    """Check that each rollout left with a step, trained or evicted for an expected reason."""
    for view in found.values():
        assert view["status"] in ("trained", "evicted") and view["reward"] is not None
        for sample in view["samples"]:
            is_trained = sample["status"] == "trained"
            assert is_trained or sample["reason"] in ("zero_variance", "masked")
            assert sample["step"] >= 1 and sample["outcome"]


def check_refusals(api: Api) -> None:
    assert api.submit("x", environment="chess").status_code == 422
    assert api.submit("first-0", num_samples=2).status_code == 409
    answer = api.client.get("/api/v1/rollouts/first-0", headers={"authorization": "Bearer no"})
    assert answer.status_code == 401
    # Serve's own proxy lists no routes, and requires a key before it reads a body.
    assert api.client.get("/-/routes").status_code == 404
    large, unkeyed = b" " * (4 << 20), {"authorization": "", "content-type": "application/json"}
    answer = api.client.post("/v1/messages", content=large, headers=unkeyed)
    assert answer.status_code == 401 and answer.headers["connection"] == "close"
    assert api.submit(*(f"many-{number}" for number in range(40))).status_code == 413
    json = {"content-type": "application/json"}
    answer = api.client.post("/api/v1/rollouts", content=b"x" * (2 << 20), headers=json)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
