"""Tests that published weights have the names and tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import ApertusConfig, AutoModelForCausalLM, Glm4MoeConfig, PretrainedConfig
from worlds.models.mixture_world import KINDS, load_plain, write_mixture

from actors.trainer.publish import gather_groups
from actors.trainer.tiny.model import build_tiny_model

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_weights_of_a_mixture_are_those_of_its_checkpoint(
    tmp_path: Path, kind: str
) -> None:
    causal_lm = load_plain(write_mixture(tmp_path, kind))
    saved = load_file(tmp_path / "model.safetensors")
    published = [each for named in gather_groups(causal_lm, dtype=torch.float32) for each in named]
    assert sorted(name for name, _ in published) == sorted(saved)
    for name, tensor in published:
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_dense_model_are_published_once_layer_by_layer(
    tmp_path: Path, tied: bool
) -> None:
    build_tiny_model(tmp_path, seed=0, tie_word_embeddings=tied, warmup_steps=0)
    causal_lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    groups = list(gather_groups(causal_lm, dtype=torch.bfloat16))
    assert len(groups) == 2 + causal_lm.config.num_hidden_layers
    names = [name for named in groups for name, _ in named]
    assert sorted(names) == sorted(name for name, _ in causal_lm.named_parameters())
    assert ("lm_head.weight" in names) is not tied
    assert {tensor.dtype for named in groups for _, tensor in named} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ApertusConfig(**SIZES), "model.layers.1.mlp.act_fn.beta"),
        (
            Glm4MoeConfig(
                **SIZES,
                head_dim=8,
                moe_intermediate_size=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
            ),
            "model.layers.1.mlp.gate.e_score_correction_bias",
        ),
    ],
)
def test_persistent_buffers_are_published_unchanged(
    tmp_path: Path, config: PretrainedConfig, name: str
) -> None:
    made = AutoModelForCausalLM.from_config(config)
    made.get_buffer(name).fill_(0.7)
    made.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    causal_lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    groups = list(gather_groups(causal_lm, dtype=torch.bfloat16))
    (group,) = [dict(named) for named in groups if name in dict(named)]
    # The buffer is in the group of its layer, because an engine rebuilds a layer from its group.
    assert "model.layers.1.self_attn.q_proj.weight" in group
    assert torch.equal(group[name], causal_lm.get_buffer(name))
    assert {name for named in groups for name, _ in named} == set(saved)
