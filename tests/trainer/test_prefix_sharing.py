"""Tests that shared prefixes give the loss and all gradients of separate samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)
from worlds.builders.settings import rank_settings
from worlds.builders.trajectory_builders import ids
from worlds.parts.trainer_world import World

from actors.algorithm import LossSettings
from actors.batch import MicroBatch, RankShard
from actors.merge.packing import WeightedSample, pack_minibatch, pack_row
from actors.trainer.model import PolicyModel, load_policy, row_tensors
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats
from actors.types import Sample

VOCABULARY = 64
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)


def make_config(kind: str) -> PretrainedConfig:
    if kind == "llama":
        return LlamaConfig(**COMMON)
    if kind == "gemma3":
        # The window is much shorter than the samples; two layers have it, one sees all tokens.
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(
            **COMMON, sliding_window=7, layer_types=layers, query_pre_attn_scalar=8
        )
    return Qwen3Config(**COMMON)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return directories of random models of three architectures, by kind."""
    directories = {}
    for kind in ("qwen3", "llama", "gemma3"):
        torch.manual_seed(5)
        directory = tmp_path_factory.mktemp(kind)
        model = AutoModelForCausalLM.from_config(make_config(kind))
        with torch.no_grad():
            for parameter in model.parameters():
                # Larger than usual, so that attention is far from uniform.
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
        directories[kind] = str(directory)
    return directories


def make_sample(
    tokens: Sequence[int], trained: Sequence[int], *, trajectory: str, seed: int
) -> WeightedSample:
    rng = np.random.default_rng(seed)
    mask = np.zeros(len(tokens), np.uint8)
    mask[list(trained)] = 1
    sample = Sample(
        trajectory_id=trajectory,
        turns=(),
        token_ids=ids(tokens),
        logprobs=rng.normal(-4.2, 0.2, len(tokens)).astype(np.float32) * mask,
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
    return WeightedSample(
        sample=sample, advantage=float(rng.normal()), loss_weight=0.01, temperature=0.9
    )


def make_batch() -> list[WeightedSample]:
    """Return samples with shared prompts, branches, a full prefix, equal ids and no prefix."""
    rng = np.random.default_rng(2)

    def tokens(count: int) -> list[int]:
        return rng.integers(2, VOCABULARY, count).tolist()

    batch: list[WeightedSample] = []

    def add(ids: list[int], trained: Sequence[int], *, trajectory: str) -> None:
        batch.append(make_sample(ids, trained, trajectory=trajectory, seed=len(batch)))

    for group in range(2):
        prompt = tokens(21)
        for member in range(3):
            answer = [2 + member, *tokens(3 + 4 * member)]
            trained = range(len(prompt), len(prompt) + len(answer))
            add(prompt + answer, trained, trajectory=f"{group}-{member}")
    # The first action is trained once; the second sample shares it and replaces the rest.
    start, action = tokens(9), tokens(6)
    main, rewritten = tokens(12), tokens(8)
    add(start + action + main, [*range(9, 15), *range(20, 27)], trajectory="branching")
    add(start + action + rewritten, range(18, 23), trajectory="branching")
    deeper = start + action + main[:5] + tokens(5)
    add(deeper, range(22, 25), trajectory="branching")
    # The same tokens with other ones trained, and a sample that is a prefix of another.
    add(start + action + main, range(21, 27), trajectory="equal")
    add(start + action, range(12, 15), trajectory="prefix")
    add(tokens(17), [1, 2, 16], trajectory="loner")
    return batch


def surrogate(current: torch.Tensor, row: MicroBatch) -> torch.Tensor:
    """Return a sum over trained tokens whose gradient differs for each of them."""
    ratio = torch.exp(current - torch.from_numpy(row.behaviour_logprobs.copy()))
    return -(ratio * torch.from_numpy(row.advantages)).sum()


def compute(policy: PolicyModel, rows: Sequence[MicroBatch]) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss and all gradients, summed over rows."""
    policy.zero_grad()
    total = 0.0
    for row in rows:
        tensors = row_tensors(row, device=torch.device("cpu"))
        current, _ = policy(tensors)
        loss = surrogate(current, row)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.numpy().copy() for n, p in policy.named_parameters()}


def compute_alone(
    model: str, batch: Sequence[WeightedSample]
) -> tuple[float, dict[str, np.ndarray]]:
    """Compute loss and gradients of separate samples with transformers' own attention."""
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    total = 0.0
    for each in batch:
        sample = each.sample
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = causal_lm(tokens[None], use_cache=False).logits[0, :-1] / 0.9
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        is_trained = torch.from_numpy(sample.mask[1:].astype(bool))
        behaviour = torch.from_numpy(sample.logprobs[1:])
        loss = -(torch.exp(logprobs - behaviour)[is_trained] * each.advantage).sum()
        loss.backward()
        total += loss.item()
    return total, {f"causal_lm.{n}": p.grad.numpy() for n, p in causal_lm.named_parameters()}


def assert_same(
    ours: tuple[float, dict[str, np.ndarray]], theirs: tuple[float, dict[str, np.ndarray]]
) -> None:
    """Check equality up to float32 rounding, relative to the largest entry of each gradient."""
    assert ours[0] == pytest.approx(theirs[0], rel=2e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        scale = float(np.abs(gradient).max())
        assert scale > 0
        np.testing.assert_allclose(ours[1][name], gradient, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("is_frugal", [False, True])
def test_loss_and_all_gradients_equal_those_of_separate_samples(
    models: dict[str, str], kind: str, is_frugal: bool
) -> None:
    batch = make_batch()
    policy = load_policy(
        models[kind],
        logprob_chunk=7 if is_frugal else 1024,
        gradient_checkpointing=is_frugal,
    )
    alone = compute_alone(models[kind], batch)
    tree, flat = pack_row(batch), pack_row(batch, share_prefixes=False)
    assert tree.num_tokens < 0.7 * flat.num_tokens and tree.num_trained == flat.num_trained
    # Several samples train the same position with different targets.
    assert len(np.unique(tree.loss_positions)) < tree.num_trained
    assert_same(compute(policy, [flat]), alone)
    assert_same(compute(policy, [tree]), alone)
    apart = [pack_row([each]) for each in batch]
    assert_same(compute(policy, apart), alone)
    assert_same(compute(policy, [pack_row(list(reversed(batch)))]), alone)


def train_once(
    world: World, settings: RankSettings, *, share_prefixes: bool
) -> tuple[StepStats, dict[str, np.ndarray]]:
    """Train one step in real processes; return the ranks' statistics and the new weights."""
    minibatches = pack_minibatch(
        make_batch(),
        num_ranks=world.num_ranks,
        budget=150,
        attention_tokens=8192,
        share_prefixes=share_prefixes,
    )
    own = [
        {"shard": RankShard(step=0, trainer_version=0, minibatches=(minibatch,))}
        for minibatch in minibatches
    ]
    stats: StepStats = world.start(settings).call_each("train_step", own)[0]
    return stats, world.weights()


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_one_and_two_ranks_train_shared_prefixes_like_flat_rows(
    models: dict[str, str], one_rank: World, two_ranks: World, kind: str, tmp_path: Path
) -> None:
    # AdamW's first update is rate * g / (|g| + eps), which is about g for these settings.
    settings = rank_settings(
        models[kind],
        tmp_path,
        learning_rate=1e3,
        adam_epsilon=1e3,
        weight_decay=0.0,
        max_grad_norm=1e9,
        loss=LossSettings(clip_low=0.99, clip_high=1e6),
    )
    flat, expected = train_once(one_rank, settings, share_prefixes=False)
    before = AutoModelForCausalLM.from_pretrained(models[kind]).state_dict()
    gradients = {name: before[name].numpy() - after for name, after in expected.items()}
    assert min(float(np.abs(gradient).max()) for gradient in gradients.values()) > 1e-4
    for world, share_prefixes in ((one_rank, True), (two_ranks, True), (two_ranks, False)):
        stats, weights = train_once(world, settings, share_prefixes=share_prefixes)
        assert stats.statistics["loss"] == pytest.approx(flat.statistics["loss"], rel=2e-6)
        assert stats.statistics["grad_norm"] == pytest.approx(
            flat.statistics["grad_norm"], rel=1e-5
        )
        assert stats.trained_tokens == flat.trained_tokens
        for name, gradient in gradients.items():
            tolerance = 2e-5 * float(np.abs(gradient).max()) + 1e-6
            np.testing.assert_allclose(weights[name], expected[name], rtol=0, atol=tolerance)
