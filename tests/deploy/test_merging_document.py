"""The worked branch of docs/merging.md is what merging does."""

from __future__ import annotations

from worlds.trajectory_builders import make_trajectory, make_turn

from actors.lineage import Mismatch, MismatchKind
from actors.merge.prefix import merge_turns
from actors.trajectory_queue.columns import encode


def test_the_worked_branch() -> None:
    trajectory = make_trajectory(
        [
            make_turn([10, 20, 30], [40, 50]),
            make_turn([10, 21], [22]),
            make_turn([10, 20, 30, 40, 50, 60], [70]),
            make_turn([10, 20, 30, 40, 60, 70, 61], [80]),
        ]
    )
    merged = merge_turns(trajectory)
    assert [sample.turns for sample in merged.samples] == [(0, 2), (1,), (3,)]
    assert [sample.mask.tolist() for sample in merged.samples] == [
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert merged.mismatches[0] == Mismatch(turn=1, position=1, kind=MismatchKind.HISTORY_REWRITTEN)
    assert (merged.mismatches[1].turn, merged.mismatches[1].position) == (3, 4)
    assert encode([trajectory]).token_ids.shape[0] == 7 + 2 + 4
    assert (merged.num_unmerged_tokens, merged.num_merged_tokens) == (23, 18)
