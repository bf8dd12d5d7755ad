"""What the merge actor hands to the trainer: packed rows, ready for one forward each.

Letters: [T] packed tokens of a row, [S] segments of the row, [M] trained tokens of the row. A row
is a forest: a segment attends to itself and to its ancestors, backwards; one without shared
prefixes is all roots. Invariants: segment_lengths sums to T; segments stand in preorder, a parent
before its children and a subtree without a gap; position_ids count along each path from a root;
the target of loss position p is the token behind p in its segment, or the first token of a child
where p is the last of its segment; all samples of a trajectory are in one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertRecords

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row.

    token_ids, position_ids: [T] int32. segment_lengths: [S] int32, at least 1.
    segment_parents: [S] int32, -1 for a root.
    loss_positions: [M] int32, where in the row the logits predict a trained token. A position that
    several samples share may appear several times, with different targets.
    targets: [M] int32, the trained tokens. behaviour_logprobs: [M] float32, nats, of the sampler.
    advantages: [M] float32. sampled_versions: [M] int32, the policy version of each token.
    loss_weights: [M] float32, >= 0, each token's share of the update; they make the aggregation.
    trajectory_index: [M] int32, numbers the row's trajectories 0, 1, 2, ..., equal for the tokens
    of all samples of a trajectory.
    experts: the recorded routing of the row's tokens, each record at the place of the token whose
    forward pass it is of; None when there is none. A place that several samples share stands in it
    once, with the record of the first sample in order that has one. num_overruled_records: the
    samples' records that differ from the one that counts.
    A row with M = 0 is a filler: it keeps the ranks' collectives aligned and trains nothing.
    """

    token_ids: Int32s
    position_ids: Int32s
    segment_lengths: Int32s
    segment_parents: Int32s
    loss_positions: Int32s
    targets: Int32s
    behaviour_logprobs: Float32s
    advantages: Float32s
    sampled_versions: Int32s
    loss_weights: Float32s
    trajectory_index: Int32s
    experts: ExpertRecords | None = None
    num_overruled_records: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trained(self) -> int:
        return int(self.targets.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The micro-batches of one rank for one optimiser update.

    The update's loss is the sum of loss weight times loss over the tokens of all ranks and
    micro-batches. Every rank has equally many micro-batches.
    """

    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """One rank's share of a training step: its optimiser updates in order.

    trainer_version: the policy version that the trainer holds when the step starts.
    """

    step: int
    trainer_version: int
    minibatches: tuple[Minibatch, ...]
