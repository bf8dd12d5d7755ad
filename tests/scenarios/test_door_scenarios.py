"""What a researcher begins with: a data set, a function and tools, without a configuration."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from worlds.run_checks import check_audit, check_finished
from worlds.run_driver import ROOT, START_S, STEP_S, running

from actors.types import Outcome
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "docs" / "examples" / "numbers"
SUMS = ROOT / "docs" / "examples" / "sums"
QUICK = ["--set", "algorithm.group_size=8"]


@pytest.mark.parametrize(
    "function", ["score", pytest.param("as_trl_has_it", marks=pytest.mark.proof)]
)
def test_a_function_is_trained_by_interrupted_and_goes_on_without_a_configuration(
    tmp_path: Path, function: str
) -> None:
    """docs/reward-functions.md, as its commands are."""
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
    """docs/tools.md, as its commands are, for fewer steps."""
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
    # Calls were made, and answered: both functions give 0.2 for one that worked.
    assert any(len(each.turns) > 1 and each.episode_return >= 0.2 for each in trajectories)


def test_a_world_of_ones_own_is_played_and_trained(tmp_path: Path) -> None:
    """docs/environment-tutorial.md, as its command is, for fewer steps."""
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
    # Some games go on after the first move, and some moves are none.
    assert any(len(each.turns) > 1 for each in trajectories)
    assert any(each.outcome is Outcome.MALFORMED_TOOL_CALL for each in trajectories)
