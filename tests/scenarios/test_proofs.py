"""Tests of trainings that take minutes each, and of the lock: `make proof PART=training`."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from worlds.builders.code_repository import git_repository
from worlds.checks.recipe_page import recipes
from worlds.models.code_search_warmup import MODULES, warmed_up
from worlds.runs.run_driver import ROOT, Run, running

from service.cli.artifacts import write_code_search, write_reasoning_gym

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(3600)]

CONFIGS = ROOT / "deploy" / "configs"
CLIENT = ROOT / "docs" / "examples" / "submit_rollouts.py"
RUN_S = 1500.0
IMPORTS = """
import ray, torch, vllm, service.cli.main
from actors.environment.builtin.reasoning_gym_env import import_reasoning_gym
import_reasoning_gym()
"""


def vetted(name: str, directory: Path, **sections: dict[str, object]) -> Path:
    """Write a vetted configuration with some keys replaced into `directory`; return its path."""
    tree = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys}
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def finished(run: Run) -> dict[str, object]:
    assert run.wait(limit_s=RUN_S) == 0, run.log()
    summary = run.summary()
    assert summary["ledger"]["is_balanced"] and summary["ledger"]["in_flight"] == 0
    assert summary["max_policy_age"] <= summary["policy_age_bound"]
    return summary


def test_the_lock_installs_into_an_empty_environment_without_a_compiler(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "sh", "touch"):
        (tools / name).symlink_to(str(shutil.which(name)))
    python = str(Path(sys.base_prefix) / "bin" / "python3.11")
    venv = tmp_path / "venv"
    settings = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    done = subprocess.run(
        ["make", "setup", f"VENV={venv}", f"PYTHON={python}"],
        cwd=ROOT,
        env={**settings, "PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    done = subprocess.run(
        [venv / "bin" / "python", "-c", IMPORTS], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_to_win_on_every_seed(tmp_path: Path, seed: int) -> None:
    config = vetted("guessing-cpu", tmp_path, run={"seed": seed}, model={"tiny": {"seed": seed}})
    with running(config, tmp_path / "run") as run:
        summary = finished(run)
    assert summary["reward_first"] <= 0.45
    assert summary["reward_last"] >= 0.8
    assert summary["wall_s"] <= 8 * 60


def test_common_divisors_are_learnt_from_a_task_file_of_reasoning_gym(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    options = ["min_numbers=2", "max_numbers=2", "min_value=1", "max_value=9"]
    write_reasoning_gym("gcd", tasks, count=4000, seed=0, options=options)
    config = vetted("reasoning-gym-cpu", tmp_path, tasks={"file": str(tasks)})
    with running(config, tmp_path / "run") as run:
        finished(run)
        rewards = [record.value("reward_mean") or 0.0 for record in run.history().steps]
    first, last = rewards[:20], rewards[-20:]
    noise = statistics.stdev(first)
    assert statistics.mean(last) > statistics.mean(first) + 5 * noise


def test_calls_of_the_calculator_are_malformed_less_often(tmp_path: Path) -> None:
    config = vetted("calculator-cpu", tmp_path)
    with running(config, tmp_path / "run") as run:
        summary = finished(run)
    share = summary["malformed_share"]
    assert share["last"] < 0.5 * share["first"]
    assert summary["reward_last"] > summary["reward_first"]


def test_code_search_is_played_and_trained_from_a_repository(tmp_path: Path) -> None:
    files = {name: f'"""{docstring}"""\n' for name, docstring in MODULES.items()}
    repository = git_repository(tmp_path / "repository", ("first", files))
    tasks = tmp_path / "tasks.jsonl"
    write_code_search(repository, tasks, source="docstrings", count=len(MODULES), max_files=1)
    model = warmed_up(tmp_path / "model")
    config = vetted(
        "code-search-cpu",
        tmp_path,
        run={"steps": 24, "evaluate_every": 1000},
        model={"tiny": None, "path": str(model), "max_context_tokens": 1024},
        tasks={"file": str(tasks), "options": {"root": str(tmp_path)}, "evaluation_tasks": 0},
        rollouts={"max_turns": 3, "max_tokens_per_turn": 48},
        algorithm={"max_lag": 0},
        trainer={"learning_rate": 6.0e-4},
    )
    with running(config, tmp_path / "run") as run:
        summary = finished(run)
        rewards = [record.value("reward_mean") or 0.0 for record in run.history().steps]
    assert len(rewards) == 24 and summary["malformed_rewarded"] == 0
    # In so few steps the policy learns only the form of calls. It guesses one of the four files,
    # which is right one time in four.
    share = summary["malformed_share"]
    assert share["last"] < 0.5 * share["first"]
    assert all(0.1 < statistics.mean(part) for part in (rewards[:5], rewards[-5:]))
    assert not left_behind()


def left_behind() -> list[str]:
    """Return the commands of tool processes that have outlived their run."""
    return [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline", "ppid"])
        if process.info["ppid"] == 1
        and "code_search.server" in " ".join(process.info["cmdline"] or ())
    ]


def test_killed_and_resumed_run_learns_as_well_as_an_unbroken_run(tmp_path: Path) -> None:
    config = vetted("guessing-cpu", tmp_path)
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(50, limit_s=RUN_S)
        run.process.kill()
    with running(config, tmp_path / "run", ["--resume"]) as run:
        summary = finished(run)
        assert run.history().num_terms == 2
    assert summary["reward_last"] >= 0.8


def test_a_service_driven_by_a_client_learns_to_win(tmp_path: Path) -> None:
    config = vetted("guessing-cpu", tmp_path, service={"port": 0})
    tree = yaml.safe_load(config.read_text())
    num_tasks = tree["run"]["steps"] * tree["algorithm"]["groups_per_step"]
    with running(config, tmp_path / "run", command="serve") as run:
        address = run.api_address(limit_s=RUN_S)
        client = subprocess.run(
            [sys.executable, str(CLIENT), "--url", address, "--tasks", str(num_tasks)],
            capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip
        assert client.returncode == 0, client.stderr
        run.wait_for_output("the API continues to answer", limit_s=60)
        run.interrupt()
        summary = finished(run)
    found = re.findall(r"policy version (\d+): reward ([\d.]+)", client.stdout)
    rewards = [float(reward) for _, reward in found]
    assert [int(version) for version, _ in found] == sorted(int(version) for version, _ in found)
    assert statistics.mean(rewards[:5]) <= 0.45 and statistics.mean(rewards[-5:]) >= 0.8
    assert summary["ledger"]["admitted"] == num_tasks * tree["algorithm"]["group_size"]


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_trains_and_its_run_is_clean(tmp_path: Path, name: str) -> None:
    tree = recipes()[name]
    algorithm = {"groups_per_step": 4, "group_size": 4, **tree["algorithm"]}
    if algorithm["group_size"] == 1:
        algorithm["groups_per_step"] = 16
    config = vetted(
        "guessing-cpu",
        tmp_path,
        run={"steps": 3, "evaluate_every": 3, "checkpoint_every": 3, "stop_at_reward": None},
        algorithm={**algorithm, **small(algorithm)},
        inference={"enforce_eager": True},
        trainer=tree.get("trainer", {}),
    )
    with running(config, tmp_path / "run") as run:
        summary = finished(run)
    assert summary["steps"] == 3 and summary["skipped_steps"] == 0
    assert summary["trained_tokens"] > 0
    audit = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "inspect", str(tmp_path / "run"), "--audit"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr


def small(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's length penalty, if it has one, with limits for the game's short answers."""
    if "overlong" not in algorithm.get("reward", {}):
        return {}
    return {"reward": {**algorithm["reward"], "overlong": {"max_tokens": 30, "cache_tokens": 10}}}
