"""The values that merge actor and trainer exchange: packed rows, their scores, a critic's rows.

A row packs several samples, and stores a prefix that they share once. So the row is a forest of
segments, and a token attends to the earlier tokens of its segment and of the segment's ancestors.
In shapes, T is the number of a row's tokens, S of its segments, and M of its trained tokens. At a
loss position, the row predicts a trained token, the target: the next token of the segment or, at
the segment's end, the first token of a child.

Invariants: segment_lengths sums to T. Segments are in preorder: a parent precedes its children, and
the segments of a subtree are adjacent. position_ids count along each path from a root. All samples
of a trajectory are in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertRecords

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row.

    A row with M = 0 is padding: it keeps the ranks' collectives aligned and trains nothing.
    """

    token_ids: Int32s
    """[T] int32, the packed tokens."""
    position_ids: Int32s
    """[T] int32, the position of each token on its path, from the root."""
    segment_lengths: Int32s
    """[S] int32, the number of tokens of each segment, at least 1."""
    segment_parents: Int32s
    """[S] int32, the index of each segment's parent; -1 for a root."""
    loss_positions: Int32s
    """[M] int32, positions in the row whose logits predict a trained token. A position that several
    samples share may appear several times, with different targets.
    """
    targets: Int32s
    """[M] int32, the trained tokens."""
    behaviour_logprobs: Float32s
    """[M] float32, nats, of the policy that sampled the tokens."""
    advantages: Float32s
    """[M] float32, the advantage of each trained token."""
    sampled_versions: Int32s
    """[M] int32, the policy version of each token."""
    loss_weights: Float32s
    """[M] float32, >= 0, the weight of each token in the update's loss, computed from the
    aggregation.
    """
    trajectory_index: Int32s
    """[M] int32, the number of each token's trajectory in the row (0, 1, 2, ...); all samples of a
    trajectory have the same number."""
    temperatures: Float32s
    """[M] float32, > 0, the temperature at which each token was sampled."""
    experts: ExpertRecords | None = None
    """The recorded routing, each record at the position of the token whose forward pass it
    describes; None if no routing was recorded. A position that several samples share has the record
    of the first of these samples that recorded its routing there.
    """
    num_overruled_records: int = 0
    """Number of the samples' expert records that differ from the record that the row has at the
    same position.
    """

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trained(self) -> int:
        return int(self.targets.shape[0])


def untrained_row(
    segments: Sequence[Int32s],
    parents: Sequence[int],
    *,
    loss_positions: NDArray[np.integer],
    targets: Int32s,
    temperatures: NDArray[np.floating],
) -> MicroBatch:
    """Return a row whose targets are scored and not trained: their weights and advantages are 0.

    Args: segments: the tokens of each segment. parents: as `MicroBatch.segment_parents`; each
    parent must be a root. loss_positions, targets, temperatures: as the fields of `MicroBatch`.
    """
    begins = [0 if parent < 0 else segments[parent].size for parent in parents]
    positions = [begin + np.arange(each.size) for begin, each in zip(begins, segments, strict=True)]
    zeros: Float32s = np.zeros(targets.size, np.float32)
    return MicroBatch(
        token_ids=np.concatenate(segments).astype(np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        segment_lengths=np.array([each.size for each in segments], np.int32),
        segment_parents=np.array(parents, np.int32),
        loss_positions=loss_positions.astype(np.int32),
        targets=targets.astype(np.int32),
        behaviour_logprobs=zeros,
        advantages=zeros,
        sampled_versions=np.zeros(targets.size, np.int32),
        loss_weights=zeros,
        trajectory_index=np.zeros(targets.size, np.int32),
        temperatures=temperatures.astype(np.float32),
    )


def scoring_row(token_ids: Int32s) -> MicroBatch:
    """Return a row of one sample, in which every token but the first is scored, at temperature 1.

    Args: token_ids: [T] int32, T at least 1.
    Returns: a row with M = T - 1.
    """
    num_scored = token_ids.size - 1
    return untrained_row(
        [token_ids],
        [-1],
        loss_positions=np.arange(num_scored),
        targets=token_ids[1:],
        temperatures=np.ones(num_scored),
    )


def padding_row() -> MicroBatch:
    """Return a row of one token that predicts nothing."""
    return scoring_row(np.zeros(1, np.int32))


Minibatch = tuple[MicroBatch, ...]
"""The micro-batches of one rank for one optimiser update.

The update's loss is the sum of loss weight times loss over the tokens of all ranks and
micro-batches. Every rank has the same number of micro-batches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """A row on which the critic is trained, with the old and the target value of each state.

    The state of a trained token is the token's context: all tokens before it in its sample. The
    last token of the m-th state is at row.loss_positions[m].
    """

    row: MicroBatch
    """The packed row; loss weights sum to 1 over all rows of all ranks."""
    old_values: Float32s
    """[M] float32, the critic's value, before the update, of the state in which each token was
    sampled.
    """
    value_targets: Float32s
    """[M] float32, the value that the critic learns for each of these states: GAE's advantage plus
    the old value.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """One rank's share of a training step: its rows for each optimiser update, in order."""

    step: int
    """The step's number, counted from 1."""
    trainer_version: int
    """The policy version that the trainer holds when the step starts."""
    republished: tuple[int, ...] = ()
    """Versions that were published for the same step as the version before them (`policy_ages`)."""
    minibatches: tuple[Minibatch, ...]
    value_rows: tuple[ValueRow, ...] | None = None
    """The rows of the critic's one update in this step; the policy may make several updates. Every
    rank has the same number of rows. None without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """The reference model's and the critic's scores of a row or of a sample.

    Rewards (KL) and advantages are computed from these scores.
    """

    reference_logprobs: Float32s | None = None
    """[M] float32, nats, the reference model's log-probabilities of the targets; None without
    a reference model."""
    values: Float32s | None = None
    """[T] float32, the critic's value of the state that ends with each token; None without a
    critic."""


def array_bytes(value: object) -> int:
    """Return the number of bytes of all arrays in a shard, or in a part of a shard."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(array_bytes, value))
    if is_dataclass(value):
        return sum(array_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
