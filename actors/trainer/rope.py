"""Give a model one table of rotary positions for all rows: the table that the engine uses.

In transformers, the table of some kinds of RoPE depends on the longest position of each forward
pass. A sample's scores would then depend on the other samples in the pass, and differ from the
engine's scores: the engine keeps one table. When a model is loaded, `fix_rope` replaces the table
by one for the run's longest context.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SCALING_TOLERANCE = 1e-6


def fix_rope(model: PreTrainedModel, *, max_context_tokens: int) -> None:
    """Set the table of each rotary module of a model to the table that the engine uses.

    Only the kind longrope is changed. Its table has the long factors if the run's context is longer
    than the context of the pretraining, otherwise the short factors. transformers would choose the
    factors again in each forward pass.   Source: vLLM, `Phi3LongRoPEScaledRotaryEmbedding`.

    Raises: NotImplementedError if the model has dynamic RoPE, for which no single table exists, or
    if transformers scales longrope differently from the engine.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _fix(module, kinds, None, max_context_tokens=max_context_tokens)
        elif isinstance(kinds, dict):
            for layer_type, kind in tuple(kinds.items()):
                _fix(module, kind, layer_type, max_context_tokens=max_context_tokens)


def _fix(module: Any, kind: str, layer_type: str | None, *, max_context_tokens: int) -> None:
    assert isinstance(module, nn.Module)
    if "dynamic" in kind:
        raise NotImplementedError(
            f"trainer: {type(module).__name__} has RoPE of the kind {kind!r}, whose table changes "
            "with the length of a row, and the engine scales it for every length; expected one "
            "table; remove rope_scaling from config.json and stay within the original context, or "
            "use yarn"
        )
    if kind != "longrope":
        return
    table = longrope_table(module.config, layer_type, max_context_tokens=max_context_tokens)
    prefix = "" if layer_type is None else f"{layer_type}_"
    module.register_buffer(f"{prefix}inv_freq", table, persistent=False)
    # With any name other than longrope transformers does not change the table.
    if layer_type is None:
        module.rope_type = "fixed"
    else:
        module.rope_type = {**module.rope_type, layer_type: "fixed"}


def longrope_table(config: Any, layer_type: str | None, *, max_context_tokens: int) -> torch.Tensor:
    """Return longrope's inverse frequencies, the same for every row of a run: [D / 2] float32.

    Raises: NotImplementedError if transformers scales the cosines and sines differently from the
    engine.
    """
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    parameters = (
        config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    )
    table, scaling = ROPE_INIT_FUNCTIONS["longrope"](
        config, None, seq_len=max_context_tokens, **of_layer
    )
    of_engine = _engine_scaling(
        parameters,
        max_position_embeddings=config.max_position_embeddings,
        max_context_tokens=max_context_tokens,
    )
    if abs(scaling - of_engine) > _SCALING_TOLERANCE:
        raise NotImplementedError(
            f"trainer: longrope scales the rotary positions of {config.model_type} by "
            f"{scaling:.6g} and the engine by {of_engine:.6g}; expected the same; remove factor, "
            "attention_factor and the mscales from rope_scaling in config.json, or choose another "
            "model"
        )
    return table


def _engine_scaling(
    parameters: dict[str, Any], *, max_position_embeddings: int, max_context_tokens: int
) -> float:
    """Return the engine's scale of cosines and sines.   Source: vLLM, as in `fix_rope`."""
    original = parameters["original_max_position_embeddings"]
    name = "long_mscale" if max_context_tokens > original else "short_mscale"
    if parameters.get(name) is not None:
        return float(parameters[name])
    factor = max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
