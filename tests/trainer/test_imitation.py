"""Tests that supervised training has the loss and gradient of transformers on the same chats.

The rank is a real one; transformers gets each rendered chat as a separate row with labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.builders.settings import rank_settings, step_settings
from worlds.parts.trainer_world import shared_world

from actors.environment.chats import ChatEncoder
from actors.environment.tokenizer import load_tokenizer
from actors.merge.step import IMITATION, imitation_shards
from actors.types import Sample

SYSTEM = {"role": "system", "content": "Answer with a number."}


def chat(*texts: str, system: bool = False) -> dict[str, list[dict[str, str]]]:
    """Return a chat whose texts are alternately the user's and the assistant's."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"messages": [*([SYSTEM] if system else []), *said]}


FLAT = [
    chat("What is 3+4?", "The answer is 7."),
    chat("Guess my number.", "4", "higher", "6", "lower", "5"),
    chat("city", "weather weather weather", "search", "result"),
]
SHARED = [
    chat("Guess my number.", *answers, system=True)
    for answers in (("4", "higher", "6"), ("4", "higher", "5", "lower", "4"), ("4",), ("7",))
]


def encoded(model: str, chats: Sequence[dict[str, list[dict[str, str]]]]) -> list[list[Sample]]:
    tokenizer = load_tokenizer(model)
    encoder = ChatEncoder(tokenizer, stop_token_ids=[tokenizer.eos_token_id or 0])
    return [list(encoder.samples(each, f"chat-{at}")) for at, each in enumerate(chats)]


def reference(model: str, chats: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """Return the loss of transformers over the same batch, and the norm of its gradient.

    The batch is padded on the right. The labels are those of a rendered chat's reply tokens.
    """
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    samples = [sample for samples in chats for sample in samples]
    longest = max(sample.num_tokens for sample in samples)
    ids = torch.zeros((len(samples), longest), dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        own = torch.tensor(sample.token_ids, dtype=torch.int64)
        ids[row, : len(own)] = own
        mask[row, : len(own)] = 1
        is_trained = torch.tensor(sample.mask.astype(bool))
        labels[row, : len(own)] = torch.where(is_trained, own, -100)
    loss = causal_lm(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    square = sum(float(each.grad.double().square().sum()) for each in causal_lm.parameters())
    return float(loss.detach()), square**0.5


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("chats", [FLAT, SHARED])
@pytest.mark.parametrize("budget", [4096, 20])
def test_loss_and_gradient_are_those_of_transformers(
    model: str,
    tmp_path: Path,
    chats: list[dict[str, list[dict[str, str]]]],
    shares: bool,
    budget: int,
) -> None:
    """Compare on two ranks, with one packed row or with several micro-batches."""
    samples = encoded(model, chats)
    world = shared_world(2).start(rank_settings(model, tmp_path, algorithm=IMITATION))
    settings = step_settings(num_ranks=2, tokens_per_micro_batch=budget, share_prefixes=shares)
    shards = imitation_shards(samples, step=1, settings=settings)
    stats = world.call_each("train_step", [{"shard": shard} for shard in shards])[0]
    loss, norm = reference(model, samples)
    assert stats.trained_tokens == sum(each.num_trained for own in samples for each in own)
    assert stats.statistics["loss"] == pytest.approx(loss, rel=1e-6)
    assert stats.statistics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    if budget == 20:
        assert len(shards[0].minibatches[0]) > 1


def test_shared_prefixes_are_packed_once(model: str) -> None:
    samples = [sample for own in encoded(model, SHARED) for sample in own]
    assert len(samples) == len(SHARED)
    settings = step_settings(num_ranks=1)
    [shard] = imitation_shards(encoded(model, SHARED), step=1, settings=settings)
    packed = sum(row.num_tokens for row in shard.minibatches[0])
    separate = sum(sample.num_tokens for sample in samples)
    assert packed < 0.6 * separate
