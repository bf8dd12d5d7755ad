"""The critic's batch: the samples that the policy trains on, with targets for their values; pure.

Called by `step`, with the baseline `critic` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.batch import Float32s
from actors.merge.packing import WeightedSample, filler, pack_row
from actors.merge.rows import deal_rows
from actors.types import Sample
from actors.value_batch import ValueRow, ValueShard


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedSample:
    """old_values, value_targets: [N] float, of the sample's trained tokens in order.

    Raises: ValueError when there are not N of each.
    """

    sample: Sample
    old_values: Float32s
    value_targets: Float32s

    def __post_init__(self) -> None:
        shapes = (self.old_values.shape, self.value_targets.shape)
        if set(shapes) != {(self.sample.num_trained,)}:
            raise ValueError(
                f"critic: trajectory {self.sample.trajectory_id} has values and targets of shapes "
                f"{shapes} for {self.sample.num_trained} trained tokens, expected one of each"
            )


def pack_values(
    valued: Sequence[ValuedSample], *, step: int, num_ranks: int, budget: int
) -> tuple[ValueShard, ...]:
    """Pack one update of the critic; each trained token weighs 1 over the tokens of all ranks.

    Returns: a shard for each rank.
    """
    weight = 1 / max(1, sum(each.sample.num_trained for each in valued))
    dealt = deal_rows(
        [each.sample.num_tokens for each in valued], num_ranks=num_ranks, budget=budget
    )
    return tuple(
        ValueShard(
            step=step,
            rows=tuple(_row([valued[index] for index in row], weight=weight) for row in rows),
        )
        for rows in dealt
    )


def _row(valued: Sequence[ValuedSample], *, weight: float) -> ValueRow:
    none = np.empty(0, np.float32)
    samples = [
        # A critic routes by itself.
        WeightedSample(sample=each.sample.without_experts(), advantage=0.0, loss_weight=weight)
        for each in valued
    ]
    row = pack_row(samples) if samples else filler()
    return ValueRow(
        row=row,
        old_values=np.concatenate([none, *(v.old_values for v in valued)], dtype=np.float32),
        value_targets=np.concatenate([none, *(v.value_targets for v in valued)], dtype=np.float32),
    )
