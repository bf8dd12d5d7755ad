"""Test of `python -m deploy.stack`: up, status, a killed service, up again and down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from worlds.agents.submitting_client import OVER
from worlds.checks.missing_tools import skip_or_fail
from worlds.runs.run_driver import ROOT, SMALL, START_S, STEP_S, small_config

from deploy.stack.__main__ import PROGRAMS, _alive

pytestmark = [pytest.mark.proof, pytest.mark.release, pytest.mark.timeout(900)]


def stack(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ.pop("RAYLOOM_API_KEY", None)
    return subprocess.run(
        [sys.executable, "-m", "deploy.stack", *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    for program in PROGRAMS.values():
        if shutil.which(program) is None:
            skip_or_fail(f"{program} is not installed (Debian: {program})")
    place = tmp_path / "stack"
    yield place
    left = _alive(place)
    stack("down", "--directory", str(place))
    assert not left


def wait_until(happened: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_stack_trains_submitted_tasks_and_continues_after_a_kill(
    place: Path, tmp_path: Path, small_model: str
) -> None:
    config = small_config(
        tmp_path, small_model, run={"steps": 1000, "evaluate_every": 1000},
        trainer={"num_ranks": 1},
    )  # fmt: skip
    chosen = ("--directory", str(place))
    up = ("up", *chosen, "--config", str(config), "--port", "18400")
    assert stack("status", *chosen).returncode == 1
    done = stack(*up)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stack(*up).stderr.endswith("run already; `down` ends them\n")
    with httpx.Client(base_url="http://127.0.0.1:18400", timeout=60) as client:
        train(client, "first")
        wait_until(lambda: steps_seen() >= 1, STEP_S)
        said = stack("status", *chosen)
        assert said.returncode == 0 and "answers" in said.stdout, said
        assert "none fires" in said.stdout
        _alive(place)["service"].kill()
        wait_until(lambda: stack("status", *chosen).returncode == 1, STEP_S)
        assert "ended" in stack("status", *chosen).stdout
        assert "has ended" in stack("down", *chosen).stdout
        assert stack(*up).returncode == 0
        train(client, "later")
    ended = stack("down", *chosen)
    assert ended.returncode == 0 and ended.stdout.count("has ended") == 3, ended
    lines = [each.info["cmdline"] or () for each in psutil.process_iter(["cmdline"])]
    own = [line for line in lines if str(place) in " ".join(line)]
    assert own == []


def train(client: httpx.Client, name: str) -> None:
    """Wait for the service, submit the tasks of a step, and wait for their end."""

    def is_ready() -> bool:
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_ready, START_S)
    tasks = [f"{name}-{number}" for number in range(SMALL["algorithm"]["groups_per_step"])]
    body = {"environment": "guessing", "tasks": [{"id": task} for task in tasks]}
    assert client.post("/api/v1/rollouts", json=body).status_code == 202

    def are_over() -> bool:
        """Return whether all tasks are trained, or evicted because their group has no variance."""
        views = [client.get(f"/api/v1/rollouts/{task}").json() for task in tasks]
        return {view["status"] for view in views} <= OVER

    wait_until(are_over, START_S)


def steps_seen() -> float:
    """Return the number of steps in Prometheus, which has the third port."""
    asked = {"query": "max(rayloom_train_steps_total)"}
    found = httpx.get("http://127.0.0.1:18402/api/v1/query", params=asked, timeout=30).json()
    return float(found["data"]["result"][0]["value"][1]) if found["data"]["result"] else 0.0
