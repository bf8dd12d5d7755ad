"""Tests of `rayloom.train`, `evaluate` and `serve` in a process with an event loop and a Ray."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from worlds.runs.run_driver import SMALL

import rayloom
from service.api.schemas import TaskBody
from service.launch.run_dir import RunDir

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(1200)]
ROWS = [{"prompt": f"Which number comes after {n}?", "answer": str(n + 1)} for n in range(1, 8)]


def make_score(bonus: float) -> Callable[[str, str], float]:
    """Return a function that cannot be imported by name."""

    def score(completion: str, answer: str) -> float:
        return bonus + (completion.strip() == answer)

    return score


def configuration(model: str) -> dict[str, Any]:
    config = copy.deepcopy(SMALL)
    config["model"].update(tiny=None, path=model)
    return config


async def test_two_runs_train_with_functions_by_value_and_one_is_resumed(
    tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(small_model)
    config["run"] = {"steps": 2, "checkpoint_every": 1, "evaluate_every": 10}
    config["tasks"] = {"evaluation_tasks": 0}
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        runs = [
            rayloom.train(config, dataset=ROWS, reward=make_score(bonus), run_dir=f"run-{bonus}")
            for bonus in (2.0, 5.0)
        ]
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    for result, bonus in zip(runs, (2.0, 5.0), strict=True):
        assert result.summary["ledger"]["is_balanced"]
        rows = result.trajectories()
        assert {row["step"] for row in rows} == {1, 2}
        found = {row["episode_return"] for row in rows if row["outcome"] == "completed"}
        assert found and found <= {bonus, bonus + 1}
    further = rayloom.train(resume=runs[0].run_dir, run={"steps": 3})
    assert {row["step"] for row in further.trajectories()} == {1, 2, 3}
    stored = RunDir(path=further.run_dir)
    assert list(stored.functions.glob("given_*.py")) and (stored.functions / "rows.jsonl").is_file()
    assert json.loads(stored.sources_file.read_text())["modules"]


async def test_a_run_serves_tasks_and_its_checkpoint_is_evaluated(
    tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(small_model)
    config["service"] = {"port": 0}
    with rayloom.serve(config, run_dir="served", run={"steps": 2}) as client:
        client.submit("guessing", [TaskBody(id=f"task-{number}") for number in range(8)])
        found = [client.wait(f"task-{number}") for number in range(2)]
    assert all(each.reward is not None for each in found)
    result = rayloom.evaluate("served", tasks=3, out="played.jsonl")
    assert (result["num_tasks"], result["temperature"]) == (3, 0)
    assert Path("played.jsonl").is_file()
