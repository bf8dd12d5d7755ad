"""The layout of a packed row: which of its tokens attend to which.

A row is a forest of segments in preorder (`actors.batch.MicroBatch`); a row without shared prefixes
is the forest whose segments are all roots. A token attends to the tokens before it on its path.
Because of the preorder that is one comparison: query q sees key k when k <= q < subtree_end[k].
Invariant: a layout is checked when it is built, and holds for all layers of the row's forward and
backward. Pure; called by `row` and `model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Counts = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """[S] int64 each, in rows of the packed row but for `positions`.

    starts, ends: a segment's tokens are starts to ends - 1. subtree_ends: its descendants' tokens
    are ends to subtree_ends - 1. positions: of its first token on its path.
    """

    starts: Ints
    ends: Ints
    subtree_ends: Ints
    positions: Ints

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def lengths(self) -> Ints:
        return self.ends - self.starts

    def token_positions(self) -> Ints:
        """[T], each token's number on its path from the root, from 0."""
        offsets = np.repeat(self.positions - self.starts, self.lengths)
        return np.arange(self.num_tokens, dtype=np.int64) + offsets

    def token_subtree_ends(self) -> Ints:
        """[T], the subtree end of each token's segment."""
        return np.repeat(self.subtree_ends, self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What the attention of every layer is told of the row.

    plans: what the device's attention made of it, by sliding window; filled as layers ask.
    """

    segments: Segments
    device: torch.device
    plans: dict[int | None, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens


def trace_segments(lengths: Counts, parents: Counts) -> Segments:
    """Find where each segment and its subtree stand.

    Args: lengths: [S] tokens, in the order of the row. parents: [S], -1 for a root.
    Raises: ValueError for an empty row, a segment without tokens, or segments out of preorder.
    Example: lengths [2, 1, 2], parents [-1, 0, 0] -> starts [0, 2, 3], ends [2, 3, 5],
    subtree_ends [5, 3, 5], positions [0, 2, 2].
    """
    sizes, above = np.asarray(lengths, np.int64), np.asarray(parents, np.int64)
    if not sizes.shape[0] or sizes.min() < 1 or sizes.shape != above.shape:
        raise ValueError(
            f"packed attention: got segment lengths {sizes[:8].tolist()} with {above.shape[0]} "
            "parents, expected at least one segment of at least one token and a parent for each; "
            "drop empty samples before packing"
        )
    ends = np.cumsum(sizes)
    positions, subtree_ends = np.zeros_like(ends), ends.copy()
    path: list[int] = []
    for segment, parent in enumerate(above.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise ValueError(
                f"packed attention: segment {segment} has parent {parent}, expected -1, the "
                "segment before it or an ancestor of that one; put the segments in preorder"
            )
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

    Args: as `trace_segments`; without parents all segments are roots.
    Raises: ValueError, as `trace_segments`.
    """
    parents = [-1] * len(segment_lengths) if segment_parents is None else segment_parents
    return PackedLayout(
        segments=trace_segments(segment_lengths, parents), device=torch.device(device)
    )
