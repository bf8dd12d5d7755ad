"""Which architectures can be trained packed: found out when a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from actors.trainer.model import load_policy, load_value_model

COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
    # Larger than the usual: with weights near 0 a convolution adds next to nothing.
    initializer_range=0.1,
)
DECODER = COMMON | dict(
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
STATE_SPACE = COMMON | dict(state_size=8)

ATTENDING: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**DECODER, head_dim=8),
    "llama": LlamaConfig(**DECODER),
    "gemma3": Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=5),
    "qwen3_moe": Qwen3MoeConfig(**DECODER, **EXPERTS, head_dim=8),
    "mixtral": MixtralConfig(**DECODER, num_local_experts=8, router_jitter_noise=0.5),
}
MIXING: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(
        **DECODER,
        **EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "lfm2": Lfm2Config(**DECODER, full_attn_idxs=[1]),
    "mamba2": Mamba2Config(**STATE_SPACE, num_heads=8, head_dim=8, n_groups=2),
    "falcon_mamba": FalconMambaConfig(**STATE_SPACE),
}


def write(config: PretrainedConfig, directory: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("kind", ATTENDING)
def test_a_model_that_mixes_tokens_in_attention_alone_is_loaded(kind: str, tmp_path: Path) -> None:
    model = write(ATTENDING[kind], tmp_path)
    load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    load_value_model(model, gradient_checkpointing=False)


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_whose_packed_samples_would_see_each_other_is_refused(
    kind: str, tmp_path: Path
) -> None:
    model = write(MIXING[kind], tmp_path)
    expected = "other hidden states than their sample alone .* choose an architecture that mixes"
    with pytest.raises(NotImplementedError, match=expected):
        load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    with pytest.raises(NotImplementedError, match=expected):
        load_value_model(model, gradient_checkpointing=False)


def test_loading_a_model_does_not_move_the_random_numbers(tmp_path: Path) -> None:
    model = write(ATTENDING["qwen3"], tmp_path)
    torch.manual_seed(3)
    load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    found = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(4))


def test_a_routers_noise_is_off_for_policy_and_critic_in_training_mode(tmp_path: Path) -> None:
    model = write(ATTENDING["mixtral"], tmp_path)
    policy = load_policy(model, logprob_chunk=8, gradient_checkpointing=True)
    critic = load_value_model(model, gradient_checkpointing=True)
    token_ids = torch.arange(9)[None]
    for body in (policy.causal_lm.base_model, critic.body):
        assert body.training
        body.set_attn_implementation("eager")
        first, second = (body(input_ids=token_ids).last_hidden_state for _ in range(2))
        assert torch.equal(first, second)
