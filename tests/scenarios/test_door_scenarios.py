"""Tests of a user's first runs: a data set, a reward function, tools and an environment."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running

from actors.deadline import poll
from actors.types import Outcome
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "docs" / "examples" / "numbers"
SUMS = ROOT / "docs" / "examples" / "sums"
QUICK = ["--set", "algorithm.group_size=8"]


@pytest.mark.parametrize(
    "function", ["score", pytest.param("as_trl_has_it", marks=pytest.mark.proof)]
)
def test_run_with_a_reward_function_resumes_without_a_configuration(
    tmp_path: Path, function: str
) -> None:
    """Run the commands of docs/reward-functions.md, interrupt the run and resume it."""
    place = tmp_path / "mine"
    shutil.copytree(EXAMPLE, place)
    asked = ["--dataset", "after.jsonl", "--reward", f"my.py:{function}", "--set", "run.steps=500"]
    with running(None, tmp_path / "run", [*asked, *QUICK], cwd=place) as run:
        run.wait_for_step(2, limit_s=START_S)
        run.interrupt()
        assert run.wait(limit_s=START_S) == 130, run.log()
        done = run.history().steps[-1].step
    again = ["--resume", "--set", f"run.steps={done + 2}"]
    with running(None, tmp_path / "run", again, cwd=place) as run:
        assert run.wait(limit_s=START_S + 2 * STEP_S) == 0, run.log()
        check_finished(run, steps=done + 2)
        check_audit(run)
    turns = [
        turn
        for step in open_journal(run.place.path).steps()
        for entry in step.entries
        for sample in entry.trajectory.samples
        for turn in sample.turns
    ]
    parts = {"score": {"right", "number"}, "as_trl_has_it": set[str]()}[function]
    assert turns and all(turn.reward_components.keys() == parts for turn in turns)


OF_DATA = ["--dataset", "sums.jsonl"]
FUNCTIONS = [*OF_DATA, "--reward", "my.py:score", "--tools", "my.py:calculator"]
CLASS = [*OF_DATA, "--reward", "my.py:from_notebook", "--tools", "my.py:Notebook"]


@pytest.mark.parametrize(
    ("asked", "config"),
    [(FUNCTIONS, None), (CLASS, None), ([], "mcp.yaml")],
    ids=["functions", "a class", "an MCP server"],
)
def test_tools_are_called_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], config: str | None
) -> None:
    """Run the commands of docs/tools.md for fewer steps."""
    place = tmp_path / "mine"
    shutil.copytree(SUMS, place)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    options = [*asked, "--set", "run.steps=3", *QUICK]
    file = None if config is None else place / config
    with running(file, tmp_path / "run", options, cwd=place) as run:
        assert run.wait(limit_s=START_S + 3 * STEP_S) == 0, run.log()
        check_finished(run, steps=3)
        check_audit(run)
        assert run.wait_until_gone(limit_s=STEP_S) == []
    trajectories = [
        entry.trajectory for step in open_journal(run.place.path).steps() for entry in step.entries
    ]
    # Calls were made and answered: both reward functions give 0.2 for a call that worked.
    assert any(len(each.turns) > 1 and each.episode_return >= 0.2 for each in trajectories)


def test_mcp_servers_end_with_a_killed_actor_and_a_run_that_is_interrupted_twice(
    tmp_path: Path,
) -> None:
    place = tmp_path / "mine"
    shutil.copytree(SUMS, place)
    # A launcher, like npx and uvx, also starts a process that would outlive its server.
    files = [f"{place}/{name}" for name in ("launch.sh", "server.py", "sums.jsonl")]
    launcher, server, watched = files
    Path(launcher).write_text(f"tail -f {watched} > /dev/null &\n{sys.executable} {server}; true\n")
    config = yaml.safe_load((place / "mcp.yaml").read_text())
    config["tasks"]["options"]["mcp"] = {"sums": {"command": ["sh", launcher], "per": "episode"}}
    config["run"]["steps"] = 100
    config["rollouts"]["slots_per_actor"] = 8
    # Each rollout starts a process, which takes a second of a processor.
    config["algorithm"]["groups_per_step"] = 2
    (place / "mcp.yaml").write_text(yaml.safe_dump(config))

    def of_servers() -> list[psutil.Process]:
        # Between two steps there may be no server.
        return poll(lambda: open_now() or None, limit_s=STEP_S) or []

    def open_now() -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if not {*files}.isdisjoint(_line(each))]

    with running(place / "mcp.yaml", tmp_path / "run", QUICK, cwd=place) as run:
        run.wait_for_step(1, limit_s=START_S)
        before = of_servers()
        assert before
        run.kill_part("ray::EnvironmentActor")
        run.advance(1, limit_s=START_S)
        assert psutil.wait_procs(before, timeout=STEP_S)[1] == []
        assert of_servers()
        run.interrupt()
        time.sleep(1.0)
        run.interrupt()
        assert run.wait(limit_s=START_S) == 130, run.log()
    assert psutil.wait_procs(open_now(), timeout=STEP_S)[1] == []


def _line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def test_environment_of_the_tutorial_is_played_and_trained(tmp_path: Path) -> None:
    """Run the command of docs/environment-tutorial.md for fewer steps."""
    place = tmp_path / "mine"
    shutil.copytree(ROOT / "docs" / "examples" / "sticks", place)
    options = ["--set", "run.steps=3", *QUICK]
    with running(place / "sticks.yaml", tmp_path / "run", options, cwd=place) as run:
        assert run.wait(limit_s=START_S + 3 * STEP_S) == 0, run.log()
        check_finished(run, steps=3)
        check_audit(run)
    trajectories = [
        entry.trajectory for step in open_journal(run.place.path).steps() for entry in step.entries
    ]
    # Some games have a second move, and some answers are not a move.
    assert any(len(each.turns) > 1 for each in trajectories)
    assert any(each.outcome is Outcome.MALFORMED_TOOL_CALL for each in trajectories)
