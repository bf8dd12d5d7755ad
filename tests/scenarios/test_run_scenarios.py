"""Tests of a whole run from the command line: its history, trackers, journal, report and model.

Ray, Serve, vLLM and FSDP are real, the model is tiny, and the steps are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.checks.command_lines import rayloom
from worlds.checks.tracker_files import json_lines, tensorboard_curves, wandb_history
from worlds.parts.tracker_world import ALL
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config

from service.config.file import load_config
from service.telemetry.curves import step_curves

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


# test_inference_scenarios.py compares the weights of both kinds of models at each publication.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="tied"),
        pytest.param(False, id="untied", marks=[pytest.mark.proof, pytest.mark.training]),
    ],
)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Yield a finished run of four steps at lag 0 that built its own model."""
    directory = tmp_path_factory.mktemp("finished")
    tiny = {"warmup_steps": 20, "tie_word_embeddings": request.param}
    config = small_config(directory, model={"tiny": tiny}, trackers=ALL)
    with running(config, directory / "run") as run:
        assert run.wait(limit_s=START_S + 8 * STEP_S) == 0, run.log()
        yield run


def test_a_run_finalises_every_rollout_and_publishes_every_version(finished: Run) -> None:
    check_finished(finished, steps=4)
    assert [item.step for item in finished.history().evaluations] == [0, 2, 4]
    assert load_config(finished.place.config_file).run.steps == 4


def test_at_lag_0_engines_and_trainer_have_equal_weights_at_every_step(finished: Run) -> None:
    records = finished.history().steps
    # Groups with equal returns train nothing, and a step may have only such groups.
    compared = [record for record in records if record.num_trained_tokens]
    assert compared and {record.policy_age_max for record in records} == {0}
    assert len({record.statistics["loss"] for record in compared}) == len(compared)
    for record in compared:
        assert record.statistics["mismatch_k3_mean"] < 1e-6
        assert record.statistics["mismatch_max"] < 1e-3
    # A step without time for a check has no ratio. The first check is joined with the start's,
    # whose text and continuations fill the context.
    checked = [
        record.statistics for record in records if "logprob_check_ratio" in record.statistics
    ]
    assert all(statistics["logprob_check_ratio"] < 1 for statistics in checked)
    assert checked[0]["logprob_check_tokens"] == 256
    found = finished.summary()["logprob_check"]
    assert found["tokens"] == 256 and found["ratio"] < 1 and found["max"] < 1e-3


def test_the_trackers_of_a_run_have_its_history(finished: Run) -> None:
    path, history = finished.place.path, finished.history()
    expected = {record.step: step_curves(record) for record in history.steps}
    assert any(name.startswith("rewards/") for name in expected[4])
    lines, rows = json_lines(path / "metrics.jsonl"), wandb_history(path)
    of_steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in of_steps] == [1, 2, 3, 4]
    assert all(line.items() >= expected[line["step"]].items() for line in of_steps)
    by_step = {row["step"]: row for row in rows if "train/learning_rate" in row}
    assert all(by_step[step].items() >= curves.items() for step, curves in expected.items())
    shown = tensorboard_curves(path / "tensorboard")
    rates = {step: curves["train/learning_rate"] for step, curves in expected.items()}
    assert dict(shown["train/learning_rate"]) == pytest.approx(rates)
    evaluated = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluated] == [0, 2, 4]
    assert all(len(line["samples"]) == 4 for line in evaluated)
    assert all(sample["prompt"] for line in evaluated for sample in line["samples"])


def test_the_journal_of_a_run_breaks_no_invariant(finished: Run) -> None:
    check_audit(finished)


def test_run_prints_no_messages_of_serve(finished: Run) -> None:
    assert "Serve" not in finished.output.read_text()


def test_a_run_leaves_a_report_and_a_model(finished: Run, tmp_path: Path) -> None:
    assert finished.place.report_file.read_text().startswith("<!doctype html>")
    run_dir = str(finished.place.path)
    listed, audited, exported = rayloom(
        ["inspect", run_dir, "--limit", "3"],
        ["inspect", run_dir, "--audit"],
        ["export", run_dir, str(tmp_path / "exported")],
    )
    assert (listed.code, audited.code, exported.code) == (0, 0, 0), (listed, audited, exported)
    assert "3 of 64 trajectories" in listed.out and "step 4" in exported.out
    assert (tmp_path / "exported" / "config.json").is_file()
