"""Tests that the worked branch of docs/merging.md shows what merging does."""

from __future__ import annotations

from worlds.builders.trajectory_builders import make_trajectory, make_turn
from worlds.checks.prefix_merge import merge_turns
from worlds.checks.same import assert_same_samples

from actors.merge.report import report_merge
from actors.trajectory_queue.codec import without_shared
from actors.types import BranchReason

TURNS = [
    make_turn([10, 20, 30], [40, 50]),
    make_turn([10, 21], [22]),
    make_turn([10, 20, 30, 40, 50, 60], [70]),
    make_turn([10, 20, 30, 40, 60, 70, 61], [80]),
]


def test_the_worked_branch_is_the_result_of_merging() -> None:
    trajectory = make_trajectory(TURNS)
    samples = trajectory.samples
    assert_same_samples(merge_turns(TURNS, trajectory_id=trajectory.trajectory_id), samples)
    assert [[turn.index for turn in sample.turns] for sample in samples] == [[0, 2], [1], [3]]
    assert [sample.mask.tolist() for sample in samples] == [
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert [(sample.parent, sample.num_shared) for sample in samples] == [(None, 0), (0, 1), (0, 4)]
    assert samples[1].branch_reason is BranchReason.HISTORY_REWRITTEN
    assert [each.num_tokens for each in without_shared(trajectory).samples] == [7, 2, 4]
    assert report_merge([trajectory]).num_saved_tokens == 23 - 18
