"""Attention over a packed row: every sample attends to itself alone, and only backwards.

The linear layers of the model see one packed row [1, T, …]; here, and only here, the row is cut
into its samples, padded on the right to the length of the longest one of its bucket, and given to
`scaled_dot_product_attention(is_causal=True)`: a padded key stands behind every real query, so no
mask is needed. Invariant: the result equals running each sample alone. The function is registered
with transformers under `PACKED_ATTENTION`, so any decoder model that dispatches through its
attention interface takes it; the model receives the layout as the keyword `packed_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "rayloom_packed"
# Extra inputs of architectures whose attention is more than softmax(QK)V: answered, never ignored.
_UNSUPPORTED_INPUTS = ("softcap", "s_aux", "position_bias", "sinks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Samples of similar length, padded together to [num_samples, length] tokens."""

    num_samples: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where the tokens of a row stand in its padded buckets.

    gather: [S] int64, the buckets' slots one behind the other; values in [0, T], T is padding.
    scatter: [T] int64, the slot of each token: gather[scatter[t]] == t.
    """

    gather: Tensor
    scatter: Tensor
    buckets: tuple[Bucket, ...]
    num_tokens: int


def bucket_lengths(sample_lengths: Sequence[int]) -> list[list[int]]:
    """Group sample indices by similar length, longest first.

    A bucket takes every sample at least half as long as its longest, so the padded row is less
    than twice the packed one and there are at most log2(longest / shortest) + 1 buckets.

    Example: bucket_lengths([3, 10, 6, 2]) -> [[1, 2], [0, 3]]
    """
    order = sorted(range(len(sample_lengths)), key=lambda index: -sample_lengths[index])
    buckets: list[list[int]] = []
    for index in order:
        if not buckets or 2 * sample_lengths[index] < sample_lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def build_layout(sample_lengths: Sequence[int], *, device: torch.device | str) -> PackedLayout:
    """Plan the padded buckets of one packed row.

    Args: sample_lengths: B positive lengths, tokens, in the order of the row.
    Raises: ValueError for an empty row or a sample without tokens.
    """
    if not sample_lengths or min(sample_lengths) < 1:
        raise ValueError(
            f"packed attention: got sample lengths {list(sample_lengths)[:8]}, expected at least "
            "one sample of at least one token; drop empty samples before packing"
        )
    starts = [0]
    for length in sample_lengths:
        starts.append(starts[-1] + length)
    num_tokens = starts[-1]
    buckets: list[Bucket] = []
    slots: list[Tensor] = []
    for members in bucket_lengths(sample_lengths):
        lengths = torch.tensor([sample_lengths[index] for index in members])
        offsets = torch.arange(int(lengths[0]))
        positions = torch.tensor([starts[index] for index in members])[:, None] + offsets
        slots.append(positions.masked_fill(offsets >= lengths[:, None], num_tokens).reshape(-1))
        buckets.append(Bucket(num_samples=len(members), length=int(lengths[0])))
    gather = torch.cat(slots)
    is_token = gather < num_tokens
    scatter = torch.empty(num_tokens, dtype=torch.int64)
    scatter[gather[is_token]] = torch.arange(gather.shape[0])[is_token]
    return PackedLayout(
        gather=gather.to(device),
        scatter=scatter.to(device),
        buckets=tuple(buckets),
        num_tokens=num_tokens,
    )


class _Pad(torch.autograd.Function):
    """[T, …] -> [S, …]: rows to slots, zeros in the padding. Its gradient is the inverse gather.

    The gradient that `index_select` brings along is an atomic scatter-add; here every token stands
    in exactly one slot, so a plain gather does.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return _gather_or_zero(rows, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """[S, …] -> [T, …]: slots back to rows; the padding receives no gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(gather)
        return slots.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gather,) = ctx.saved_tensors
        return _gather_or_zero(grads[0], gather), None, None


def _gather_or_zero(rows: Tensor, gather: Tensor) -> Tensor:
    zero = rows.new_zeros((1, *rows.shape[1:]))
    return torch.cat([rows, zero]).index_select(0, gather)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] bool: query i sees keys i - window < j <= i."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _check_inputs(
    module: torch.nn.Module, attention_mask: Tensor | None, extra: dict[str, Any]
) -> None:
    unsupported = [name for name in _UNSUPPORTED_INPUTS if extra.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise NotImplementedError(
            f"packed attention: {type(module).__name__} passes {unsupported or 'a mask'}, expected "
            "plain causal attention; this architecture cannot be trained packed"
        )


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
    """Attend within each sample of a packed row; the signature is transformers'.

    Dropout is never applied: the trained log-probabilities must be the engine's.

    Args: query: [1, H, T, D]. key, value: [1, K, T, D], H a multiple of K.
        sliding_window: keys that a query sees, itself included; None for all.
    Returns: [1, T, H, D], and no attention weights.
    Raises: ValueError when the layout is missing or does not fit; NotImplementedError for an
        architecture whose attention takes inputs that are not computed here.
    """
    num_tokens = query.shape[2]
    if packed_layout is None or query.shape[0] != 1 or packed_layout.num_tokens != num_tokens:
        expected = None if packed_layout is None else packed_layout.num_tokens
        raise ValueError(
            f"packed attention: got a query of {tuple(query.shape)} for a layout of {expected} "
            "tokens, expected [1, H, T, D]; pass packed_layout= to the model's forward"
        )
    _check_inputs(module, attention_mask, extra)
    layout = packed_layout
    padded = [
        _Pad.apply(heads[0].transpose(0, 1), layout.gather, layout.scatter)
        for heads in (query, key, value)
    ]
    outputs: list[Tensor] = []
    start = 0
    for bucket in layout.buckets:
        shape = (bucket.num_samples, bucket.length)
        stop = start + bucket.num_samples * bucket.length
        q, k, v = (rows[start:stop].unflatten(0, shape).transpose(1, 2) for rows in padded)
        start = stop
        has_window = sliding_window is not None and bucket.length > sliding_window
        mask = _window_mask(bucket.length, sliding_window or 0, q.device) if has_window else None
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Unpad.apply(slots, layout.gather, layout.scatter)[None], None


def register_packed_attention() -> str:
    """Make the implementation known to transformers; return its name for `attn_implementation`."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION
