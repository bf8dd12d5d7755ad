"""Test of `rayloom sft`: it is killed and resumed, and a run trains its export further.

This is a proof, because it starts Ray four times and an engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from worlds.runs.run_driver import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.settings, pytest.mark.timeout(1200)]

LIMIT_S = 400.0
SETTINGS = ["sft.epochs=4", "sft.chats_per_step=4", "sft.checkpoint_every=3"]


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with (directory / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", *words],
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def run(directory: Path, *words: str) -> str:
    process = start(directory, *words)
    try:
        assert process.wait(timeout=LIMIT_S) == 0, (directory / "output.txt").read_text()
    finally:
        process.kill()
    return (directory / "output.txt").read_text()


def losses(run_dir: Path) -> list[tuple[int, float]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def sft(name: str) -> list[str]:
    changes = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["sft", "--dataset", "chats.jsonl", "--run-dir", name, *changes]


def test_killed_training_resumes_with_the_same_losses_and_a_run_uses_its_export(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number}+{number % 3}?"},
                {"role": "assistant", "content": str(number + number % 3)},
            ]
        }
        for number in range(10)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, *sft("whole"))
    whole = losses(tmp_path / "whole")
    assert len(whole) == 12 and whole[-1][1] < whole[0][1]

    process = start(tmp_path, *sft("cut"))
    deadline = time.monotonic() + LIMIT_S
    while len(losses(tmp_path / "cut")) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    others = psutil.Process(process.pid).children(recursive=True)
    for each in (psutil.Process(process.pid), *others):
        each.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(tmp_path / "cut")) < 12
    said = run(tmp_path, "sft", "--resume", "cut")
    assert "the model is in cut/export" in said
    assert losses(tmp_path / "cut") == whole

    refused = start(tmp_path, "sft", "--resume", "cut", "--set", "sft.chats_per_step=5")
    assert refused.wait(timeout=LIMIT_S) == 2
    (tmp_path / "score.py").write_text(
        "def score(completion: str) -> float:\n    return float(len(completion) < 4)\n"
    )
    prompts = [{"prompt": row["messages"][0]["content"]} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    steps = ["run.steps=2", "algorithm.groups_per_step=2", "algorithm.group_size=4"]
    given = [
        *steps,
        "trainer.schedule.kind=cosine",
        "trainer.warmup_updates=0",
        "rollouts.max_tokens_per_turn=16",
        "inference.enforce_eager=true",
        "inference.kv_cache_gib=0.25",
        "queue.max_mib=64",
    ]
    changes = [word for setting in given for word in ("--set", setting)]
    run(
        tmp_path, "train", "--model", "cut/export", "--dataset", "prompts.jsonl",
        "--reward", "score.py:score", "--run-dir", "later", *changes,
    )  # fmt: skip
    assert json.loads((tmp_path / "later" / "summary.json").read_text())["steps"] == 2
