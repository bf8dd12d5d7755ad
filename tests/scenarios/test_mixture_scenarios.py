"""Tests of runs with several environments and a curriculum, which are interrupted and resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running, small_config

from actors.environment.tasks import GeneratedTasks, write_tasks
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_mixture_uses_the_weights_limits_and_evaluations_of_its_parts(
    tmp_path: Path, small_model: str
) -> None:
    listed = tmp_path / "tasks.jsonl"
    source = GeneratedTasks("guessing", run_seed=1)
    write_tasks(listed, [source.task(number) for number in range(6)])
    parts = {
        "short": {
            "weight": 2,
            "tasks": {"environment": "guessing", "evaluation_tasks": 2},
            "rollouts": {"max_turns": 1},
        },
        "sums": {
            "tasks": {"environment": "calculator", "evaluation_tasks": 2},
            "rollouts": {"max_turns": 2, "max_tokens_per_turn": 24, "temperature": 0.8},
            "evaluation": {"samples": 2, "temperature": 1.0},
        },
        "listed": {
            "tasks": {"environment": "guessing", "file": str(listed), "evaluation_tasks": 1},
        },
    }
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 40},
        tasks={"environment": "", "evaluation_tasks": 64},
        mixture=parts,
        curriculum={"resting_share": 0.5, "window": 1},
        trainer={"num_ranks": 1},
    )
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(3, limit_s=START_S)
        run.interrupt()
        assert run.wait(limit_s=START_S) == 130, run.log()
        done = run.history().steps[-1].step
    again = ["--resume", "--set", f"run.steps={done + 3}"]
    with running(None, tmp_path / "run", again) as run:
        assert run.wait(limit_s=START_S + 3 * STEP_S) == 0, run.log()
        check_finished(run, steps=done + 3)
        check_audit(run)
        history = run.history()
    played: Counter[str] = Counter()
    for step in history.steps:
        # Each step has four groups: two, one and one, unless a part rests.
        played.update({name: each.num_trajectories for name, each in step.environments.items()})
        assert sum(each.num_trajectories for each in step.environments.values()) == 16
        # The trainer scores each part's tokens at the temperature that they were sampled at.
        assert step.statistics.get("mismatch_k3_mean", 0.0) < 1e-4
    assert played.keys() == parts.keys() and played["short"] > played["sums"]
    last = {each.name: each for each in history.evaluations if each.step == done + 3}
    assert last.keys() == {"", *parts}
    assert [last[name].num_tasks for name in ("short", "sums", "listed", "")] == [2, 2, 1, 5]
    assert (last["sums"].num_samples, last["short"].num_samples) == (2, 1)
    turns: dict[str, int] = {}
    for stored in open_journal(run.place.path).steps():
        for entry in stored.entries:
            name = entry.trajectory.environment
            turns[name] = max(turns.get(name, 0), len(entry.trajectory.turns))
    assert turns["short"] == 1 and turns["sums"] <= 2 < turns["listed"] <= 4


@pytest.mark.proof
@pytest.mark.training
@pytest.mark.timeout(1800)
def test_curriculum_helps_if_two_of_three_parts_teach_nothing(tmp_path: Path) -> None:
    """Compare two runs of docs/mixtures.md that differ only in the share of resting tasks."""
    held_out: dict[float, float] = {}
    for share in (0.1, 1.0):
        settings = {
            "run.steps": 140,
            "run.seed": 1,
            "model.tiny.seed": 1,
            "curriculum.resting_share": share,
        }
        options = [each for key, value in settings.items() for each in ("--set", f"{key}={value}")]
        config, place = ROOT / "docs" / "examples" / "mixture.yaml", tmp_path / str(share)
        with running(config, place, options) as run:
            assert run.wait(limit_s=800.0) == 0, run.log()
            last = {each.name: each for each in run.history().evaluations if each.step == 140}
            held_out[share] = last["fit"].best_known_reward or 0.0
    assert held_out[0.1] > held_out[1.0] + 0.2, held_out
