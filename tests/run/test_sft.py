"""Tests of supervised training of the tiny model on real ranks, also when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.environment.chats import ChatEncoder
from actors.environment.tokenizer import load_tokenizer
from actors.types import Sample
from service.config.file import parse_sft
from service.config.sft import SftConfig
from service.launch.run_dir import RunDir
from service.run.sft import SftRun, complete_checkpoints

pytestmark = [pytest.mark.usefixtures("cluster")]


def config_of(model: str) -> SftConfig:
    tree = {
        "model": {"path": model, "max_context_tokens": 256},
        "trainer": {"num_ranks": 2, "learning_rate": 2e-3, "tokens_per_micro_batch": 64},
        "sft": {"dataset": "-", "epochs": 3, "chats_per_step": 8, "checkpoint_every": 4},
    }
    return parse_sft(tree, source="test")


def sums(model: str) -> list[tuple[Sample, ...]]:
    """Return thirty chats with one system message; with eight per step, an epoch has four steps."""
    tokenizer = load_tokenizer(model)
    encoder = ChatEncoder(tokenizer, stop_token_ids=[tokenizer.eos_token_id or 0])
    return [
        encoder.samples(
            {
                "messages": [
                    {"role": "system", "content": "Answer with a number."},
                    {"role": "user", "content": f"What is {number % 5}+{number % 7}?"},
                    {"role": "assistant", "content": str(number % 5 + number % 7)},
                ]
            },
            f"chat-{number}",
        )
        for number in range(30)
    ]


class Crash(Exception):
    """An error that simulates the end of the process during a training."""


async def train(model: str, directory: Path, *, stop_at: int = 0, crash_at: int = 0) -> Path | None:
    """Run a training. stop_at, crash_at: the step after which it is stopped or crashes."""
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if crash_at and line.startswith(f"step {crash_at}/"):
            raise Crash

    is_asked: Callable[[], bool] = lambda: bool(  # noqa: E731
        stop_at and any(line.startswith(f"step {stop_at}/") for line in lines)
    )
    run = SftRun(
        config_of(model),
        sums(model),
        RunDir(path=directory),
        model=model,
        is_stop_asked=is_asked,
        tell=tell,
    )
    directory.mkdir(exist_ok=True)
    return await run.run()


def losses(directory: Path) -> list[tuple[int, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


@pytest.mark.proof
@pytest.mark.slow
async def test_the_loss_falls_and_the_newest_checkpoints_are_kept(
    model: str, tmp_path: Path
) -> None:
    assert await train(model, tmp_path) == tmp_path / "checkpoints" / "step-000012-t1"
    found = losses(tmp_path)
    assert [step for step, _ in found] == list(range(1, 13))
    assert found[-1][1] < 0.5 * found[0][1]
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == [
        "step-000012-t1",
        "step-000008-t1",
    ]


@pytest.mark.chaos
async def test_a_resumed_training_has_the_same_losses(model: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await train(model, whole)
    found = losses(whole)
    with pytest.raises(Crash):
        await train(model, cut, crash_at=6)
    # Steps 5 and 6 are trained again, and the training is stopped after them.
    assert await train(model, cut, stop_at=6) is None
    assert complete_checkpoints(cut / "checkpoints")[0].name == "step-000006-t2"
    assert losses(cut) == found[:6]
    # A line that the disk has damaged is removed, and does not prevent resuming.
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"loss": 1}\n[]\n')
    assert await train(model, cut) == cut / "checkpoints" / "step-000012-t3"
    assert losses(cut) == found
    # When all steps are done, the result is the last checkpoint again.
    assert await train(model, cut) == cut / "checkpoints" / "step-000012-t3"
    assert losses(cut) == found
