"""Attention over a forest on the CPU, forward and backward, by the blocks of a plan.

torch's kernel computes the output out_b and the normaliser lse_b of attention to each block b of
keys. The blocks are combined: lse = log(sum_b exp(lse_b)), out = sum_b exp(lse_b - lse) out_b.
Source: Milakov and Gimelshein 2018, section 3, as used in FlashAttention (Dao et al. 2022, section
3.1). The gradient of a block needs only the whole row's `out` and `lse` (ibid., algorithm 4, lines
14 to 20).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.trainer.attention.forest import AttentionPlan, Block

# `scaled_dot_product_attention` runs this kernel too, but does not return the normalisers.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# In bfloat16, torch's backward kernel spends most of its time on preparing small matrix products.
# Up to this number of keys float32 is faster, including the conversions to and from float32: 2 to 7
# times at 16 to 64 keys, equal at 256, slower at 512.
_FLOAT32_KEYS = 256


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, scaling: float | None
) -> Tensor:
    """Compute attention in a packed row whose samples share prefixes and so form a forest.

    Each token attends only to itself and to earlier tokens on its path from the root, within the
    plan's sliding window.

    Args: query: [T, H, D]. key, value: [T, K, D], H a multiple of K. scaling: factor of the scores;
    None for 1 / sqrt(D).
    Returns: [T, H, D].
    """
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = _repeat_heads(key, copies), _repeat_heads(value, copies)
    attended: Tensor = _ForestAttention.apply(query, key, value, plan, scaling)
    return attended


def _repeat_heads(heads: Tensor, copies: int) -> Tensor:
    return heads[:, :, None].expand(-1, -1, copies, -1).flatten(1, 2)


class _ForestAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        scaling: float | None,
    ) -> Tensor:
        out, normalizer = _attend_to_self(query, key, value, plan, scaling)
        # The errors of several roundings to a short type would add up. A single block may be
        # rounded by the kernel.
        out = out.to(normalizer.dtype) if plan.blocks else out
        for block in plan.blocks:
            part, part_normalizer = _KERNEL(
                _as_batch(_take(query, block.queries)),
                _as_batch(key[block.keys]),
                _as_batch(value[block.keys]),
                attn_mask=_additive(block, query.dtype),
                scale=scaling,
            )
            old, new = _take(normalizer, block.queries), part_normalizer[0].transpose(0, 1)
            both = torch.logaddexp(old, new)
            merged = _take(out, block.queries) * torch.exp(old - both)[..., None]
            merged.addcmul_(part[0].transpose(0, 1), torch.exp(new - both)[..., None])
            _put(out, block.queries, merged)
            _put(normalizer, block.queries, both)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, normalizer)
        ctx.plan, ctx.scaling = plan, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, normalizer = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        grad_out = grads[0].contiguous()
        sums = _self_gradients(grad_out, query, key, value, out, normalizer, plan, ctx.scaling)
        if plan.blocks:
            sums = [each.to(normalizer.dtype) for each in sums]
        for block in plan.blocks:
            rows = (
                _take(grad_out, block.queries),
                _take(query, block.queries),
                key[block.keys],
                value[block.keys],
                _take(out, block.queries),
            )
            parts = _backward(
                [_as_batch(each) for each in rows],
                _take(normalizer, block.queries).transpose(0, 1)[None],
                is_causal=False,
                mask=_additive(block, query.dtype),
                scaling=ctx.scaling,
            )
            positions = (block.queries, block.keys, block.keys)
            # Gradients of shared keys are added in the plan's order, without an atomic scatter-add.
            for total, own, part in zip(sums, positions, parts, strict=True):
                _add(total, own, part[0].transpose(0, 1))
        return (*(each.to(query.dtype) for each in sums), None, None)


def _attend_to_self(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the attention of each piece to itself; return the outputs and the normalisers.

    A piece is a segment of the packed row, or a part of one. A token does not attend to later
    tokens.
    """
    padded = [_pad(rows, plan) for rows in (query, key, value)]
    outs, normalizers = [], []
    for start, bucket in _slots(plan):
        q, k, v = (_bucket_rows(rows, start, bucket) for rows in padded)
        # The padding is at the end of a piece, so no token attends to it.
        out, normalizer = _KERNEL(q, k, v, is_causal=True, scale=scaling)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        normalizers.append(normalizer.transpose(1, 2).flatten(0, 1))
    return _unpad(outs, plan), _unpad(normalizers, plan)


def _self_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizer: Tensor,
    plan: AttentionPlan,
    scaling: float | None,
) -> list[Tensor]:
    """Return the gradients of query, key and value through the attention of `_attend_to_self`."""
    # A padded query has gradient 0 and normaliser 0, so it adds exp(0) * 0 = 0 to its keys.
    padded = [_pad(rows, plan) for rows in (grad_out, query, key, value, out)]
    padded_normalizer = _pad(normalizer, plan)
    parts: list[tuple[Tensor, ...]] = []
    for start, bucket in _slots(plan):
        stop = start + bucket.numel()
        lse = padded_normalizer[start:stop].unflatten(0, bucket)
        parts.append(
            _backward(
                [_bucket_rows(rows, start, bucket) for rows in padded],
                lse.transpose(1, 2),
                is_causal=True,
                scaling=scaling,
            )
        )
    return [
        _unpad([part.transpose(1, 2).flatten(0, 1) for part in of_one], plan)
        for of_one in zip(*parts, strict=True)
    ]


def _backward(
    inputs: Sequence[Tensor],
    normalizer: Tensor,
    *,
    is_causal: bool,
    mask: Tensor | None = None,
    scaling: float | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, from torch's backward kernel.

    inputs: (grad_out, query, key, value, out), each [N, H, L, D].
    """
    # With few keys the kernel is faster in float32 than in bfloat16.
    if inputs[2].shape[2] <= _FLOAT32_KEYS:
        inputs = [each.to(normalizer.dtype) for each in inputs]
        mask = None if mask is None else mask.to(normalizer.dtype)
    parts: tuple[Tensor, ...] = _KERNEL_BACKWARD(
        *inputs, normalizer, 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return parts


def _slots(plan: AttentionPlan) -> list[tuple[int, torch.Size]]:
    starts, start = [], 0
    for bucket in plan.buckets:
        starts.append((start, bucket))
        start += bucket.numel()
    return starts


def _bucket_rows(rows: Tensor, start: int, bucket: torch.Size) -> Tensor:
    """Return a view of one bucket, a group of pieces that are padded to the same length.

    Args: rows: all buckets, [S, H, D]. start: the bucket's first row. bucket: (num_pieces, length).
    Returns: [num_pieces, H, length, D].
    """
    stop = start + bucket.numel()
    return rows[start:stop].unflatten(0, bucket).transpose(1, 2)


def _as_batch(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1)[None]


def _pad(rows: Tensor, plan: AttentionPlan) -> Tensor:
    """Copy the rows of tokens [T, ...] into the padded buckets [S, ...]; padding becomes 0."""
    if plan.gather.shape[0] == rows.shape[0]:
        return rows.index_select(0, plan.gather)
    zero = rows.new_zeros((1, *rows.shape[1:]))
    return torch.cat([rows, zero]).index_select(0, plan.gather)


def _unpad(parts: list[Tensor], plan: AttentionPlan) -> Tensor:
    """Undo `_pad`: return the rows of tokens [T, ...] from the padded rows of each bucket."""
    slots = parts[0] if len(parts) == 1 else torch.cat(parts)
    return slots.index_select(0, plan.scatter)


def _additive(block: Block, dtype: torch.dtype) -> Tensor | None:
    """Return the mask that the kernel adds to the scores; None if no key is hidden."""
    if block.visible is None:
        return None
    hidden = torch.zeros(block.visible.shape, dtype=dtype, device=block.visible.device)
    return hidden.masked_fill_(~block.visible, -torch.inf)


def _take(rows: Tensor, positions: slice | Tensor) -> Tensor:
    if isinstance(positions, slice):
        return rows[positions]
    return rows.index_select(0, positions)


def _put(rows: Tensor, positions: slice | Tensor, values: Tensor) -> None:
    if isinstance(positions, slice):
        rows[positions] = values
    else:
        rows.index_copy_(0, positions, values)


def _add(rows: Tensor, positions: slice | Tensor, values: Tensor) -> None:
    """Add values to the rows at the given positions, which must be all different."""
    if isinstance(positions, slice):
        rows[positions] += values
    else:
        rows.index_copy_(0, positions, rows.index_select(0, positions) + values)
