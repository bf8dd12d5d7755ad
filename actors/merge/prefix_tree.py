"""A forest of shared prefixes: the samples of a row, every distinct prefix of them once.

Letters: [B] samples, [L_b] tokens of sample b, [T] tokens of the forest, [S] segments. A segment is
a run of tokens without a branch; a sample is a path from a root. Invariants: a token stands for one
distinct prefix, so T is their number; children of one segment (and the roots) begin with different
tokens; segments stand in preorder, so that a segment's descendants follow it without a gap. Cost:
one sort of the samples, then each token is looked at once. Called by `packing` and `placing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.types import TokenIds

Int32s = NDArray[np.int32]

# Token ids are not negative, so no id's bytes are greater: a sample sorts behind its extensions.
_BEHIND_ALL_IDS = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """token_ids, position_ids: [T] int32; a position counts from the start of the path.

    segment_lengths: [S] int32, at least 1, sums to T. segment_parents: [S] int32, -1 for a root.
    paths: for each sample, in the order given, [L_b] int32: where in the forest its tokens stand.
    """

    token_ids: Int32s
    position_ids: Int32s
    segment_lengths: Int32s
    segment_parents: Int32s
    paths: tuple[Int32s, ...]


def prefix_order(samples: Sequence[TokenIds]) -> list[int]:
    """Sort samples by their ids, a sample behind all that extend it: what is shared is adjacent.

    Example: [[1, 2], [0], [1, 2, 3]] -> [1, 2, 0]
    """
    keys = [ids.astype(">u4").tobytes() + _BEHIND_ALL_IDS for ids in samples]
    return sorted(range(len(samples)), key=keys.__getitem__)


def common_length(left: TokenIds, right: TokenIds) -> int:
    """Count the leading tokens that two samples share."""
    length = min(left.shape[0], right.shape[0])
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def build_forest(samples: Sequence[TokenIds]) -> PrefixForest:
    """Share every common prefix of the samples.

    In prefix order a sample adds to the forest what lies behind its common length with the one
    before, and branches off that one's path there.

    Args: samples: [L_b] int32 each, not empty, ids at least 0.
    Raises: ValueError for no sample, or an empty one.
    Example: [1, 2, 3], [1, 2, 4, 5] and [1, 2] -> token_ids [1, 2, 3, 4, 5], position_ids
    [0, 1, 2, 2, 3], segment_lengths [2, 1, 2], segment_parents [-1, 0, 0], paths [0, 1, 2],
    [0, 1, 3, 4] and [0, 1].
    """
    _check_samples(samples)
    paths: list[Int32s] = [np.empty(0, np.int32)] * len(samples)
    starts: list[int] = []
    token_parts, position_parts = [], []
    # before[start]: where the token before a segment's first stands, -1 before a root.
    before: dict[int, int] = {}
    previous, path, num_tokens = np.empty(0, np.int32), np.empty(0, np.int32), 0
    for index in prefix_order(samples):
        ids = samples[index]
        shared, length = common_length(previous, ids), ids.shape[0]
        if shared < length:
            if shared:
                cut = int(path[shared])
                starts.append(cut)
                before.setdefault(cut, int(path[shared - 1]))
            starts.append(num_tokens)
            before[num_tokens] = int(path[shared - 1]) if shared else -1
            token_parts.append(ids[shared:])
            position_parts.append(np.arange(shared, length, dtype=np.int32))
        added = np.arange(num_tokens, num_tokens + length - shared, dtype=np.int32)
        path, previous = np.concatenate([path[:shared], added]), ids
        paths[index] = path
        num_tokens += length - shared
    bounds = np.array(sorted(set(starts)), np.int32)
    last_of_parent = np.array([before[int(start)] for start in bounds], np.int32)
    return PrefixForest(
        token_ids=np.concatenate(token_parts, dtype=np.int32),
        position_ids=np.concatenate(position_parts),
        segment_lengths=np.diff(bounds, append=np.int32(num_tokens)),
        segment_parents=(np.searchsorted(bounds, last_of_parent, "right") - 1).astype(np.int32),
        paths=tuple(paths),
    )


def build_flat(samples: Sequence[TokenIds]) -> PrefixForest:
    """Share nothing: every sample is a root of its own, in the order given.

    Raises: ValueError for no sample, or an empty one.
    """
    _check_samples(samples)
    lengths = np.array([ids.shape[0] for ids in samples], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    positions = np.arange(lengths.sum(), dtype=np.int32)
    return PrefixForest(
        token_ids=np.concatenate(list(samples), dtype=np.int32),
        position_ids=positions - np.repeat(starts, lengths),
        segment_lengths=lengths,
        segment_parents=np.full(len(samples), -1, np.int32),
        paths=tuple(np.split(positions, starts[1:])),
    )


def _check_samples(samples: Sequence[TokenIds]) -> None:
    empty = [number for number, ids in enumerate(samples) if not ids.shape[0]]
    if empty or not samples:
        what = f"an empty sample at {empty[0]}" if empty else "no samples"
        raise ValueError(f"prefix tree: got {what}, expected tokens; leave it out of the row")
