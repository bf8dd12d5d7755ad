"""Tests of a run whose parts are killed or frozen while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import ENGINE, START_S, STEP_S, running, small_config

from actors.types import Outcome
from service.config.file import load_config
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

# A worker kills itself at its second move, until three workers have done so.
DEADLY = """
import os, signal
from pathlib import Path

from actors.environment.protocol import Message, Observation, Role, StepResult

class Deadly:
    def __init__(self):
        self.moves = 0

    async def reset(self, task):
        return Observation(messages=(Message(role=Role.USER, content="Say it."),))

    async def step(self, action):
        self.moves += 1
        if self.moves == 1:
            return StepResult(messages=(Message(role=Role.USER, content="Again."),))
        for number in range(3):
            try:
                os.close(os.open(f"deaths/{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            Path(f"deaths/{number}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return StepResult(reward=float(len(action.text) % 3), terminated=True)

    async def close(self): ...
"""


def test_a_run_survives_the_death_of_each_part(tmp_path: Path, small_model: str) -> None:
    """Kill an environment actor, an engine, a trainer rank and the supervisor; freeze an actor.

    The critic and the reference die with the ranks and come back with them. kill -9 of the whole
    run is in test_serve_scenarios.py, and in test_proofs.py, where the run trains to its end.
    """
    steps = 24
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": steps, "evaluate_every": 50},
        algorithm={
            "max_lag": 1, "baseline": "critic", "scale": "none",
            "reward": {"kl": {"coefficient": 0.01}},
        },
        rollouts={"num_actors": 2, "turn_deadline_s": 90, "frozen_after_s": 10},
    )  # fmt: skip
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        run.kill_part("ray::EnvironmentActor")
        run.advance(2, limit_s=START_S)
        assert "environment actor" in run.log()
        # No step ends without an engine, so that both faults are waited for together.
        run.kill_part(ENGINE)
        run.freeze_part("ray::EnvironmentActor")
        run.wait_for_log("an engine was lost; 0 of 1 ready", limit_s=START_S)
        run.wait_for_log("answered nothing for 10 s", limit_s=START_S)
        run.wait_for_log("an engine is back; 1 of 1 ready", limit_s=START_S)
        run.kill_part("ray::TrainerRankActor")
        run.wait_for_log("a new group is at version", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        run.kill_part("ray::Supervisor")
        run.wait_for_log(
            "the supervisor died; a new one continues under a new lease", limit_s=START_S
        )
        run.wait_for_output("the supervisor died", limit_s=START_S)
        assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        assert run.history().num_terms >= 2
        bound = load_config(run.place.config_file).algorithm.max_policy_age
        assert max(record.policy_age_max for record in run.history().steps) <= bound
        assert all(record.stages.score > 0 for record in run.history().steps)
        check_audit(run)


def test_lost_rank_or_merge_actor_is_replaced_while_other_parts_continue(
    tmp_path: Path, small_model: str
) -> None:
    """Kill a rank, then the merge actor, then a rank again, which trains the new actor's batches.

    No new term begins: all steps belong to the first term, and no rollout needs a second attempt.
    """
    steps = 20
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": steps, "checkpoint_every": 4, "evaluate_every": 50},
        algorithm={"max_lag": 1},
    )
    others = (ENGINE, "ray::EnvironmentActor", "ray::TrajectoryQueue")
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        before = [process.pid for title in others for process in run.processes(title)]
        run.kill_part("ray::TrainerRankActor")
        run.wait_for_log("steps trained again", limit_s=START_S)
        run.advance(3, limit_s=START_S)
        run.wait_for_log("checkpoint of step", limit_s=START_S)
        run.kill_part("ray::MergeActor")
        run.wait_for_log("a new merge actor makes the batch again", limit_s=START_S)
        run.kill_part("ray::TrainerRankActor")
        run.advance(2, limit_s=START_S)
        assert before == [process.pid for title in others for process in run.processes(title)]
        assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.log()
        assert "weights differ from the earlier ones" not in run.log()
        assert run.history().num_terms == 1
        check_finished(run, steps=steps)
        check_audit(run)
        # No rollout that was in flight is played again.
        journal = open_journal(run.place.path)
        entries = [entry for step in journal.steps() for entry in step.entries]
        assert {entry.trajectory.attempt for entry in entries} == {0}


def test_run_whose_node_is_lost_ends_and_says_how_to_resume(
    tmp_path: Path, small_model: str
) -> None:
    """Kill the only raylet, without which no part can be replaced."""
    sections = {"run": {"steps": 400, "evaluate_every": 1000}, "trainer": {"num_ranks": 1}}
    with running(small_config(tmp_path, small_model, **sections), tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        run.kill_part(r"\S+/raylet/raylet ")
        assert run.wait(limit_s=STEP_S) == 1, run.log()
        assert "the supervisor is gone" in run.output.read_text()
        assert "resume with --resume" in run.output.read_text()
        assert run.wait_until_gone(limit_s=STEP_S) == []


@pytest.mark.proof
@pytest.mark.training
def test_episodes_of_a_killed_worker_are_environment_errors_and_played_again(
    tmp_path: Path, small_model: str
) -> None:
    """Kill three workers of a user's environment in the middle of their episodes.

    The start of a whole run takes most of a minute, so that this is a proof.
    """
    (tmp_path / "deadly.py").write_text(DEADLY)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 2, "checkpoint_every": 2, "evaluate_every": 50},
        tasks={"environment": "deadly:Deadly", "evaluation_tasks": 0},
        trainer={"num_ranks": 1},
    )
    with running(config, tmp_path / "run", cwd=tmp_path) as run:
        assert run.wait(limit_s=START_S + 2 * STEP_S) == 0, run.log()
        check_finished(run, steps=2)
        check_audit(run)
    assert "first environment_error" in run.log() and "step: WorkerLost" in run.log()
    assert "deadly:Deadly: 3 calls were lost" in run.log()
    assert len({each.read_text() for each in deaths.iterdir()}) == 3
    journal = open_journal(run.place.path)
    played = [entry.trajectory for step in journal.steps() for entry in step.entries]
    assert {each.outcome for each in played} == {Outcome.COMPLETED}
    # All episodes of a killed worker were played again; those of other workers were not.
    again = [each for each in played if each.attempt > 0]
    assert 3 < len(again) < len(played)
