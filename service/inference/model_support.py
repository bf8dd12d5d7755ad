"""Find out which models the installed vLLM serves, without importing it, which takes seconds.

The module reads vLLM's source: the architectures of its registry, and the head sizes for which its
attention has a kernel on CPU. If vLLM is not installed, or its source has another form, nothing is
refused here, and the engine's start reports the failure. Called by `service.config`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.types import Dtype
from service.inference.settings import InferenceSettings

_REGISTRY = Path("model_executor", "models", "registry.py")
_CPU_ATTENTION = Path("v1", "attention", "backends", "cpu_attn.py")
_OF_TEXT = frozenset({"_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"})
# Listed by name because no property of a configuration shows it: vLLM fails only when it samples.
_NOT_ON_CPU = {
    "LagunaForCausalLM": "its router takes the sigmoid of its scores without groups of experts",
}
# Also listed by name, because the failure shows only when the engine loads the model.
_NOT_LOADED = {
    "DbrxForCausalLM": "looks for its experts under another name than its own module has",
    "MiniMaxM2ForCausalLM": "cannot load its weights a second time, as each publication does",
}
# Settings that vLLM requires. transformers does not know them and omits them from a configuration
# that it creates.
_READ_BY_VLLM = {
    "AfmoeForCausalLM": ("score_func", "route_norm", "n_group", "topk_group"),
    "HYV3ForCausalLM": ("first_k_dense_replace", "expert_hidden_dim", "route_norm"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NO_LONGER = frozenset({"_PREVIOUSLY_SUPPORTED_MODELS"})


def registered_architectures(tables: frozenset[str] = _OF_TEXT) -> frozenset[str]:
    """Return the names of the text architectures in vLLM's registry; empty if it cannot be read.

    Args: tables: names of the registry's tables.
    """
    return frozenset(
        key.value
        for node in ast.walk(_parsed(_REGISTRY))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id in tables for target in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def cpu_head_sizes() -> frozenset[int]:
    """Return the head sizes that vLLM's attention supports on CPU; empty if they cannot be
    read.
    """
    return frozenset(
        item.value
        for node in ast.walk(_parsed(_CPU_ATTENTION))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
        for returned in ast.walk(node)
        if isinstance(returned, ast.List)
        for item in returned.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, int)
    )


def unserved(config: Any, inference: InferenceSettings, *, dtype: Dtype) -> Iterator[str]:
    """Yield the reasons why the engines cannot serve a model, one sentence for each.

    Args: config: transformers' configuration of a causal model of text. dtype: type of the weights.
    """
    served, named = registered_architectures(), set(config.architectures or ())
    if served and named and not served & named and not _runs_in_transformers(config, named):
        yield (
            f"{', '.join(sorted(named))} is not among the architectures of the installed vLLM, "
            "expected one that the engines serve; choose another model"
        )
    for name in sorted(named & _NOT_LOADED.keys()):
        yield f"{name}: the installed vLLM {_NOT_LOADED[name]}; choose another model"
    for name in sorted(named & _READ_BY_VLLM.keys()):
        missing = [key for key in _READ_BY_VLLM[name] if getattr(config, key, None) is None]
        if missing:
            yield (
                f"config.json has no {', '.join(missing)}, which vLLM reads for {name}; expected "
                "them as the model's publisher has set them; copy them from the published "
                "config.json"
            )
    if getattr(config, "hidden_act", None) == "xielu" and dtype is Dtype.FLOAT32:
        yield (
            "its activation is xIELU, whose constants vLLM rounds to bfloat16, while the trainer "
            "computes in float32; expected the same in both; set trainer.dtype and model.dtype to "
            "bfloat16"
        )
    windowed, layers = (
        getattr(config, name, None) for name in ("max_window_layers", "num_hidden_layers")
    )
    if getattr(config, "use_sliding_window", False) and windowed and windowed < layers:
        yield (
            f"only some layers have its sliding window (max_window_layers is {windowed} of "
            f"{layers} layers), expected all layers or none; set use_sliding_window to "
            "false in config.json and stay within the window, or choose another model"
        )
    for name in sorted(named & _NOT_ON_CPU.keys()) if inference.is_on_cpu else ():
        yield (
            f"{name}: {_NOT_ON_CPU[name]}, for which vLLM has no kernel on CPU; choose another "
            "model, or run the engines on GPUs"
        )
    sizes = cpu_head_sizes() if inference.is_on_cpu else frozenset()
    if sizes and (size := head_size(config)) is not None and size not in sizes:
        yield (
            f"its attention has heads of {size} dimensions, expected one of "
            f"{', '.join(map(str, sorted(sizes)))}, for which vLLM's attention has a kernel on "
            "CPU; choose another model, or run the engines on GPUs"
        )


def unserved_adapters(config: Any, inference: InferenceSettings) -> Iterator[str]:
    """Yield the reasons why the engines cannot serve LoRA adapters of a model that they serve.

    Args: config: transformers' configuration of a causal model of text.
    """
    remedy = "expected a dense model; set trainer.lora.publish_merged: true"
    text = config.get_text_config()
    if inference.is_on_cpu and any(getattr(text, name, None) for name in _EXPERTS):
        yield f"it has experts, for whose adapters vLLM has no kernel on CPU, {remedy}"
    kinds = set(getattr(text, "layer_types", None) or ())
    if inference.is_on_cpu and any("linear" in kind or "mamba" in kind for kind in kinds):
        yield f"it has recurrent layers, whose adapters vLLM does not serve on CPU, {remedy}"


def _runs_in_transformers(config: Any, named: set[str]) -> bool:
    """Return whether vLLM can run transformers' implementation of a model that it lacks itself.

    Return False for a mixture of experts, because vLLM would combine its own experts with a router
    that it does not know.
    """
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if any(getattr(config, name, None) for name in _EXPERTS):
        return False
    if kind is None or named & registered_architectures(_NO_LONGER):
        return False
    return bool(kind.is_backend_compatible())


def head_size(config: Any) -> int | None:
    """Return the dimensions of an attention head; None if the configuration does not state them."""
    if isinstance(size := getattr(config, "head_dim", None), int):
        return size
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _parsed(file: Path) -> ast.Module:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return ast.Module(body=[], type_ignores=[])
    source = Path(spec.origin).parent / file
    return ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
