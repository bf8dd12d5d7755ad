"""Test that a run with a quantised cache measures the difference, which is within its bound.

A whole run with a real engine takes a minute, so that this is a proof.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from worlds.checks.tracker_files import json_lines
from worlds.runs.run_driver import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.settings, pytest.mark.timeout(3600)]
OPTIONS = [
    "--set=run.steps=3",
    "--set=run.evaluate_every=1000",
    "--set=algorithm.groups_per_step=4",
    "--set=algorithm.group_size=4",
    "--set=trainer.num_ranks=1",
    '--set=inference.engine_args={"kv_cache_dtype": "fp8"}',
    # Each publication is compared on the whole text if that takes less than 5 % of the time.
    "--set=trainer.logprob_check_every=1",
    "--set=trackers.jsonl=true",
]
# Means in nats: a value far above the rounding of float32, and the bound for a quantised engine
# (docs/engine-args.md).
LEAST, BOUND = 1e-3, 0.2


def test_the_difference_of_a_quantised_cache_is_measured_after_publications(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "train", "deploy/configs/guessing-cpu.yaml",
         *OPTIONS, f"--run-dir={run}"],
        cwd=ROOT, text=True, timeout=1500, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [line for line in json_lines(run / "metrics.jsonl") if line["kind"] == "step"]
    assert len(steps) == 3
    checked = [step for step in steps if "train/logprob_check_mean" in step]
    found = [step["train/logprob_check_mean"] for step in checked]
    print("mean |trainer - engine|, nats:", found)
    assert found and all(LEAST < value < BOUND for value in found)
    # The whole text, and not only its first tokens.
    assert any(step["train/logprob_check_tokens"] > 100 for step in checked)
