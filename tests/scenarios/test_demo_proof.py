"""Test of the run of `make demo`, with several seeds and once with learning rate 0.

Each run takes minutes, so that this is a proof. It prints the table that docs/status.md shows.
The environment variable SEEDS, as in SEEDS="0 1", chooses the seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from worlds.runs.run_driver import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.demo, pytest.mark.timeout(3 * 3600)]
CONFIG = "deploy/configs/addition-cpu.yaml"
MODEL = "models/smollm2"
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2 3 4").split()]
MIN_RISE = 0.25
MAX_DRIFT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run's held-out scores at temperature 0 before and after it, its time and its memory."""

    before: float
    after: float
    minutes: float
    gibibytes: float

    def __str__(self) -> str:
        return (
            f"{self.before:.3f}  {self.after:.3f}  {self.after - self.before:+.3f}  "
            f"{self.minutes:7.1f}  {self.gibibytes:.1f}"
        )


def rayloom(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=ROOT, text=True, timeout=3000, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def train(run: Path, *options: str) -> Trained:
    """Run both commands of `make demo`; only the first call converts the model."""
    started = time.monotonic()
    rayloom("model", "smollm2", MODEL)
    rayloom("train", CONFIG, *options, "--run-dir", str(run))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["is_balanced"] and summary["skipped_steps"] == 0
    first, last = summary["evaluation"]["first"], summary["evaluation"]["last"]
    assert first["temperature"] == 0 and first["policy_version"] == 0
    assert first["num_tasks"] == last["num_tasks"] and not first["num_failed"] + last["num_failed"]
    return Trained(
        before=first["reward_mean"],
        after=last["reward_mean"],
        minutes=(time.monotonic() - started) / 60,
        gibibytes=summary["peak_memory_bytes"] / 2**30,
    )


def test_smollm2_learns_to_add_on_every_seed_and_not_without_a_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Trained] = []
    with capsys.disabled():
        print("\nseed             before  after   rise  minutes  GiB", flush=True)
        for seed in SEEDS:
            trained.append(train(tmp_path / f"seed-{seed}", f"--set=run.seed={seed}"))
            print(f"{seed:<16} {trained[-1]}", flush=True)
        control = train(tmp_path / "control", "--set=trainer.learning_rate=0")
        print(f"learning rate 0  {control}", flush=True)
    assert all(each.after - each.before >= MIN_RISE for each in trained)
    assert abs(control.after - control.before) <= MAX_DRIFT
