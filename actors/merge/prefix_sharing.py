"""Lay out a row's samples as a forest of prefixes, with the row's expert records and its cost.

A segment is a run of tokens without a branch; a sample is a path from a root. Invariants: each
token of the forest represents a different prefix. The children of one segment, and the roots, begin
with different tokens. Segments are in preorder, so a segment's descendants follow it without a gap.
Letters: [B] samples, [L_b] tokens of sample b, [T] of the forest, [S] segments, [N] trajectories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actors.batch import Float64s, Int32s, Int64s
from actors.branches import common_prefix
from actors.expert_records import ExpertIndices, ExpertRecords
from actors.types import Sample, TokenIds

# Token ids are not negative, so these bytes are greater than those of any id. A sample that ends
# with them sorts after its extensions.
_BEHIND_ALL_IDS = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """The layout of one row, in which samples share the tokens of their common prefixes."""

    token_ids: Int32s
    """[T] int32, the tokens of the forest."""
    position_ids: Int32s
    """[T] int32, the position of each token on its path, from the root."""
    segment_lengths: Int32s
    """[S] int32, the number of tokens of each segment, at least 1; the sum is T."""
    segment_parents: Int32s
    """[S] int32, the index of each segment's parent; -1 for a root."""
    paths: tuple[Int32s, ...]
    """For each sample, in the order given, [L_b] int32: the positions of its tokens in the
    forest.
    """


def prefix_order(samples: Sequence[TokenIds]) -> list[int]:
    """Sort samples by their ids, so that samples with a common prefix are adjacent.

    A sample comes after all samples that extend it.
    Example: [[1, 2], [0], [1, 2, 3]] -> [1, 2, 0]
    """
    keys = [ids.astype(">u4").tobytes() + _BEHIND_ALL_IDS for ids in samples]
    return sorted(range(len(samples)), key=keys.__getitem__)


def build_forest(samples: Sequence[TokenIds]) -> PrefixForest:
    """Return a forest in which every common prefix of the samples is stored once.

    The samples are added in prefix order. Each sample adds only the tokens after its common prefix
    with the previous sample; they branch off the previous sample's path where this prefix ends.

    Args: samples: [L_b] int32 each, B >= 1, not empty, ids at least 0.
    Example: [1, 2, 3], [1, 2, 4, 5] and [1, 2] -> token_ids [1, 2, 3, 4, 5], position_ids [0, 1, 2,
        2, 3], segment_lengths [2, 1, 2], segment_parents [-1, 0, 0], paths [0, 1, 2], [0, 1, 3, 4]
        and [0, 1].
    """
    paths: list[Int32s] = [np.empty(0, np.int32)] * len(samples)
    starts: list[int] = []
    token_parts, position_parts = [], []
    # before[start]: position of the token before a segment's first token, -1 before a root.
    before: dict[int, int] = {}
    previous, path, num_tokens = np.empty(0, np.int32), np.empty(0, np.int32), 0
    for index in prefix_order(samples):
        ids = samples[index]
        shared, length = common_prefix(previous, ids), ids.shape[0]
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
    """Lay out every sample as a separate root, in the order given. Args: as `build_forest`."""
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


def row_experts(
    samples: Sequence[Sample], forest: PrefixForest
) -> tuple[ExpertRecords | None, int]:
    """Choose the expert record of each token of a row, from the records of the row's samples.

    Samples that begin with the same tokens get the same records for these tokens. The record of a
    token comes from the first of these samples that recorded the token. This holds for rows without
    shared prefixes too, so that training does not depend on whether prefixes are shared.

    Args: forest: from `build_forest` or `build_flat` of the same samples.
    Returns: the row's records, None if no sample has any; and the number of records that were not
        chosen and have other experts than the chosen record of their token.
    Example: sample [1, 2, 3] has record a for token 2. Sample [1, 2, 4] has record b for token 2
        and record c for token 4. In the forest [1, 2, 3, 4], the row's records are a at
        position 1 and c at position 3. The number is 1 if b differs from a, otherwise 0.
    """
    recorded = [(index, s.experts) for index, s in enumerate(samples) if s.experts is not None]
    if not recorded:
        return None, 0
    # For each sample [L_b]: numbers that are equal for two tokens if the tokens, and all tokens
    # before them, are equal.
    is_flat = forest.token_ids.shape[0] == sum(sample.num_tokens for sample in samples)
    nodes = (build_forest([s.token_ids for s in samples]) if is_flat else forest).paths
    indices = np.concatenate([experts.indices for _, experts in recorded])
    known, first, of_known = np.unique(
        np.concatenate([nodes[index][experts.positions] for index, experts in recorded]),
        return_index=True,
        return_inverse=True,
    )
    all_nodes, all_positions = np.concatenate(nodes), np.concatenate(forest.paths)
    found = np.minimum(np.searchsorted(known, all_nodes), known.shape[0] - 1)
    has_record = known[found] == all_nodes
    positions, at = np.unique(all_positions[has_record], return_index=True)
    records = ExpertRecords(
        positions=positions.astype(np.int32), indices=indices[first[found[has_record][at]]]
    )
    return records, _num_different(indices, first[of_known])


def _num_different(indices: ExpertIndices, counting: Int64s) -> int:
    """Count the records that were replaced by a record with other experts.

    counting: [R], the index of the record that replaces each record; its own index if it was kept.
    Example: [0, 1, 0] means that record 0 replaced record 2.
    """
    others = np.flatnonzero(counting != np.arange(counting.shape[0]))
    left, right = np.sort(indices[others], -1), np.sort(indices[counting[others]], -1)
    return int(np.count_nonzero((left != right).any(axis=(1, 2))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The space that samples take in a row."""

    num_tokens: int
    """Number of tokens after sharing prefixes."""
    cost: float
    """Time to compute the samples, in units of the time for one token without attention."""


def measure(samples: Sequence[TokenIds], *, attention_tokens: int, share_prefixes: bool) -> Size:
    """Measure the space that samples take in one row.

    Cost of a sample of L tokens of which the first K are shared: (L - K) + (L^2 - K^2) /
    attention_tokens, that is, the linear layers plus attention to all earlier tokens.

    Example: [1, 2, 3] and [1, 2, 4, 5] with attention_tokens 10: 5 tokens, cost 3 + .9 + 2 + 1.2 =
    7.1; without sharing 7 tokens, cost 3 + .9 + 4 + 1.6 = 9.5.
    """
    num_tokens, squares = 0, 0
    previous: TokenIds = np.empty(0, np.int32)
    for index in prefix_order(samples) if share_prefixes else range(len(samples)):
        ids = samples[index]
        shared = common_prefix(previous, ids) if share_prefixes else 0
        num_tokens += ids.shape[0] - shared
        squares += ids.shape[0] ** 2 - shared**2
        previous = ids
    return Size(num_tokens=num_tokens, cost=num_tokens + squares / attention_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedItems:
    """Trajectories, or bundles of neighbouring trajectories, in prefix order; arrays are [N].

    The tokens are not stored. The lengths of the prefixes that neighbours share are enough to
    compute how many tokens any two items share (`between`), and so the size of any row (`added`).
    """

    order: list[int]
    """[N], the index of each trajectory (or bundle) in the caller's order."""
    num_tokens: Int64s
    """Number of tokens of each item if it is alone in a row."""
    cost: Float64s
    """Cost of each item if it is alone in a row, in the unit of `Size.cost`."""
    shared: Int64s
    """Number of leading tokens that each item shares with the item before it; 0 for the first."""
    inner: Int64s
    """Length of the shortest prefix that two neighbouring trajectories inside the item share; the
    largest int64 for an item of one trajectory.
    """
    attention_tokens: int
    """Sample length at which attention costs as much as all other computation."""

    def cost_of(self, shared: Int64s) -> Float64s:
        """Return the cost (`Size.cost`) that is saved if `shared` leading tokens are shared."""
        return shared + shared.astype(np.float64) ** 2 / self.attention_tokens

    def shared_with(self, number: int) -> Int64s:
        """Return the number of leading tokens that each item shares with item `number`, [N]."""
        shared = np.empty_like(self.shared)
        ahead = self.shared[number + 1 :].copy()
        np.minimum(ahead[1:], self.inner[number + 1 : -1], out=ahead[1:])
        shared[number + 1 :] = np.minimum.accumulate(ahead)
        behind = self.shared[1 : number + 1][::-1].copy()
        np.minimum(behind[1:], self.inner[1:number][::-1], out=behind[1:])
        shared[:number] = np.minimum.accumulate(behind)[::-1]
        shared[number] = self.num_tokens[number]
        return shared

    def between(self, left: int, right: int) -> int:
        """Return the number of leading tokens that item `left` and a later item `right` share."""
        # In a sorted list, it is the shortest prefix that two neighbours from left to right share.
        shared = int(self.shared[left + 1 : right + 1].min())
        return min(shared, int(self.inner[left + 1 : right].min(initial=shared)))

    def added(self, others: Sequence[int], one: int) -> Size:
        """Return the size that item `one` adds to a row of the items `others` (ascending)."""
        index = bisect_left(others, one)
        before, after = others[index - 1 : index], others[index : index + 1]
        shared = [self.between(other, one) for other in before]
        shared += [self.between(one, other) for other in after]
        bridged = [self.between(before[0], after[0])] if before and after else []
        saved = self.cost_of(np.array(shared, np.int64)).sum()
        unsaved = self.cost_of(np.array(bridged, np.int64)).sum()
        return Size(
            num_tokens=int(self.num_tokens[one]) - sum(shared) + sum(bridged),
            cost=float(self.cost[one] - saved + unsaved),
        )


def sort_trajectories(
    trajectories: Sequence[Sequence[TokenIds]], *, attention_tokens: int, share_prefixes: bool
) -> SortedItems:
    """Sort trajectories by the tokens of their first samples, and measure each trajectory.

    Trajectories with a long common prefix become neighbours. Neighbours are compared by their first
    samples only, although later samples may share tokens too. So the sizes are upper bounds: a row
    may be smaller than they predict.
    """
    order = prefix_order([samples[0] for samples in trajectories])
    firsts = [trajectories[index][0] for index in order]
    shared = [common_prefix(*pair) if share_prefixes else 0 for pair in pairwise(firsts)]
    sizes = [
        measure(
            trajectories[index], attention_tokens=attention_tokens, share_prefixes=share_prefixes
        )
        for index in order
    ]
    return SortedItems(
        order=order,
        num_tokens=np.array([size.num_tokens for size in sizes], np.int64),
        cost=np.array([size.cost for size in sizes], np.float64),
        shared=np.array([0, *shared], np.int64),
        inner=np.full(len(order), np.iinfo(np.int64).max),
        attention_tokens=attention_tokens,
    )


def cut_items(items: SortedItems, *, max_tokens: int, max_cost: float) -> list[int]:
    """Cut the items into parts of at most max_tokens tokens and max_cost cost.

    First cut between all neighbours that share no prefix. Then repeatedly cut each part that is too
    large, between the two neighbours with the shortest common prefix. Of several such cuts, take
    the one nearest to the part's middle. A part of one item may exceed the limits.
    Returns: the bounds of the parts, from 0 to N.
    """
    bounds = [*np.flatnonzero(items.shared == 0).tolist(), len(items.order)]
    pending = list(pairwise(bounds))
    saved = items.cost_of(items.shared)
    while pending:
        start, stop = pending.pop()
        inner = items.shared[start + 1 : stop]
        num_tokens = items.num_tokens[start:stop].sum() - inner.sum()
        cost = items.cost[start:stop].sum() - saved[start + 1 : stop].sum()
        if stop - start == 1 or (num_tokens <= max_tokens and cost <= max_cost):
            continue
        cuts = np.flatnonzero(inner == inner.min()) + start + 1
        middle = int(cuts[np.abs(2 * cuts - start - stop).argmin()])
        bounds.append(middle)
        pending += [(start, middle), (middle, stop)]
    return sorted(bounds)


def bundle_items(items: SortedItems, bounds: Sequence[int]) -> SortedItems:
    """Combine the trajectories from each bound to the next into a bundle.

    Returns: the bundles, in the order of the items; their field `order` is 0, 1, ….
    """
    starts = np.array(bounds[:-1])
    inside = items.shared.copy()
    inside[starts] = 0
    least = inside.copy()
    least[starts] = np.iinfo(np.int64).max
    return SortedItems(
        order=list(range(len(starts))),
        num_tokens=np.add.reduceat(items.num_tokens - inside, starts),
        cost=np.add.reduceat(items.cost - items.cost_of(inside), starts),
        shared=items.shared[starts],
        inner=np.minimum.reduceat(least, starts),
        attention_tokens=items.attention_tokens,
    )
