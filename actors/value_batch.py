"""What the merge actor hands to a critic: packed rows with the targets of their states' values.

Apart from the policy's batch, because a critic takes part in no split into updates. Letters: [M]
trained tokens of a row; the state in which token m was sampled ends at loss_positions[m].
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.batch import Float32s, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """row: its loss weights sum to 1 over all rows of all ranks. old_values: [M] float32, as the
    critic scored them. value_targets: [M] float32, GAE's A + V.
    """

    row: MicroBatch
    old_values: Float32s
    value_targets: Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueShard:
    """One rank's rows for one update of the critic; every rank has equally many."""

    step: int
    rows: tuple[ValueRow, ...]
