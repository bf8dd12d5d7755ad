"""Tests of which models and adapters the installed vLLM serves, according to its source."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    DbrxConfig,
    FalconConfig,
    LlamaConfig,
    MiniMaxM2Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from actors.types import Dtype
from service.config.model_files import (
    cpu_head_sizes,
    registered_architectures,
    unserved,
    unserved_adapters,
)
from service.inference.settings import InferenceSettings

ON_CPU, ON_GPU = InferenceSettings(), InferenceSettings(gpus_per_replica=1.0)
QWEN3 = ["Qwen3ForCausalLM"]


def qwen3(**named: Any) -> Qwen3Config:
    return Qwen3Config(**{"head_dim": 128, "architectures": QWEN3, **named})


def test_the_registry_and_the_head_sizes_are_read() -> None:
    assert len(registered_architectures()) > 100
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "SeedOssForCausalLM"} <= (
        registered_architectures()
    )
    assert {32, 64, 128} <= cpu_head_sizes()


@pytest.mark.parametrize(
    ("config", "inference", "dtype", "expected"),
    [
        (qwen3(), ON_CPU, Dtype.FLOAT32, None),
        (LlamaConfig(hidden_size=1024, num_attention_heads=16), ON_CPU, Dtype.FLOAT32, None),
        (qwen3(architectures=None), ON_CPU, Dtype.FLOAT32, None),
        (qwen3(head_dim=16), ON_CPU, Dtype.FLOAT32, "heads of 16 dimensions, expected one of 32,"),
        (qwen3(head_dim=16), ON_GPU, Dtype.FLOAT32, None),
        (qwen3(architectures=["Own"]), ON_GPU, Dtype.FLOAT32, None),
        (
            FalconConfig(architectures=["Own"]),
            ON_GPU,
            Dtype.FLOAT32,
            "Own is not among the architectures of the installed vLLM",
        ),
        (
            qwen3(architectures=["Phi3SmallForCausalLM"]),
            ON_GPU,
            Dtype.FLOAT32,
            "Phi3SmallForCausalLM is not among the architectures of the installed vLLM",
        ),
        (
            PhimoeConfig(architectures=["PhimoeForCausalLM"]),
            ON_GPU,
            Dtype.FLOAT32,
            "PhimoeForCausalLM is not among the architectures of the installed vLLM",
        ),
        (
            Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1),
            ON_GPU,
            Dtype.FLOAT32,
            "(max_window_layers is 1 of 32 layers), expected all layers or none",
        ),
        (
            DbrxConfig(architectures=["DbrxForCausalLM"]),
            ON_GPU,
            Dtype.FLOAT32,
            "DbrxForCausalLM: the installed vLLM looks for its experts under another name",
        ),
        (
            AfmoeConfig(architectures=["AfmoeForCausalLM"], score_func="sigmoid", n_group=1),
            ON_GPU,
            Dtype.FLOAT32,
            "config.json has no route_norm, topk_group, which vLLM reads for AfmoeForCausalLM",
        ),
        (
            MiniMaxM2Config(architectures=["MiniMaxM2ForCausalLM"]),
            ON_GPU,
            Dtype.FLOAT32,
            "MiniMaxM2ForCausalLM: the installed vLLM cannot load its weights a second time",
        ),
        *(
            (
                qwen3(architectures=[name]),
                ON_GPU,
                Dtype.FLOAT32,
                f"names the architecture {name}, which the engines build, and the model type qwen3,"
                " for which the trainer builds Qwen3ForCausalLM",
            )
            for name in (
                "LlamaForCausalLM",
                "Qwen2ForCausalLM",
                "Qwen3Model",
                "Qwen3ForSequenceClassification",
            )
        ),
        (LlamaConfig(architectures=["LLaMAForCausalLM"]), ON_GPU, Dtype.FLOAT32, None),
        (ApertusConfig(), ON_CPU, Dtype.FLOAT32, "whose constants vLLM rounds to bfloat16"),
        (ApertusConfig(), ON_CPU, Dtype.BFLOAT16, None),
    ],
)
def test_a_model_that_no_engine_serves_is_refused_with_a_sentence(
    config: PretrainedConfig, inference: InferenceSettings, dtype: Dtype, expected: str | None
) -> None:
    reasons = list(unserved(config, inference, dtype=dtype))
    assert len(reasons) == (expected is not None)
    assert expected is None or expected in reasons[0]


@pytest.mark.parametrize(
    ("config", "inference", "expected"),
    [
        (qwen3(), ON_CPU, []),
        (PhimoeConfig(), ON_GPU, []),
        (PhimoeConfig(), ON_CPU, ["it has experts, for whose adapters"]),
        (Qwen3NextConfig(), ON_CPU, ["it has experts", "it has recurrent layers"]),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_refused(
    config: PretrainedConfig, inference: InferenceSettings, expected: list[str]
) -> None:
    found = list(unserved_adapters(config, inference))
    assert len(found) == len(expected)
    for reason, words in zip(found, expected, strict=True):
        assert words in reason and "publish_merged: true" in reason
