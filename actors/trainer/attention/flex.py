"""Attention over a packed row on CUDA: FlexAttention with a block mask from the row's layout.

The row's segments form a forest of shared prefixes (`forest`). This module has not been run on a
GPU yet. On the CPU, FlexAttention has no backward, so the tests compare only the mask and the
uncompiled forward with the module `cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from actors.trainer.attention.forest import PackedLayout

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(layout: PackedLayout, *, window: int | None) -> MaskFunction:
    """Return FlexAttention's mask function: (batch, head, query row, key row) -> visible.

    A query q sees itself, and the earlier tokens of its segment and of the segment's ancestors.
    Because segments are in preorder, these are the keys k with k <= q < subtree_end[k]. With a
    window, position[q] - position[k] < window must hold too.
    """
    segments = layout.segments
    subtree_ends = torch.from_numpy(segments.token_subtree_ends()).to(layout.device)
    positions = torch.from_numpy(segments.token_positions()).to(layout.device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_ends[key])

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_near = positions[query] - positions[key] < window
        return sees(batch, head, query, key) & is_near

    return sees if window is None else sees_near


def block_mask_for(layout: PackedLayout, *, window: int | None) -> BlockMask:
    """Return the layout's block mask for one sliding window; all layers of the row share it."""
    if window not in layout.plans:
        length = layout.num_tokens
        layout.plans[window] = create_block_mask(
            mask_function(layout, window=window), None, None, length, length, device=layout.device
        )
    return layout.plans[window]


def flex_forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: PackedLayout,
    window: int | None,
    scaling: float | None,
    is_compiled: bool = True,
) -> Tensor:
    """Compute the attention of one packed row, whose segments form a forest.

    A token attends to the earlier tokens of its segment and of the segment's ancestors, as far as
    the window reaches.

    Args: query: [1, H, T, D]. key, value: [1, K, T, D], H a multiple of K. is_compiled: False runs
    the slow reference, for comparison.
    Returns: [1, H, T, D].
    """
    attend = _compiled() if is_compiled else flex_attention
    attended: Tensor = attend(
        query,
        key,
        value,
        block_mask=block_mask_for(layout, window=window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


@cache
def _compiled() -> Any:
    # Rows differ in length; compile one kernel for all lengths.
    return torch.compile(flex_attention, dynamic=True)
