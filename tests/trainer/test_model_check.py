"""Tests of the check, when a model is loaded, whether it can be trained in packed rows."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconMambaConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    StableLmConfig,
    Starcoder2Config,
)
from worlds.parts.trainer_world import obvious_logprobs

from actors.batch import scoring_row
from actors.trainer.model import load_policy, load_value_model, row_tensors
from actors.trainer.model_check import check_architecture

COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
    # Larger than usual, because a convolution with weights near 0 has almost no effect.
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
def test_a_model_that_mixes_tokens_only_in_attention_is_loaded(kind: str, tmp_path: Path) -> None:
    model = write(ATTENDING[kind], tmp_path)
    load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    load_value_model(model, gradient_checkpointing=False)


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_whose_packed_samples_affect_each_other_is_refused(
    kind: str, tmp_path: Path
) -> None:
    model = write(MIXING[kind], tmp_path)
    expected = (
        "other hidden states than a row of only their sample .* choose an architecture that mixes"
    )
    with pytest.raises(NotImplementedError, match=expected):
        load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    with pytest.raises(NotImplementedError, match=expected):
        load_value_model(model, gradient_checkpointing=False)


def test_loading_a_model_does_not_change_the_state_of_random_numbers(tmp_path: Path) -> None:
    model = write(ATTENDING["qwen3"], tmp_path)
    torch.manual_seed(3)
    load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    found = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(4))


CHECKPOINTED: dict[str, PretrainedConfig] = {
    "a router's noise": ATTENDING["mixtral"],
    # A dropout in the layer's own forward shows whether only the layer is in training mode.
    "a layer's own dropout": OPTConfig(
        **COMMON,
        ffn_dim=48,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.5,
    ),
    "dropout of a layer's parts": SeedOssConfig(
        **DECODER, head_dim=8, attention_dropout=0.5, residual_dropout=0.5
    ),
    "dropout modules": Starcoder2Config(**DECODER, residual_dropout=0.5, embedding_dropout=0.5),
}


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_gradient_checkpointing_enables_neither_dropout_nor_noise(
    kind: str, tmp_path: Path
) -> None:
    model = write(CHECKPOINTED[kind], tmp_path)
    token_ids = np.arange(9, dtype=np.int32)
    row = row_tensors(scoring_row(token_ids), device=torch.device("cpu"))
    expected = load_policy(model, logprob_chunk=8, gradient_checkpointing=False)(row)[0]
    policy = load_policy(model, logprob_chunk=8, gradient_checkpointing=True)
    for _ in range(2):
        assert torch.equal(policy(row)[0], expected)
    values = [
        load_value_model(model, gradient_checkpointing=is_checkpointed).body(
            input_ids=row.token_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            packed_layout=row.layout,
        )
        for is_checkpointed in (False, True)
    ]
    assert torch.equal(*(each.last_hidden_state for each in values))


def test_a_checkpointed_layer_is_computed_again_in_the_backward_pass(tmp_path: Path) -> None:
    model = write(ATTENDING["qwen3"], tmp_path)
    row = row_tensors(scoring_row(np.arange(9, dtype=np.int32)), device=torch.device("cpu"))
    gradients, num_calls = [], []
    for is_checkpointed in (False, True):
        policy = load_policy(model, logprob_chunk=8, gradient_checkpointing=is_checkpointed)
        calls: list[bool] = []
        norm = policy.causal_lm.model.layers[0].input_layernorm
        norm.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(True))
        # Run it twice: checkpointing of a layer must be requested for each pass.
        for _ in range(2):
            policy.zero_grad()
            policy(row)[0].sum().backward()
        num_calls.append(len(calls))
        gradients.append([parameter.grad for parameter in policy.parameters()])
    assert num_calls == [2, 4]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def longrope(original: int) -> Phi3Config:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": original,
    }
    return Phi3Config(
        **DECODER, original_max_position_embeddings=original, rope_parameters=rope | factors
    )


@pytest.mark.parametrize(("context", "is_long"), [(32, False), (33, True), (128, True)])
def test_the_longest_context_determines_the_table_of_longrope_for_all_rows(
    context: int, is_long: bool, tmp_path: Path
) -> None:
    model = write(longrope(32), tmp_path)
    policy = load_policy(
        model, logprob_chunk=8, gradient_checkpointing=False, max_context_tokens=context
    )
    rotary = policy.causal_lm.model.rotary_emb
    # The table of vLLM is 1 / (factor base^(2i/d)).
    plain = 1e4 ** (-torch.arange(4) / 4)
    for length in (8, 60, 8):
        rotary(torch.zeros(1, length, 32), torch.arange(length)[None])
        torch.testing.assert_close(rotary.inv_freq, plain / 4 if is_long else plain)


def test_a_rope_that_the_engine_scales_differently_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = write(LlamaConfig(**DECODER, rope_parameters=rope), tmp_path / "dynamic")
    with pytest.raises(NotImplementedError, match="kind 'dynamic', whose table changes with the"):
        load_policy(model, logprob_chunk=8, gradient_checkpointing=False)
    scaled = longrope(32)
    scaled.rope_parameters = {**scaled.rope_parameters, "attention_factor": 2.0}
    model = write(scaled, tmp_path / "longrope")
    with pytest.raises(
        NotImplementedError, match=r"positions of phi3 by 2 and the engine by 1\.18322;"
    ):
        load_policy(model, logprob_chunk=8, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PhimoeConfig(**DECODER, num_local_experts=4, sliding_window=16), "a window, a chunk or"),
        (StableLmConfig(**DECODER), "StableLmForCausalLM does not run with packed attention"),
        (Llama4TextConfig(**DECODER, head_dim=8), "Llama4ForCausalLM does not run with packed"),
        (GraniteConfig(**DECODER, logits_scaling=8.0), "changes its logits after the output"),
        (DeepseekV3Config(**DECODER), r"has multi-head latent attention \(kv_lora_rank is 512\)"),
        (Gemma3Config(), "is for a model of text and images or sound"),
        (Qwen3Config(**DECODER, use_sliding_window=True, sliding_window=0), "sliding_window is 0"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, PretrainedConfig) else "",
)
def test_an_architecture_is_refused_by_its_configuration_without_weights(
    config: PretrainedConfig, expected: str
) -> None:
    with pytest.raises(NotImplementedError, match=expected):
        check_architecture(config)


def test_a_window_as_long_as_the_context_is_accepted() -> None:
    config = PhimoeConfig(**DECODER, num_local_experts=4, sliding_window=64)
    check_architecture(config, max_context_tokens=64)


@pytest.mark.parametrize("kind", ATTENDING)
def test_an_architecture_of_any_size_is_checked_with_a_narrow_copy(kind: str) -> None:
    config = copy.deepcopy(ATTENDING[kind])
    # The weights of this model would not fit in memory.
    config.vocab_size, config.intermediate_size = 256_000, 2**20
    config.num_attention_heads, config.num_key_value_heads, config.hidden_size = 64, 8, 8192
    check_architecture(config)


def test_a_threshold_that_is_named_noise_is_not_changed(tmp_path: Path) -> None:
    model = write(PhimoeConfig(**DECODER, num_local_experts=4, sliding_window=None), tmp_path)
    token_ids = np.random.default_rng(0).integers(0, 64, 40).astype(np.int32)
    row = row_tensors(scoring_row(token_ids), device=torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = load_policy(model, logprob_chunk=8, gradient_checkpointing=True)(row)[0]
    torch.testing.assert_close(found, obvious_logprobs(plain, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_checkpoint_with_weights_that_are_not_finite_is_refused(
    tmp_path: Path, number: float
) -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**DECODER, head_dim=8))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = number
    model.save_pretrained(tmp_path)
    expected = r"model\.layers\.1\.mlp\.up_proj\.weight has NaN or infinite numbers"
    with pytest.raises(NotImplementedError, match=expected):
        load_policy(str(tmp_path), logprob_chunk=8, gradient_checkpointing=False)


def test_a_checkpoint_that_lacks_its_output_head_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**DECODER, head_dim=8))
    tensors = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(NotImplementedError, match=r"lack 1 of its parameters, such as lm_head"):
        load_policy(str(tmp_path), logprob_chunk=64, gradient_checkpointing=False)


def test_a_model_directory_with_an_adapter_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(Qwen3Config(**DECODER, head_dim=8)).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    expected = r"adapter_config\.json: got .*merge it first"
    with pytest.raises(NotImplementedError, match=expected):
        load_policy(str(tmp_path), logprob_chunk=64, gradient_checkpointing=False)
    with pytest.raises(NotImplementedError, match=expected):
        load_value_model(str(tmp_path), gradient_checkpointing=False)
