"""Whole runs through the command line: real Ray, Serve, vLLM and FSDP, a tiny model, tiny steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from worlds.run_driver import Run, running, small_config

from service.config.file import load_config
from service.inspect.audit.audit import audit
from service.inspect.reader import open_journal
from service.store.lineage import History

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]

PROOF = pytest.mark.proof
START_S = 300.0
STEP_S = 120.0


def check_lineage(history: History) -> None:
    """Along the surviving lineage each rollout is admitted once and leaves at most once."""
    admitted = Counter(item.rollout_id for item in history.events if item.kind == "admitted")
    left = Counter(item.rollout_id for item in history.events if item.kind != "admitted")
    assert set(admitted.values()) == {1}
    assert set(left.values()) <= {1}
    assert set(left) <= set(admitted)
    assert [item.seq for item in history.events] == list(range(len(history.events)))


def check_finished(run: Run, *, steps: int) -> None:
    """A run that came to its end: every version published, every rollout settled."""
    summary, history = run.summary(), run.history()
    ledger = summary["ledger"]
    assert summary["steps"] == summary["policy_version"] == steps
    assert [record.policy_version for record in history.steps] == list(range(1, steps + 1))
    assert ledger["in_flight"] == 0
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["evicted"].values())
    kinds = Counter(item.kind for item in history.events)
    assert kinds["admitted"] == ledger["admitted"] and kinds["trained"] == ledger["trained"]
    check_lineage(history)


def check_audit(run: Run) -> None:
    """What the journal kept of the run breaks no invariant."""
    found = audit(open_journal(run.place.path))
    assert found.is_clean and found.num_trained > 0, found.offences


# The weights of both kinds are compared at every publish in test_inference_scenarios.py.
@pytest.mark.parametrize(
    "is_tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=PROOF)]
)
def test_at_lag_0_the_engines_hold_what_the_trainer_holds_at_every_step(
    tmp_path: Path, is_tied: bool
) -> None:
    config = small_config(
        tmp_path, model={"tiny": {"warmup_steps": 20, "tie_word_embeddings": is_tied}}
    )
    with running(config, tmp_path / "run") as run:
        assert run.wait(limit_s=START_S + 8 * STEP_S) == 0, run.log()
        check_finished(run, steps=4)
        records = run.history().steps
        # Groups whose answers all won or all lost train nothing; a step may have no other.
        compared = [record for record in records if record.num_trained_tokens]
        assert compared and {record.policy_age_max for record in records} == {0}
        assert len({record.statistics["loss"] for record in compared}) == len(compared)
        for record in compared:
            assert record.statistics["mismatch_k3_mean"] < 1e-6
            assert record.statistics["mismatch_max"] < 1e-3
        assert all(record.statistics["parity_max"] < 1e-3 for record in records)
        assert run.place.report_file.read_text().startswith("<!doctype html>")
        assert [item.step for item in run.history().evaluations] == [0, 2, 4]
        assert load_config(run.place.config_file).run.steps == 4
        check_audit(run)


def test_a_run_survives_the_death_of_each_part(tmp_path: Path, small_model: str) -> None:
    """An environment actor killed, one frozen; kill -9 of engine, trainer rank and supervisor.

    With a critic and a reference, which die with the ranks and come back with the checkpoint.
    kill -9 of the whole run: test_serve_scenarios.py, and test_proofs.py to the end.
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
        # No step ends without an engine, so that the two are waited for at once.
        run.kill_part("VLLM::EngineCore")
        run.freeze_part("ray::EnvironmentActor")
        run.wait_for_log("an engine was lost; 0 of 1 ready", limit_s=START_S)
        run.wait_for_log("answered nothing for 10 s", limit_s=START_S)
        run.wait_for_log("an engine is back; 1 of 1 ready", limit_s=START_S)
        run.kill_part("ray::TrainerRankActor")
        run.wait_for_log("going back to the newest checkpoint", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        run.kill_part("ray::Supervisor")
        run.wait_for_log(
            "the supervisor died; a new one goes on under a new lease", limit_s=START_S
        )
        run.wait_for_output("the supervisor died", limit_s=START_S)
        assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        assert run.history().num_terms >= 3
        bound = load_config(run.place.config_file).algorithm.max_policy_age
        assert max(record.policy_age_max for record in run.history().steps) <= bound
        assert all(record.stages.score > 0 for record in run.history().steps)
        check_audit(run)
