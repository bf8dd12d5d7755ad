"""What a researcher begins with: a data set and a function, without a configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from worlds.run_checks import check_audit, check_finished
from worlds.run_driver import ROOT, START_S, STEP_S, running

from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "docs" / "examples" / "numbers"
QUICK = ["--set", "algorithm.group_size=8"]


@pytest.mark.parametrize("function", ["score", "as_trl_has_it"])
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
