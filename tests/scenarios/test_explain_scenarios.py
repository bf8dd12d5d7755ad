"""Tests of `rayloom explain` on a run's steps, and of what it finds in a thousand trajectories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.runs.explained_run import config_of, played_run, poisoned, sampled_groups
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running, small_config

from service.cli.explain import ranked
from service.explain.recompute import explain_step, find_source

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_the_steps_of_a_run_of_two_ranks_are_explained_by_the_command(
    tmp_path: Path, small_model: str
) -> None:
    config = small_config(tmp_path, small_model)
    with running(config, tmp_path / "run") as run:
        assert run.wait(limit_s=START_S + 4 * STEP_S) == 0, run.log()
        steps = run.history().steps
    for record in steps[:3]:
        # Steps 2 and 4 have checkpoints.
        command = ["explain", str(tmp_path / "run"), "--step", str(record.step), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "service.cli.main", *command, "--replay"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        explained = json.loads(done.stdout)
        assert explained["is_exact"] and explained["replayed_steps"] == (record.step == 2)
        assert explained["grad_norm"] == pytest.approx(record.value("grad_norm"), rel=1e-3)
        assert len(explained["trajectories"]) == record.num_trajectories - sum(
            record.evictions.values()
        )


@pytest.mark.parametrize(
    ("scale", "seed"), [("std", 1), pytest.param("none", 2, marks=pytest.mark.proof)]
)
def test_nine_of_ten_poisoned_trajectories_rank_among_the_first_ten(
    tmp_path: Path, scale: str, seed: int
) -> None:
    with played_run(tmp_path / "run", config_of(algorithm={"scale": scale})) as run:
        groups = sampled_groups(run.model, num_groups=63, group_size=16, seed=seed)
        groups, names = poisoned(groups, run.model, count=10)
        run.step(groups)
    found = explain_step(find_source(tmp_path / "run", 1))
    assert found.grad_norm == pytest.approx(run.grad_norm, rel=1e-5)
    first = ranked(found.trajectories, "own")[:10]
    assert len({each.first.trajectory_id for each in first} & names) >= 9


def test_shares_of_a_bfloat16_step_add_up_to_one_within_rounding(
    tmp_path: Path, tiny_models: dict[bool, str]
) -> None:
    config = config_of(tiny_models[True], trainer={"dtype": "bfloat16"})
    with played_run(tmp_path / "run", config) as run:
        run.step(sampled_groups(run.model, num_groups=4, group_size=4, seed=1))
    found = explain_step(find_source(tmp_path / "run", 1))
    assert found.grad_norm == pytest.approx(run.grad_norm, rel=0.02)
    assert sum(each.share for each in found.trajectories) == pytest.approx(1, abs=0.02)
