"""A tiny random configuration for every family of models that transformers and vLLM both have.

The families are read from the two libraries: each is an architecture that transformers loads as a
causal model and that vLLM's registry lists under the same name. Settings that a family needs beyond
the common sizes are written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.types import Dtype
from service.config.model_files import registered_architectures

LAYERS, HEADS, HEAD_SIZE, VOCABULARY, CONTEXT = 2, 4, 32, 512, 512
# Sizes under all the names that configurations use; each configuration gets the names it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_SIZE,
    "n_embd": HEADS * HEAD_SIZE,
    "d_model": HEADS * HEAD_SIZE,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    # Larger than the usual: with weights near 0 all models are alike.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": HEADS,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * (HEAD_SIZE // 2),
    "long_factor": [4.0] * (HEAD_SIZE // 2),
}
OWN: dict[str, dict[str, Any]] = {
    # vLLM reads these settings of afmoe, hy_v3 and minimax_m2; transformers does not know them.
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 32,
        "route_norm": True,
        "qk_norm": True,
    },
    "minimax_m2": {
        "rotary_dim": HEAD_SIZE // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {
        "num_experts": None,
        "global_head_dim": HEAD_SIZE,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe": {"head_dim": HEAD_SIZE},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gptj": {"rotary_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "mamba2": {"num_heads": 8},
    "mistral": {"sliding_window": 64},
    "opt": {"word_embed_proj_dim": HEADS * HEAD_SIZE},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "phi3": {"original_max_position_embeddings": CONTEXT},
}
# Second configurations of families, which take other paths through the family's code.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
    "afmoe, settings missing": ("afmoe", {"route_norm": None}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
    "llama, llama3 RoPE": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama, dynamic RoPE": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3, yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 4,
            }
        },
    ),
    "phi3, longrope beyond its switch": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 64,
        },
    ),
    "phi3, longrope before its switch": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"original_max_position_embeddings": CONTEXT // 2},
            "original_max_position_embeddings": CONTEXT // 2,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "cohere (Command R+)": ("cohere", {"use_qk_norm": True}),
    "qwen3, bfloat16": ("qwen3", {}),
    "apertus, bfloat16": ("apertus", {}),
}
# Models for text and images that transformers does not load as causal models, or whose
# configuration has parts; and one that the two libraries spell differently.
BESIDE = ("gemma3", "llama4", "mistral3", "qwen3_vl", "phimoe", "seed_oss", "starcoder2")


def family_dtype(name: str) -> Dtype:
    """Return the type of numbers in which trainer and engine compute."""
    return Dtype.BFLOAT16 if name.endswith("bfloat16") else Dtype.FLOAT32


def families() -> dict[str, str]:
    """Return the model type of each family and variant, by its name in the table."""
    served = registered_architectures()
    both = [
        kind
        for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if not served.isdisjoint((names,) if isinstance(names, str) else names)
    ]
    named = {kind: kind for kind in (*both, *BESIDE) if kind in CONFIG_MAPPING}
    return {**named, **{name: kind for name, (kind, _) in VARIANTS.items()}}


def family_config(name: str) -> PreTrainedConfig:
    """Return a family's tiny configuration. Raises: any error of the family's own checks."""
    kind, own = VARIANTS.get(name, (name, {}))
    made = CONFIG_MAPPING[kind]
    known = vars(made())
    sizes = {
        key: value for key, value in SIZES.items() if key in known or key in made.attribute_map
    }
    mla = MLA if known.get("kv_lora_rank") else {}
    return made(**{**sizes, **mla, **OWN.get(kind, {}), **own})


def write_family(name: str, directory: Path) -> None:
    config = family_config(name)
    if config.get_text_config() is not config:
        # A model with a tower is refused by its configuration; its weights would take gigabytes.
        config.save_pretrained(directory)
        return
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
