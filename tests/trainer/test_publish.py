"""What is published is what a checkpoint holds: its names, its tensors, for every kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from worlds.mixture_world import KINDS, load_plain, write_mixture

from actors.trainer.publish import gather_groups
from actors.trainer.tiny.model import build_tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixtures_weights_are_published_as_its_checkpoint_has_them(
    tmp_path: Path, kind: str
) -> None:
    causal_lm = load_plain(write_mixture(tmp_path, kind))
    saved = load_file(tmp_path / "model.safetensors")
    published = [each for named in gather_groups(causal_lm, dtype=torch.float32) for each in named]
    assert sorted(name for name, _ in published) == sorted(saved)
    for name, tensor in published:
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_models_weights_are_published_once_layer_by_layer(
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
