"""Tests of runs that end early: by Ctrl-C during the start, or because all episodes fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config

pytestmark = [pytest.mark.scenario, pytest.mark.chaos, pytest.mark.timeout(900)]

# A limit, not an expected time: the log shows that the command did not wait for the start.
STOP_S = 120.0


def before_the_configuration_is_read(run: Run) -> None:
    """Wait until the interpreter handles signals; the configuration and the model come next."""
    while not any("torch" in item.path for item in run.alive()[0].memory_maps()):
        assert run.process.poll() is None, run.output.read_text()
        time.sleep(0.1)


def when_ray_is_coming_up(run: Run) -> None:
    while len(run.alive()) < 2:
        assert run.process.poll() is None, run.output.read_text()
        time.sleep(0.1)


def when_the_trainer_starts(run: Run) -> None:
    run.wait_for_log("starting: engines and trainer", limit_s=START_S)


def when_the_engines_start(run: Run) -> None:
    run.wait_for_log("starting: waiting for the engines", limit_s=START_S)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(before_the_configuration_is_read, marks=pytest.mark.proof),
        when_ray_is_coming_up,
        pytest.param(when_the_trainer_starts, marks=pytest.mark.proof),
        # In `make chaos` the test of a second interrupt, below, covers this moment.
        pytest.param(when_the_engines_start, marks=pytest.mark.proof),
    ],
)
def test_interrupted_start_leaves_no_process(
    tmp_path: Path, moment: Callable[[Run], None], small_model: str
) -> None:
    built = None if moment is before_the_configuration_is_read else small_model
    with running(small_config(tmp_path, built), tmp_path / "run") as run:
        moment(run)
        run.interrupt()
        assert run.wait(limit_s=STOP_S) == 130, run.output.read_text()
        assert run.wait_until_gone(limit_s=STOP_S) == []
        assert " training" not in run.log()
        assert "Traceback" not in run.output.read_text() + run.log()


def test_sigterm_while_ray_starts_interrupts_the_start(tmp_path: Path, small_model: str) -> None:
    """Check SIGTERM while Ray's own handler is installed."""
    with running(small_config(tmp_path, small_model), tmp_path / "run") as run:
        when_ray_is_coming_up(run)
        time.sleep(1.0)
        run.process.terminate()
        assert run.wait(limit_s=STOP_S) == 130, run.output.read_text()
        assert run.wait_until_gone(limit_s=STOP_S) == []
        assert "Traceback" not in run.output.read_text() + run.log()


def test_second_interrupt_during_the_start_leaves_no_process(
    tmp_path: Path, small_model: str
) -> None:
    with running(small_config(tmp_path, small_model), tmp_path / "run") as run:
        when_the_engines_start(run)
        run.interrupt()
        time.sleep(0.6)
        run.interrupt()
        assert run.wait(limit_s=STOP_S) == 130, run.output.read_text()
        assert run.wait_until_gone(limit_s=STOP_S) == []
        assert "resume with --resume" in run.output.read_text()


def test_ctrl_z_stops_the_display_and_the_run_continues(tmp_path: Path, small_model: str) -> None:
    config = small_config(tmp_path, small_model, run={"steps": 12})
    with running(config, tmp_path / "run", is_job=True) as run:
        run.wait_for_step(1, limit_s=START_S)
        os.killpg(run.process.pid, signal.SIGTSTP)
        process = psutil.Process(run.process.pid)
        end = time.monotonic() + STOP_S
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
            time.sleep(0.1)
        assert process.status() == psutil.STATUS_STOPPED
        assert "the display is stopped, and the run continues" in run.output.read_text()
        run.wait_for_log("all 12 steps are done", limit_s=12 * STEP_S)
        os.killpg(run.process.pid, signal.SIGCONT)
        assert run.wait(limit_s=STOP_S) == 0, run.output.read_text()


@pytest.mark.proof
def test_a_run_whose_every_episode_fails_says_why_and_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    hangs = tmp_path / "hangs"
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 400, "checkpoint_every": 1000, "evaluate_every": 1000},
        trainer={"num_ranks": 1},
        tasks={
            "environment": "worlds.parts.environment_fakes:SometimesHanging",
            "options": {"hangs": str(hangs)},
        },
        rollouts={"turn_deadline_s": 5, "max_failed_groups": 6, "failed_groups_grace_s": 1},
    )
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(1, limit_s=START_S)
        hangs.touch()
        assert run.wait(limit_s=STEP_S) == 1, run.output.read_text()
        printed = run.output.read_text()
        for words in ("groups in a row", "wall_timeout", "environment reset", "turn_deadline_s"):
            assert words in printed
        assert "--resume" in printed and run.wait_until_gone(limit_s=STOP_S) == []
        summary = run.summary()
        stopped_at = summary["steps"]
        assert summary["ledger"]["is_balanced"] and "groups in a row" in summary["exit_reason"]
        assert [path.name for path in run.place.checkpoints.glob("step-*")] == [
            f"step-{stopped_at:06d}-t1"
        ]
