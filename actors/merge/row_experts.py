"""The routing records of a packed row, out of those of its samples; pure.

A record is of a token that was processed (`actors.expert_records`), so it holds wherever that token
stands behind the same ones. Rule: of all records of one place of the row's prefix forest the first
in the order of the samples counts, for every sample that passes there. Flat rows follow the same
rule, so that sharing prefixes changes no number, and a token that is context in one sample is
replayed there as in the sample that it was sampled in. Called by `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertIndices, ExpertRecords
from actors.merge.prefix_tree import Int32s, PrefixForest, build_forest
from actors.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExperts:
    """records: positions in the row; None when no sample has any. num_overruled: records that
    differ, in whatever order their experts stand, from the one that counts at their place.
    """

    records: ExpertRecords | None
    num_overruled: int


def row_experts(samples: Sequence[Sample], forest: PrefixForest) -> RowExperts:
    """Place the samples' records in their row.

    Args: forest: the layout of the row, from `build_forest` or `build_flat` of the same samples.
    Raises: ValueError, naming a trajectory, for records of mixtures of different shapes.
    Example: ids [1, 2, 3] with a record a of 2, and [1, 2, 4] with records b of 2 and c of 4, in
    the forest [1, 2, 3, 4] -> positions [1, 3], indices [a, c], one overruled if b is not a.
    """
    recorded = [(index, s.experts) for index, s in enumerate(samples) if s.experts is not None]
    if not recorded:
        return RowExperts(records=None, num_overruled=0)
    _check_shapes(samples)
    nodes = _nodes(samples, forest)
    indices = np.concatenate([experts.indices for _, experts in recorded])
    known, first, of_known = np.unique(
        np.concatenate([nodes[index][experts.positions] for index, experts in recorded]),
        return_index=True,
        return_inverse=True,
    )
    all_nodes, all_places = np.concatenate(nodes), np.concatenate(forest.paths)
    found = np.minimum(np.searchsorted(known, all_nodes), known.shape[0] - 1)
    has_record = known[found] == all_nodes
    positions, at = np.unique(all_places[has_record], return_index=True)
    return RowExperts(
        records=ExpertRecords(
            positions=positions.astype(np.int32), indices=indices[first[found[has_record][at]]]
        ),
        num_overruled=_num_different(indices, first[of_known]),
    )


def _nodes(samples: Sequence[Sample], forest: PrefixForest) -> tuple[Int32s, ...]:
    """For each sample [T]: a number for each token that is the same behind the same tokens."""
    has_shared = forest.token_ids.shape[0] < sum(sample.num_tokens for sample in samples)
    return (forest if has_shared else build_forest([s.token_ids for s in samples])).paths


def _num_different(indices: ExpertIndices, counting: NDArray[np.int64]) -> int:
    """counting: [N], for each record the number of the one that counts at its place."""
    others = np.flatnonzero(counting != np.arange(counting.shape[0]))
    left, right = np.sort(indices[others], -1), np.sort(indices[counting[others]], -1)
    return int(np.count_nonzero((left != right).any(axis=(1, 2))))


def _check_shapes(samples: Sequence[Sample]) -> None:
    shape: tuple[int, ...] | None = None
    for sample in samples:
        if sample.experts is None:
            continue
        own = sample.experts.indices.shape[1:]
        if shape is not None and own != shape:
            raise ValueError(
                f"packing: trajectory {sample.trajectory_id} has expert records for {own} layers "
                f"and experts, others of its row for {shape}; record every turn with one model"
            )
        shape = own
