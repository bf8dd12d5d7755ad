"""Attention over a packed row, in a function that transformers' models call.

The linear layers of the model see one packed row [1, T, …]; only attention treats the row as a
forest (`forest`). Invariant: the result equals the results of running each path separately. Any
decoder model with transformers' attention interface can use the function, under the name
`PACKED_ATTENTION`. The model receives the layout as the keyword `packed_layout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from actors.trainer.attention.cpu import forest_attention
from actors.trainer.attention.flex import flex_forest_attention
from actors.trainer.attention.forest import PackedLayout, plan_for

PACKED_ATTENTION = "rayloom_packed"
# Extra inputs of architectures whose attention is more than softmax(QK)V. They are refused, because
# ignoring them would change the result.
_UNSUPPORTED_INPUTS = ("softcap", "s_aux", "position_bias", "sinks")


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one packed row; transformers' models call this function.

    A token attends only to the earlier tokens of its segment and of the segment's ancestors
    (`forest`). Dropout is never applied, because the engine applies none, and both must compute the
    same log-probabilities.

    Args: query: [1, H, T, D]. key, value: [1, K, T, D], H a multiple of K.
        sliding_window: number of keys that a query sees, including itself; None for all.
    Returns: [1, T, H, D], and no attention weights.
    Raises: ValueError if the layout is missing or does not fit; NotImplementedError if the
        architecture passes a mask or another input that packed attention does not support.
    """
    num_tokens = query.shape[2]
    if packed_layout is None or query.shape[0] != 1 or packed_layout.num_tokens != num_tokens:
        expected = None if packed_layout is None else packed_layout.num_tokens
        raise ValueError(
            f"packed attention: got a query of {tuple(query.shape)} for a layout of {expected} "
            "tokens, expected [1, H, T, D]; pass packed_layout= to the model's forward"
        )
    _check_inputs(module, attention_mask, extra)
    if query.is_cuda:
        attended = flex_forest_attention(
            query, key, value, layout=packed_layout, window=sliding_window, scaling=scaling
        )
        return attended.transpose(1, 2), None
    rows = [heads[0].transpose(0, 1) for heads in (query, key, value)]
    plan = plan_for(packed_layout, window=sliding_window)
    return forest_attention(*rows, plan=plan, scaling=scaling)[None], None


def register_packed_attention() -> str:
    """Register `packed_attention` with transformers; return its name for `attn_implementation`."""
    # Attention is not compiled with its layer (`trainer.compile`): each row has another layout, for
    # which it would be compiled again, and on a GPU flex attention compiles itself.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    return PACKED_ATTENTION


def _check_inputs(
    module: torch.nn.Module, attention_mask: Tensor | None, extra: dict[str, Any]
) -> None:
    unsupported = [name for name in _UNSUPPORTED_INPUTS if extra.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise NotImplementedError(
            f"packed attention: {type(module).__name__} passes {unsupported or 'a mask'}, expected "
            "plain causal attention; this architecture cannot be trained packed"
        )
