"""The layout of a packed row (which tokens attend to which), and the CPU's plan to compute it.

A row is a forest of segments in preorder (`actors.batch.MicroBatch`); without shared prefixes all
segments are roots. A token attends to itself and to the tokens before it on its path from the root.
In preorder, the tokens of a subtree are adjacent. So query q sees key k if k <= q < subtree_end[k],
where subtree_end[k] is the end of the subtree of k's segment.

The plan computes each pair of query and key once, and copies no key. First, each segment attends
causally to itself, in buckets of similar length. Then, in one block for each segment, the segment's
descendants (a contiguous range of queries) attend to the segment's keys. With a sliding window,
segments are first cut into pieces no longer than the window. The block of a piece then has only the
queries whose window still reaches the last key of the piece. Layout and plan hold for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Counts = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The bounds of a row's segments; each field is [S] int64."""

    starts: Ints
    """The row position of each segment's first token."""
    ends: Ints
    """One more than the row position of each segment's last token."""
    subtree_ends: Ints
    """One more than the row position of the last token of each segment and its descendants."""
    positions: Ints
    """The position of each segment's first token on its path from the root."""

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def lengths(self) -> Ints:
        return self.ends - self.starts

    def token_positions(self) -> Ints:
        """Return the position of each token on its path from the root, [T], from 0."""
        offsets = np.repeat(self.positions - self.starts, self.lengths)
        return np.arange(self.num_tokens, dtype=np.int64) + offsets

    def token_subtree_ends(self) -> Ints:
        """Return `subtree_ends` of each token's segment, one number for each token: [T]."""
        return np.repeat(self.subtree_ends, self.lengths)


class PackedLayout:
    """The layout of a row, which the attention of every layer needs.

    plans: the attention plans of the row, by sliding window; each is made when it is first needed.
    This class is not a dataclass, because FSDP2 copies the dataclasses among a layer's inputs, and
    every layer would then make its own plan.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self.plans: dict[int | None, Any] = {}

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens


def trace_segments(lengths: Counts, parents: Counts) -> Segments:
    """Find the bounds of each segment and of its subtree.

    Args: lengths: [S] tokens, at least one each, in preorder. parents: [S], -1 for a root.
    Example: lengths [2, 1, 2], parents [-1, 0, 0] -> starts [0, 2, 3], ends [2, 3, 5],
    subtree_ends [5, 3, 5], positions [0, 2, 2].
    """
    sizes, above = np.asarray(lengths, np.int64), np.asarray(parents, np.int64)
    assert sizes.shape[0] and sizes.min() >= 1 and sizes.shape == above.shape
    ends = np.cumsum(sizes)
    positions, subtree_ends = np.zeros_like(ends), ends.copy()
    path: list[int] = []
    for segment, parent in enumerate(above.tolist()):
        while path and path[-1] != parent:
            path.pop()
        assert parent == -1 or path, "segments are not in preorder"
        if parent != -1:
            positions[segment] = positions[parent] + sizes[parent]
        path.append(segment)
    for segment in range(len(ends) - 1, -1, -1):
        parent = above[segment]
        if parent != -1:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[segment])
    return Segments(starts=ends - sizes, ends=ends, subtree_ends=subtree_ends, positions=positions)


def build_layout(
    segment_lengths: Counts,
    segment_parents: Counts | None = None,
    *,
    device: torch.device | str,
) -> PackedLayout:
    """Lay out one packed row.

    Args: segment_lengths, segment_parents: [S], as for `trace_segments`; without parents all
    segments are roots.
    """
    parents = [-1] * len(segment_lengths) if segment_parents is None else segment_parents
    return PackedLayout(trace_segments(segment_lengths, parents), torch.device(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the attention: the keys of one piece, and the later queries that see these keys.

    A piece is a segment or a part of one; the queries are in the piece's descendants.
    """

    queries: slice | Tensor
    """[Q] row positions, all different; a slice if they are contiguous."""
    keys: slice
    """[K] row positions."""
    visible: Tensor | None
    """[Q, K] bool, whether a query sees a key, true at least once in each row; None if every query
    sees every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The parts in which the attention of one row is computed, for one sliding window.

    Each piece's attention to itself is computed in buckets: pieces of similar length, padded to the
    same length. A slot is one token's place in a bucket, or padding. The attention to the keys of
    ancestors is computed in blocks.
    """

    gather: Tensor
    """[slots] int64, the token in each slot, bucket after bucket; T in a slot of padding."""
    scatter: Tensor
    """[T] int64, the slot of each token: gather[scatter[t]] == t."""
    buckets: tuple[torch.Size, ...]
    """The shape [pieces, length] to which pieces of similar length are padded together."""
    blocks: tuple[Block, ...]


def plan_for(layout: PackedLayout, *, window: int | None) -> AttentionPlan:
    """Return the layout's plan for one sliding window; all layers of the row share it."""
    if window not in layout.plans:
        layout.plans[window] = build_plan(layout.segments, window=window, device=layout.device)
    plan: AttentionPlan = layout.plans[window]
    return plan


def build_plan(segments: Segments, *, window: int | None, device: torch.device) -> AttentionPlan:
    """Return the plan of one row.

    window: number of keys that a query sees, including itself; None for all.
    """
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

    The pieces of a bucket are at least half as long as its longest piece. So the padded row is less
    than twice as long as the packed row, and there are at most log2(longest / shortest) + 1
    buckets.

    Example: bucket_lengths([3, 10, 6, 2]) -> [[1, 2], [0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    buckets: list[list[int]] = []
    for index in order:
        if not buckets or 2 * lengths[index] < lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def _fill_buckets(pieces: Segments) -> tuple[Ints, list[torch.Size]]:
    slots: list[Ints] = []
    buckets: list[torch.Size] = []
    lengths = pieces.lengths
    for members in bucket_lengths(lengths.tolist()):
        longest = int(lengths[members[0]])
        offsets = np.arange(longest)
        rows = pieces.starts[members][:, None] + offsets
        is_padding = offsets >= lengths[members][:, None]
        slots.append(np.where(is_padding, pieces.num_tokens, rows).reshape(-1))
        buckets.append(torch.Size((len(members), longest)))
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
    """Return the block in which a piece's descendants attend to the piece; None if none sees it.

    The piece has the tokens [start, end), and the descendants have the tokens [end, subtree_end).
    """
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
