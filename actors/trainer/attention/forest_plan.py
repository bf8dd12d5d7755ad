"""How the CPU computes attention over a forest: which blocks of queries meet which keys.

Each piece (a segment, or a part of one) attends causally to itself; pieces of similar length are
padded together into buckets. Each piece's keys are then met by all its descendants at once: in
preorder those are one contiguous block of queries. So no key is ever copied for a path, and every
pair of query and key is in exactly one block. Under a sliding window segments are first cut into
pieces no longer than the window: within a piece the window then hides nothing, and a block keeps
only the queries near enough to see its last key. Pure; called by `forest_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.trainer.attention.forest_layout import Ints, PackedLayout, Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces of similar length, padded together to [num_pieces, length] tokens."""

    num_pieces: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Keys of one piece and the queries below it that see them.

    queries: [Q] rows, all different; a slice where they are contiguous. keys: K rows.
    visible: [Q, K] bool, at least one in each row; None for all.
    """

    queries: slice | Tensor
    keys: slice
    visible: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """gather: [S] int64, the buckets' slots one behind the other; values in [0, T], T is padding.

    scatter: [T] int64, the slot of each token: gather[scatter[t]] == t.
    """

    gather: Tensor
    scatter: Tensor
    buckets: tuple[Bucket, ...]
    blocks: tuple[Block, ...]


def plan_for(layout: PackedLayout, *, window: int | None) -> AttentionPlan:
    """Return the layout's plan for one sliding window; all layers of the row share it."""
    if window not in layout.plans:
        layout.plans[window] = build_plan(layout.segments, window=window, device=layout.device)
    plan: AttentionPlan = layout.plans[window]
    return plan


def build_plan(segments: Segments, *, window: int | None, device: torch.device) -> AttentionPlan:
    """Plan one row. window: keys that a query sees, itself included; None for all."""
    positions = segments.token_positions()
    if window is not None and window > positions.max():
        window = None
    pieces = segments if window is None else cut_pieces(segments, longest=window)
    gather, buckets = _fill_buckets(pieces)
    is_token = gather < segments.num_tokens
    scatter = np.empty(segments.num_tokens, np.int64)
    scatter[gather[is_token]] = np.flatnonzero(is_token)
    blocks = (
        _block(start, end, subtree_end, positions=positions, window=window, device=device)
        for start, end, subtree_end in zip(
            pieces.starts.tolist(), pieces.ends.tolist(), pieces.subtree_ends.tolist(), strict=True
        )
        if subtree_end > end
    )
    return AttentionPlan(
        gather=torch.from_numpy(gather).to(device),
        scatter=torch.from_numpy(scatter).to(device),
        buckets=tuple(buckets),
        blocks=tuple(block for block in blocks if block is not None),
    )


def cut_pieces(segments: Segments, *, longest: int) -> Segments:
    """Cut segments into chains of pieces of at most `longest` tokens.

    Example: lengths [5, 2] with parents [-1, 0] and longest 2 -> lengths [2, 2, 1, 2].
    """
    lengths = segments.lengths
    counts = -(-lengths // longest)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(int(counts.sum())) - first) * longest
    starts = np.repeat(segments.starts, counts) + offsets
    return Segments(
        starts=starts,
        ends=np.minimum(starts + longest, np.repeat(segments.ends, counts)),
        subtree_ends=np.repeat(segments.subtree_ends, counts),
        positions=np.repeat(segments.positions, counts) + offsets,
    )


def bucket_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group pieces by similar length, longest first; return their indices.

    A bucket takes every piece at least half as long as its longest, so the padded row is less
    than twice the packed one and there are at most log2(longest / shortest) + 1 buckets.

    Example: bucket_lengths([3, 10, 6, 2]) -> [[1, 2], [0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    buckets: list[list[int]] = []
    for index in order:
        if not buckets or 2 * lengths[index] < lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def _fill_buckets(pieces: Segments) -> tuple[Ints, list[Bucket]]:
    slots: list[Ints] = []
    buckets: list[Bucket] = []
    lengths = pieces.lengths
    for members in bucket_lengths(lengths.tolist()):
        longest = int(lengths[members[0]])
        offsets = np.arange(longest)
        rows = pieces.starts[members][:, None] + offsets
        is_padding = offsets >= lengths[members][:, None]
        slots.append(np.where(is_padding, pieces.num_tokens, rows).reshape(-1))
        buckets.append(Bucket(num_pieces=len(members), length=longest))
    return np.concatenate(slots), buckets


def _block(
    start: int,
    end: int,
    subtree_end: int,
    *,
    positions: Ints,
    window: int | None,
    device: torch.device,
) -> Block | None:
    """The block of one piece's keys; None where no query below is near enough."""
    keys = slice(start, end)
    if window is None:
        return Block(queries=slice(end, subtree_end), keys=keys, visible=None)
    below = positions[end:subtree_end]
    rows = np.flatnonzero(below - positions[end - 1] < window)
    if not rows.shape[0]:
        return None
    visible = below[rows][:, None] - positions[keys] < window
    first, last = end + int(rows[0]), end + int(rows[-1])
    is_contiguous = last - first + 1 == rows.shape[0]
    return Block(
        queries=slice(first, last + 1)
        if is_contiguous
        else torch.from_numpy(rows + end).to(device),
        keys=keys,
        visible=None if visible.all() else torch.from_numpy(visible).to(device),
    )
