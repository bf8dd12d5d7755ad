"""Test of a run with a real model as the judge, behind vLLM's own server of the OpenAI API."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running, small_config
from worlds.servers.ports import free_port

from actors.trainer.tiny.model import build_tiny_model
from actors.types import Outcome
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(900)]
DATA = ROOT / "docs" / "examples" / "numbers" / "after.jsonl"
STEPS = 3


@contextmanager
def judging(model: Path) -> Iterator[str]:
    """Start the judge's server; yield the address below which it serves /chat/completions."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "134217728"]
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    log = model.with_suffix(".log")
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            end = time.monotonic() + START_S
            while time.monotonic() < end and server.poll() is None:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.5)
            else:
                pytest.fail(log.read_text()[-3000:])
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(timeout=60)


def test_score_of_a_real_judge_is_the_reward_and_its_cost_is_recorded(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "judge", seed=1, warmup_steps=20)
    with judging(tmp_path / "judge") as url:
        judge = {
            "url": url,
            "model": "judge",
            "prompt": "$prompt $completion",
            "json_field": "score",
            "scale": [0, 9],
            # The judge always answers in this form.
            "body": {"structured_outputs": {"regex": r'\{"score": [0-9]\}'}},
            "max_tokens": 24,
            "output_price": 1e6,
            "cache": str(tmp_path / "judgements.db"),
        }
        tasks = {
            "environment": "single_turn",
            "dataset": str(DATA),
            "evaluation_tasks": 0,
            "options": {"judges": {"good": judge}},
        }
        file = small_config(tmp_path, run={"steps": STEPS}, tasks=tasks)
        with running(file, tmp_path / "run") as run:
            assert run.wait(limit_s=START_S + STEPS * STEP_S) == 0, run.log()
            check_finished(run, steps=STEPS)
            check_audit(run)
    turns = [
        turn
        for step in open_journal(run.place.path).steps()
        for entry in step.entries
        # The judge gets no episode that was cut off.
        if entry.trajectory.outcome is Outcome.COMPLETED
        for sample in entry.trajectory.samples
        for turn in sample.turns
    ]
    assert turns
    for turn in turns:
        parts = turn.reward_components
        assert parts.keys() == {"score", "tokens", "cost"} and turn.reward == parts["score"]
        assert 9 * parts["score"] == pytest.approx(round(9 * parts["score"]))
        # A judgement from the cache costs 0.
        assert parts["cost"] == 0 if parts["tokens"] == 0 else 0 < parts["cost"] < parts["tokens"]
    assert any(turn.reward_components["tokens"] > 0 for turn in turns)
