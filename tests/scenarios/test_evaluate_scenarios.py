"""Tests of a run's evaluations and of `rayloom evaluate`, with real engines and a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.parts.trainer_world import obvious_logprobs
from worlds.runs.run_driver import START_S, STEP_S, Run, running, small_config

from actors.trainer.export import export_checkpoint
from service.telemetry.records import evaluation_line

pytestmark = [pytest.mark.scenario, pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_TASKS, NUM_SAMPLES = 4, 4
# A limit for a wait on a busy machine, not an expected time.
STOP_S = 120.0
TOLERANCE_NATS = 1e-3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_model: str) -> Iterator[Run]:
    """Yield a finished run of two steps that was evaluated before, between and after them."""
    directory = tmp_path_factory.mktemp("evaluated")
    config = small_config(
        directory,
        small_model,
        run={"steps": 2, "evaluate_every": 1},
        evaluation={
            "samples": NUM_SAMPLES,
            "temperature": 1.0,
            "keep_results": 4,
            "sets": {"greedy": {"tasks": 2}},
        },
    )
    with running(config, directory / "run") as run:
        assert run.wait(limit_s=START_S + 4 * STEP_S) == 0, run.log()
        yield run


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_keeps_every_token_of_its_newest_evaluations(finished: Run) -> None:
    records = finished.history().evaluations
    assert [(each.step, each.name, each.num_samples, each.num_tasks) for each in records] == [
        (step, *played)
        for step in (0, 1, 2)
        for played in (("", NUM_SAMPLES, NUM_TASKS), ("greedy", 1, 2))
    ]
    files = [
        finished.place.evaluations / f"step-00000{step}-term-0001{name}.jsonl"
        for step in (1, 2)
        for name in ("", "-greedy")
    ]
    assert sorted(files) == sorted(finished.place.evaluations.iterdir())
    for file, record in zip(files, records[2:], strict=True):
        lines = read_lines(file)
        assert len(lines) == record.num_tasks * record.num_samples
        assert record.pass_at.keys() <= {1, 2, 4}
        scored = [line["return"] for line in lines if line["samples"]]
        assert record.reward_mean == pytest.approx(np.mean(scored))
        assert {tuple(line["policy_versions"]) for line in lines} == {(record.step, record.step)}
        assert evaluation_line(record) in finished.place.log_file.read_text()


def test_checkpoint_is_evaluated_with_its_own_weights_and_no_process_is_left(
    finished: Run, tmp_path: Path
) -> None:
    run_dir, out = finished.place.path, tmp_path / "rollouts.jsonl"
    (checkpoint,) = finished.place.checkpoints.glob("step-000002-*")
    line = [str(run_dir), "--checkpoint", checkpoint.name, "--out", str(out), "--tasks", "3"]
    with running(None, run_dir, line, command="evaluate") as evaluation:
        assert evaluation.wait(limit_s=START_S) == 0, evaluation.output.read_text()
        assert evaluation.wait_until_gone(limit_s=STOP_S) == []
    result = json.loads(evaluation.output.read_text().splitlines()[-1])
    assert (result["policy"], result["step"], result["policy_version"]) == (checkpoint.name, 2, 2)
    assert (result["num_tasks"], result["num_samples"], result["file"]) == (
        3,
        NUM_SAMPLES,
        str(out),
    )
    lines = read_lines(out)
    assert Counter(each["task_id"] for each in lines) == dict.fromkeys(
        [f"guessing-held-out-{number}" for number in range(3)], NUM_SAMPLES
    )
    assert result["outcomes"] == Counter(each["outcome"] for each in lines)
    export_checkpoint(checkpoint, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for sample in (sample for each in lines for sample in each["samples"]):
        sampled = np.array(sample["mask"][1:], bool)
        expected = obvious_logprobs(model, sample["token_ids"]).detach().numpy()[sampled]
        found = np.array(sample["logprobs"][1:])[sampled]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE_NATS)


def test_interrupted_evaluation_ends_without_a_traceback_or_files(
    finished: Run, small_model: str
) -> None:
    line = [str(finished.place.path), "--model", small_model, "--samples", "1000"]
    with running(None, finished.place.path, line, command="evaluate") as evaluation:
        evaluation.wait_for_output("playing 4000 rollouts", limit_s=START_S)
        evaluation.interrupt()
        assert evaluation.wait(limit_s=STOP_S) == 130, evaluation.output.read_text()
        assert evaluation.wait_until_gone(limit_s=STOP_S) == []
        said = evaluation.output.read_text()[evaluation.printed_before :]
    assert "the evaluation was interrupted" in said and "Traceback" not in said
    assert not list(finished.place.evaluations.glob("evaluate-*"))
