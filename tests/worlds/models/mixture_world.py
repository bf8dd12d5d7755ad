"""Tiny mixtures, recorded games and a plain forward pass for the tests of routing replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from actors.merge.packing import WeightedSample
from actors.types import Sample, Trajectory
from worlds.builders.trajectory_builders import make_trajectory, make_turn, replayed, whole_turns

VOCABULARY = 48
NUM_EXPERTS = 6
NUM_CHOSEN = 2
# Kinds of mixtures, and whether each normalises the weights of the chosen experts to sum to 1.
NORMALISES = {"qwen3": False, "qwen3_normalised": True, "qwen2": True, "mixtral": True}
KINDS = tuple(NORMALISES)
TEMPERATURE = 0.9

Gradients = dict[str, np.ndarray]
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=NUM_CHOSEN,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)


def make_config(kind: str) -> PretrainedConfig:
    """Return a configuration with two routed layers; a Qwen3 has a dense layer between them."""
    if kind == "mixtral":
        return MixtralConfig(
            **COMMON,
            num_hidden_layers=2,
            num_local_experts=NUM_EXPERTS,
            # In training mode the router would get noise that no engine has.
            router_jitter_noise=0.1,
        )
    if kind == "qwen2":
        return Qwen2MoeConfig(
            **COMMON,
            num_hidden_layers=2,
            num_experts=NUM_EXPERTS,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            norm_topk_prob=True,
        )
    return Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=NUM_EXPERTS,
        moe_intermediate_size=16,
        head_dim=8,
        norm_topk_prob=kind == "qwen3_normalised",
    )


def write_mixture(directory: Path, kind: str) -> str:
    """Save a random mixture whose routers and experts differ enough to change the output."""
    torch.manual_seed(5)
    causal_lm = AutoModelForCausalLM.from_config(make_config(kind))
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            scale = 0.6 if "gate.weight" in name else 0.15
            parameter.add_(scale * torch.randn_like(parameter))
    causal_lm.save_pretrained(directory)
    return str(directory)


def write_served_mixture(directory: Path) -> None:
    """Save a random mixture with the tiny vocabulary and sizes that the engine's kernels accept."""
    sizes = dict(
        COMMON, vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2
    )
    sizes.update(max_position_embeddings=2048)
    torch.manual_seed(5)
    causal_lm = AutoModelForCausalLM.from_config(
        MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS)
    )
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "gate.weight" in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    causal_lm.save_pretrained(directory)


def load_plain(model: str) -> PreTrainedModel:
    """Load transformers' own model, with its own attention and routing."""
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def as_in_checkpoint(model: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays of a model's parameters by the names, and in the pieces, of its checkpoint."""
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    named = revert_weight_conversion(load_plain(model), tensors)
    return {name: tensor.numpy() for name, tensor in named.items()}


def perturbed(model: str) -> PreTrainedModel:
    """Load a sampler whose routers choose other experts for about every second token."""
    causal_lm = load_plain(model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "gate.weight" in name:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return causal_lm


def routers_of(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that choose experts, in the order of the layers."""
    return [m for m in causal_lm.modules() if type(m).__name__.endswith("TopKRouter")]


@torch.no_grad()
def record(causal_lm: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Return each routed layer's choice for each token that is processed: [T, L, K] uint8."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, args, output: found.append(output[2]))
        for router in routers_of(causal_lm)
    ]
    causal_lm(torch.tensor(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy().astype(np.uint8)


def play(
    sampler: PreTrainedModel,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    member: int,
) -> Trajectory:
    """Make a trajectory whose turns have the experts that an engine records.

    An engine records those of all sampled tokens except the last, and none of the prompt.
    """
    rng = np.random.default_rng(member)
    turns = []
    for prompt, answer in zip(prompts, answers, strict=True):
        routes = record(sampler, [*prompt, *answer])
        logprobs = rng.normal(-3.9, 0.2, len(answer)).tolist()
        experts = routes[len(prompt) : len(prompt) + len(answer) - 1]
        turns.append(make_turn(prompt, answer, logprobs=logprobs, expert_indices=experts))
    return make_trajectory(turns, rollout_id=f"g{member // 3:06d}.0-{member % 3}")


def make_trajectories(sampler: PreTrainedModel) -> list[Trajectory]:
    """Make two groups of three trajectories; each group has its own prompt.

    Some turns continue the history, one branches off, and one has no record of experts.
    """
    rng = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return rng.integers(2, VOCABULARY, count).tolist()

    trajectories = []
    for group in range(2):
        prompt = tokens(9 + 4 * group)
        for member in range(3):
            number = 3 * group + member
            first, second, third = tokens(5), tokens(4 + member), tokens(6)
            later = [*prompt, *first, *tokens(3)]
            # The last member's third turn continues a rewritten history.
            history = [*prompt, *first[:3]] if member == 2 else [*later, *second]
            prompts = [prompt, later, [*history, *tokens(4)]]
            trajectories.append(play(sampler, prompts, [first, second, third], number))
    bare = whole_turns(trajectories[1])
    unrecorded = [bare[0], replace(bare[1], expert_indices=None), bare[2]]
    trajectories[1] = replayed(trajectories[1], unrecorded)
    return trajectories


def merged_samples(trajectories: Sequence[Trajectory]) -> list[Sample]:
    return [sample for each in trajectories for sample in each.samples]


def unmerged_samples(trajectories: Sequence[Trajectory]) -> list[Sample]:
    """Return each turn as a sample of its own, which belongs to the same trajectory."""
    parts = [replayed(each, [turn]) for each in trajectories for turn in whole_turns(each)]
    return merged_samples(parts)


def weigh(samples: Sequence[Sample]) -> list[WeightedSample]:
    """Give all samples of a trajectory the same advantage."""
    names = sorted({sample.trajectory_id for sample in samples})
    advantages = dict(zip(names, np.random.default_rng(4).normal(size=len(names)), strict=True))
    return [
        WeightedSample(
            sample=sample,
            advantage=float(advantages[sample.trajectory_id]),
            loss_weight=0.01,
            temperature=TEMPERATURE,
        )
        for sample in samples
    ]


def known_choices(samples: Sequence[Sample]) -> np.ndarray:
    """Return the first record of experts after the same tokens, or -1: [B, T, L, K] int64.

    Samples are padded on the right.
    """
    known: dict[tuple[int, ...], np.ndarray] = {}
    for sample in samples:
        if sample.experts is not None:
            pairs = zip(sample.experts.positions, sample.experts.indices, strict=True)
            for position, experts in pairs:
                known.setdefault(tuple(sample.token_ids[: position + 1].tolist()), experts)
    width = max(sample.num_tokens for sample in samples)
    choices = np.full((len(samples), width, 2, NUM_CHOSEN), -1, np.int64)
    for number, sample in enumerate(samples):
        for position in range(sample.num_tokens):
            found = known.get(tuple(sample.token_ids[: position + 1].tolist()))
            if found is not None:
                choices[number, position] = found
    return choices


class ObviousMixture(nn.Module):
    """A routed layer that runs every expert on every token and weighs the outputs by a mask.

    choice: [B, T, K] int64; -1 if the router chooses by itself.
    """

    def __init__(self, block: nn.Module, *, normalises: bool) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.normalises = normalises
        self.choice: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.choice is not None
        logits = hidden @ self.gate.weight.T
        own = logits.topk(NUM_CHOSEN, -1).indices
        chosen = torch.where(self.choice < 0, own, self.choice)
        mask = torch.zeros_like(logits).scatter(-1, chosen, 1.0)
        weights = mask * logits.exp() / logits.exp().sum(-1, keepdim=True)
        if self.normalises:
            weights = mask * logits.exp() / (mask * logits.exp()).sum(-1, keepdim=True)
        output = torch.zeros_like(hidden)
        for expert in range(NUM_EXPERTS):
            gate, up = (hidden @ self.experts.gate_up_proj[expert].T).chunk(2, -1)
            answer = (nn.functional.silu(gate) * up) @ self.experts.down_proj[expert].T
            output = output + weights[..., expert, None] * answer
        if hasattr(self, "shared_expert"):
            share = torch.sigmoid(self.shared_expert_gate(hidden))
            output = output + share * self.shared_expert(hidden)
        return output


def obvious_model(model: str, *, normalises: bool) -> PreTrainedModel:
    """Load transformers' model with an `ObviousMixture` for each routed layer.

    The names of the weights do not change.
    """
    causal_lm = load_plain(model)
    for layer in causal_lm.base_model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp = ObviousMixture(layer.mlp, normalises=normalises)
    return causal_lm


def tell_choices(causal_lm: PreTrainedModel, choices: np.ndarray) -> None:
    """Set each routed layer's choice of experts. choices: [B, T, L, K] int64."""
    mixtures = [m for m in causal_lm.modules() if isinstance(m, ObviousMixture)]
    for number, mixture in enumerate(mixtures):
        mixture.choice = torch.from_numpy(choices[:, :, number])


@cache
def recorded_trajectories(model: str) -> tuple[Trajectory, ...]:
    """Make games with the expert choices that another sampler recorded."""
    return tuple(make_trajectories(perturbed(model)))


def recorded_batch(model: str) -> list[Sample]:
    """Return the merged samples of `recorded_trajectories`."""
    return merged_samples(recorded_trajectories(model))


def surrogate(current: torch.Tensor, behaviour: np.ndarray, advantages: np.ndarray) -> torch.Tensor:
    """Return a sum over trained tokens whose gradient differs for each of them."""
    ratio = torch.exp(current - torch.from_numpy(behaviour.copy()))
    return -(ratio * torch.from_numpy(advantages.copy())).sum()


def gradients_of(module: torch.nn.Module, *, prefix: str = "") -> Gradients:
    return {prefix + n: p.grad.numpy().copy() for n, p in module.named_parameters()}


def compute_padded(
    model: str, weighted: Sequence[WeightedSample], *, normalises: bool
) -> tuple[float, Gradients]:
    """Compute loss and gradients the plain way.

    Samples are padded on the right, attention is transformers' own, and every expert runs.
    """
    causal_lm = obvious_model(model, normalises=normalises)
    samples = [each.sample for each in weighted]
    choices = known_choices(samples)
    tokens = np.zeros(choices.shape[:2], np.int64)
    for number, sample in enumerate(samples):
        tokens[number, : sample.num_tokens] = sample.token_ids
    lengths = np.array([sample.num_tokens for sample in samples])
    mask = torch.from_numpy((np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int64))
    tell_choices(causal_lm, choices)
    ids = torch.from_numpy(tokens)
    logits = causal_lm(ids, attention_mask=mask, use_cache=False).logits[:, :-1] / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = torch.zeros(())
    for number, each in enumerate(weighted):
        at = np.flatnonzero(each.sample.mask)
        advantages = np.full(len(at), each.advantage, np.float32)
        loss = loss + surrogate(logprobs[number, at - 1], each.sample.logprobs[at], advantages)
    loss.backward()
    return loss.item(), gradients_of(causal_lm, prefix="causal_lm.")
