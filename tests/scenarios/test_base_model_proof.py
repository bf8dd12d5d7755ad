"""Test of a base model with raw prompts and stop strings, from the data to the evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import START_S, STEP_S, running, small_config

from actors.environment.tokenizer import RAW, load_tokenizer
from actors.trainer.export import export_checkpoint
from actors.trainer.tiny.model import build_tiny_model
from actors.types import FinishReason, Outcome
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(1500)]

STEPS = 8
PROMPT = "The first letter is e.\nQ: say one\nA:"
STOP = ("e", "\n")
REWARD = """
def early(completion, answer):
    assert "e" not in completion and "\\n" not in completion
    return max(0.0, 1 - len(completion) / 20)
"""
CHOICES = ("12", "34")


def write_base_model(directory: Path) -> str:
    """Write the tiny model without a chat template; return its directory."""
    build_tiny_model(directory, seed=0, warmup_steps=20)
    settings = directory / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    found.pop("chat_template", None)
    settings.write_text(json.dumps(found))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    return str(directory)


def test_a_base_model_is_trained_on_raw_prompts_until_a_stop_string(
    tmp_path: Path,
) -> None:
    base = write_base_model(tmp_path / "base")
    (tmp_path / "early.py").write_text(REWARD)
    rows = [json.dumps({"prompt": PROMPT, "answer": str(number)}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    file = small_config(
        tmp_path,
        base,
        run={"steps": STEPS, "evaluate_every": STEPS},
        model={"chat_template": RAW},
        tasks={
            "environment": "single_turn",
            "dataset": str(tmp_path / "rows.jsonl"),
            "options": {"reward": "early.py:early"},
        },
        rollouts={"stop": list(STOP), "max_tokens_per_turn": 16},
        evaluation={
            "sets": {"chosen": {"tasks": 2, "structured_outputs": {"choice": list(CHOICES)}}}
        },
    )
    with running(file, tmp_path / "run", cwd=tmp_path) as run:
        assert run.wait(limit_s=START_S + STEPS * STEP_S) == 0, run.log()
        check_finished(run, steps=STEPS)
        check_audit(run)
    tokenizer = load_tokenizer(base, chat_template=RAW)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    stopped = 0
    for step in open_journal(run.place.path).steps():
        for entry in step.entries:
            for sample in entry.trajectory.samples:
                assert sample.token_ids[: sample.prompt_length].tolist() == prompt
                assert sample.mask[sample.prompt_length :].all()
                [turn] = sample.turns
                ids = sample.token_ids[turn.tokens].tolist()
                before = tokenizer.decode(ids[:-1], skip_special_tokens=False)
                whole = tokenizer.decode(ids, skip_special_tokens=False)
                # Only the last token may complete a stop string.
                assert not any(each in before for each in STOP)
                if any(each in whole for each in STOP):
                    assert turn.finish_reason is FinishReason.STOP
                    assert entry.trajectory.outcome is Outcome.COMPLETED
                    stopped += 1
    assert stopped > STEPS
    means = [each.value("reward_mean") or 0.0 for each in run.history().steps]
    assert np.mean(means[-3:]) > np.mean(means[:3]), means
    chosen = [each for each in run.history().evaluations if each.name == "chosen"]
    said = {each.text.answer for record in chosen for each in record.samples}
    assert said and said <= set(CHOICES)

    (checkpoint,) = run.place.checkpoints.glob(f"step-{STEPS:06d}-*")
    export_checkpoint(checkpoint, tmp_path / "model")
    exported = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": PROMPT}]
    assert exported.apply_chat_template(chat, return_dict=False) == prompt

    line = [str(run.place.path), "--samples", "2", "--set", "evaluation.temperature=1"]
    line += ["--set", "evaluation.top_p=0.9", "--set", "evaluation.top_k=20"]
    line += ["--set", "evaluation.structured_outputs={regex: '[0-9]{2}'}"]
    line += ["--out", str(tmp_path / "o")]
    with running(None, run.place.path, line, command="evaluate", cwd=tmp_path) as evaluation:
        assert evaluation.wait(limit_s=START_S) == 0, evaluation.output.read_text()
    texts = [
        sample["text"]
        for each in map(json.loads, (tmp_path / "o").read_text().splitlines())
        for sample in each["samples"]
    ]
    assert len(texts) == 8
    for text in texts:
        assert text.removeprefix(PROMPT)[:2].isdigit(), text

    changed = ["--resume", "--set", "model.chat_template=null", "--set", f"run.steps={STEPS + 1}"]
    with running(None, run.place.path, changed, cwd=tmp_path) as again:
        assert again.wait(limit_s=START_S) == 2
        assert "section model differs from the run's own" in again.output.read_text()
