"""How whole runs end before their time: by Ctrl-C in the middle of the start, and by giving up."""

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

# A bound, not a measure: that the start was not waited for is told by the log.
STOP_S = 120.0


def before_anything_is_there(run: Run) -> None:
    """The interpreter handles signals by then; the configuration and the model come next."""
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
        pytest.param(before_anything_is_there, marks=pytest.mark.proof),
        when_ray_is_coming_up,
        pytest.param(when_the_trainer_starts, marks=pytest.mark.proof),
        # `make chaos` has the second interrupt at that moment, below.
        pytest.param(when_the_engines_start, marks=pytest.mark.proof),
    ],
)
def test_an_interrupted_start_is_given_up_and_leaves_nothing_alive(
    tmp_path: Path, moment: Callable[[Run], None], small_model: str
) -> None:
    built = None if moment is before_anything_is_there else small_model
    with running(small_config(tmp_path, built), tmp_path / "run") as run:
        moment(run)
        run.interrupt()
        assert run.wait(limit_s=STOP_S) == 130, run.output.read_text()
        assert run.wait_until_gone(limit_s=STOP_S) == []
        assert " training" not in run.log()
        assert "Traceback" not in run.output.read_text() + run.log()


def test_a_sigterm_while_ray_starts_is_an_interrupted_start(
    tmp_path: Path, small_model: str
) -> None:
    """Ray takes the signal for itself meanwhile."""
    with running(small_config(tmp_path, small_model), tmp_path / "run") as run:
        when_ray_is_coming_up(run)
        time.sleep(1.0)
        run.process.terminate()
        assert run.wait(limit_s=STOP_S) == 130, run.output.read_text()
        assert run.wait_until_gone(limit_s=STOP_S) == []
        assert "Traceback" not in run.output.read_text() + run.log()


def test_a_second_interrupt_leaves_nothing_alive_wherever_it_comes(
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


def test_ctrl_z_stops_the_display_and_the_run_goes_on(tmp_path: Path, small_model: str) -> None:
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
        told = run.output.read_text()
        for words in ("groups in a row", "wall_timeout", "environment reset", "turn_deadline_s"):
            assert words in told
        assert "--resume" in told and run.wait_until_gone(limit_s=STOP_S) == []
        summary = run.summary()
        stopped_at = summary["steps"]
        assert summary["ledger"]["is_balanced"] and "groups in a row" in summary["exit_reason"]
        assert [path.name for path in run.place.checkpoints.glob("step-*")] == [
            f"step-{stopped_at:06d}-t1"
        ]
