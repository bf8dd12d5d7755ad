"""What a rank demands of its shard before it joins a collective, and how a shard is told apart.

Pure; called by `TrainerRank` at the border. A shard that one rank refuses is refused by all.
"""

from __future__ import annotations

import zlib

import numpy as np

from actors.batch import MicroBatch, RankShard, ValueShard
from actors.expert_records import MixtureShape, ModelShape
from actors.trainer.attention.forest_layout import Segments, trace_segments


class ShardRefused(ValueError):
    """A shard breaks its invariants; nothing was trained and the weights are unchanged."""


class PolicyTooOld(ValueError):
    """A token is older than the age bound allows; nothing was trained."""


def _micro_batch_fault(row: MicroBatch, shape: ModelShape) -> str | None:
    lengths = {
        name: int(values.shape[0])
        for name, values in (
            ("loss_positions", row.loss_positions),
            ("behaviour_logprobs", row.behaviour_logprobs),
            ("advantages", row.advantages),
            ("sampled_versions", row.sampled_versions),
            ("loss_weights", row.loss_weights),
            ("trajectory_index", row.trajectory_index),
        )
    }
    if any(length != row.num_trained for length in lengths.values()):
        return f"{lengths} beside {row.num_trained} targets, expected equal lengths"
    if not row.num_tokens:
        return "trained tokens in a row without tokens" if row.num_trained else None
    if not 0 <= int(row.token_ids.min()) <= int(row.token_ids.max()) < shape.vocab_size:
        return f"token ids up to {int(row.token_ids.max())}, expected 0 to {shape.vocab_size - 1}"
    try:
        segments = trace_segments(row.segment_lengths, row.segment_parents)
    except ValueError as error:
        return f"a row that is no forest ({error})"
    if segments.num_tokens != row.num_tokens:
        return f"segment lengths that sum to {segments.num_tokens} of {row.num_tokens}"
    if not np.array_equal(segments.token_positions(), row.position_ids):
        return "position ids that do not count along the paths of its segments"
    fault = None
    if row.num_trained:
        fault = _target_fault(row, segments, vocab_size=shape.vocab_size)
    return fault or _expert_fault(row, shape.mixture)


def _target_fault(row: MicroBatch, segments: Segments, *, vocab_size: int) -> str | None:
    """A target stands behind its loss position, in the segment or at the start of a child."""
    outside = (row.targets < 0) | (row.targets >= vocab_size)
    if outside.any():
        return f"a target {int(row.targets[outside][0])}, expected 0 to {vocab_size - 1}"
    positions = row.loss_positions
    first, last = int(positions.min()), int(positions.max())
    if first < 0 or last >= row.num_tokens - 1:
        return f"loss positions {first} to {last}, expected 0 to {row.num_tokens - 2}"
    segment = np.searchsorted(segments.ends, positions, "right")
    is_last = positions == segments.ends[segment] - 1
    is_next = row.token_ids[positions + 1] == row.targets
    # A parent and a token as one number; roots begin behind no position.
    children = row.segment_parents.astype(np.int64) * vocab_size + row.token_ids[segments.starts]
    begins_child = np.isin(segment * vocab_size + row.targets, children[row.segment_parents >= 0])
    if not np.where(is_last, begins_child, is_next).all():
        return "targets that are not the tokens behind their loss positions"
    return _weight_fault(row)


def _weight_fault(row: MicroBatch) -> str | None:
    if not (np.isfinite(row.loss_weights).all() and (row.loss_weights >= 0).all()):
        return (
            f"loss weights {float(row.loss_weights.min())} to {float(row.loss_weights.max())}, "
            "expected finite ones of at least 0"
        )
    # The loss reserves as many places for trajectories as there are trained tokens.
    first, last = int(row.trajectory_index.min()), int(row.trajectory_index.max())
    if first < 0 or last >= row.num_trained:
        return f"trajectory numbers {first} to {last}, expected 0 to {row.num_trained - 1}"
    return None


def _expert_fault(row: MicroBatch, mixture: MixtureShape | None) -> str | None:
    """Records are of places in the row, and of as many layers and experts as the model has."""
    if row.experts is None:
        return None
    if mixture is None:
        return "expert records for a model whose routing cannot be replayed; leave them out"
    positions, indices = row.experts.positions, row.experts.indices
    num_records = positions.shape[0]
    if indices.shape[0] != num_records or not num_records:
        return (
            f"{indices.shape[0]} expert records at {num_records} positions, expected one for each "
            "and at least one; leave the records out where there are none"
        )
    is_ascending = (np.diff(positions) > 0).all()
    if not is_ascending or positions[0] < 0 or positions[-1] >= row.num_tokens:
        return (
            f"expert records at positions {int(positions.min())} to {int(positions.max())}, "
            f"expected ascending ones from 0 to {row.num_tokens - 1}"
        )
    return mixture.fault(indices)


def check_shard(
    shard: RankShard,
    *,
    trainer_version: int,
    shape: ModelShape,
    max_policy_age: int | None,
) -> None:
    """Raise when the shard must not be trained on.

    Args: trainer_version: what this rank holds. shape: of its model. max_policy_age: versions;
        None: not asserted.
    Raises: ShardRefused for a broken invariant; PolicyTooOld for a token beyond the age bound.
    """
    if shard.trainer_version != trainer_version:
        raise ShardRefused(
            f"trainer: got a batch made for version {shard.trainer_version}, expected version "
            f"{trainer_version}, which the trainer holds; make the batch again"
        )
    for number, minibatch in enumerate(shard.minibatches):
        for row in minibatch.micro_batches:
            fault = _micro_batch_fault(row, shape)
            if fault is not None:
                raise ShardRefused(f"trainer: minibatch {number} of step {shard.step} has {fault}")
    _check_versions(shard, max_policy_age=max_policy_age)


def _check_versions(shard: RankShard, *, max_policy_age: int | None) -> None:
    versions = [
        row.sampled_versions
        for minibatch in shard.minibatches
        for row in minibatch.micro_batches
        if row.num_trained
    ]
    if not versions:
        return
    seen = np.concatenate(versions)
    oldest, newest = int(seen.min()), int(seen.max())
    if newest > shard.trainer_version:
        raise ShardRefused(
            f"trainer: a token was sampled by version {newest}, expected at most "
            f"{shard.trainer_version}, which the trainer holds; engine and trainer disagree"
        )
    if max_policy_age is not None and shard.trainer_version - oldest > max_policy_age:
        raise PolicyTooOld(
            f"trainer: the oldest token is {shard.trainer_version - oldest} versions old, expected "
            f"at most {max_policy_age}; admission let a group in too early"
        )


def shard_outline(shard: RankShard, value_shard: ValueShard | None = None) -> int:
    """Hash what all ranks must agree on: step, version, numbers of micro-batches, critic's rows."""
    minibatches = [len(item.micro_batches) for item in shard.minibatches]
    values = None if value_shard is None else (value_shard.step, len(value_shard.rows))
    return zlib.crc32(repr((shard.step, shard.trainer_version, minibatches, values)).encode())
