"""Test of a run that is interrupted, moved and resumed with a damaged newest checkpoint."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from worlds.runs.run_checks import check_finished
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config

from service.cli.artifacts import export_checkpoint

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_interrupted_run_resumes_after_a_move_and_with_a_damaged_checkpoint(tmp_path: Path) -> None:
    sections = {"trainer": {"num_ranks": 1}, "run": {"steps": 400, "evaluate_every": 1000}}
    config = small_config(tmp_path, **sections)
    with running(config, tmp_path / "before") as run:
        run.wait_for_step(3, limit_s=START_S)
        assert "rayloom_train_steps_total" in fetch(metrics_address(run))
        run.interrupt()
        assert run.wait(limit_s=STEP_S) == 130, run.log()
        stopped_at = run.summary()["steps"]
        newest, earlier = checkpoints(run)
        assert newest == f"step-{stopped_at:06d}-t1" and 3 <= stopped_at < 400

    moved = (tmp_path / "before").rename(tmp_path / "after")
    shard = next((moved / "checkpoints" / newest).glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x40
    shard.write_bytes(content)
    (tmp_path / "link").symlink_to(moved)

    steps = stopped_at + 1
    with running(config, tmp_path / "link", ["--resume", "--set", f"run.steps={steps}"]) as run:
        assert run.wait(limit_s=START_S + 4 * STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        assert f"got other bytes in {shard.name} than were written" in run.log()
        assert f"going back to {earlier}, step" in run.log()
        assert run.history().num_terms == 3
        assert checkpoints(run)[0] == f"step-{steps:06d}-t3"
    assert f"step {steps}" in export_checkpoint(moved, tmp_path / "exported")


def checkpoints(run: Run) -> list[str]:
    """Return the names of the checkpoints, the newest first."""
    return sorted((path.name for path in run.place.checkpoints.glob("step-*")), reverse=True)


def metrics_address(run: Run) -> str:
    [line] = [line for line in run.log().splitlines() if "metrics at http" in line]
    return line.split("metrics at ")[1]


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())
