"""A check of what the trainer assumes about a packed row."""

from __future__ import annotations

import numpy as np

from actors.batch import MicroBatch
from actors.expert_records import MixtureShape
from actors.trainer.attention.forest import trace_segments


def check_packed(row: MicroBatch, *, vocab_size: int, mixture: MixtureShape | None = None) -> None:
    """Assert that a row is a forest whose columns belong to its trained tokens."""
    columns = (
        row.loss_positions,
        row.behaviour_logprobs,
        row.advantages,
        row.sampled_versions,
        row.loss_weights,
        row.trajectory_index,
    )
    assert {len(column) for column in columns} == {row.num_trained}
    assert all(0 <= token < vocab_size for token in row.token_ids)
    segments = trace_segments(row.segment_lengths, row.segment_parents)
    assert segments.num_tokens == row.num_tokens
    np.testing.assert_array_equal(row.position_ids, segments.token_positions())
    # A target is the token after its loss position, in the same segment or at the start of a child.
    segment = np.searchsorted(segments.ends, row.loss_positions, "right")
    firsts = row.token_ids[segments.starts]
    for position, target, own in zip(row.loss_positions, row.targets, segment, strict=True):
        assert 0 <= position < row.num_tokens
        is_last = position == segments.ends[own] - 1
        following = row.token_ids[position + 1 : position + 2]
        assert target in (firsts[row.segment_parents == own] if is_last else following)
    assert (np.isfinite(row.loss_weights) & (row.loss_weights >= 0)).all()
    assert all(0 <= number < row.num_trained for number in row.trajectory_index)
    if row.experts is None:
        return
    assert mixture is not None
    positions = row.experts.positions
    assert len(positions) == len(row.experts.indices) > 0
    assert (np.diff(positions) > 0).all() and 0 <= positions[0] <= positions[-1] < row.num_tokens
    assert mixture.fault(row.experts.indices) is None
