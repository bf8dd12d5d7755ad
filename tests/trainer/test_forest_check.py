"""What a rank refuses of a row that claims to be a forest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds.trajectory_builders import ids, make_trajectory, make_turn

from actors.batch import MicroBatch, Minibatch, RankShard
from actors.expert_records import ModelShape
from actors.merge.packing import WeightedSample, pack_row
from actors.trainer.shard_check import ShardRefused, check_shard


def make_row() -> MicroBatch:
    """Tokens 1 2 | 3 4 | 5 6: a prompt with two answers, of which every token is trained."""
    answers = [[3, 4], [5, 6]]
    trajectories = [
        make_trajectory([make_turn([1, 2], answer)], rollout_id=f"g000000.0-{number}")
        for number, answer in enumerate(answers)
    ]
    samples = [trajectory.samples[0] for trajectory in trajectories]
    return pack_row([WeightedSample(sample=s, advantage=1.0, loss_weight=0.25) for s in samples])


def check(row: MicroBatch) -> None:
    minibatch = Minibatch(micro_batches=(row,))
    shard = RankShard(step=0, trainer_version=0, minibatches=(minibatch,))
    check_shard(shard, trainer_version=0, shape=ModelShape(vocab_size=10), max_policy_age=None)


def test_a_forest_with_targets_at_the_start_of_each_child_is_accepted() -> None:
    row = make_row()
    assert row.loss_positions.tolist() == [1, 2, 1, 4] and row.targets.tolist() == [3, 4, 5, 6]
    check(row)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"segment_parents": ids([-1, 0, 2])}, "segment 2 has parent 2"),
        ({"segment_lengths": ids([2, 2, 1])}, "sum to 5 of 6"),
        ({"segment_lengths": ids([2, 4, 0])}, "at least one token"),
        ({"position_ids": ids([0, 1, 2, 3, 4, 5])}, "position ids that do not count"),
        # 4 stands behind 3, but no child of the prompt begins with it.
        ({"targets": ids([4, 4, 5, 6])}, "targets that are not"),
        # The last token of the first answer is followed by nothing, whatever stands behind it.
        ({"loss_positions": ids([1, 3, 1, 4]), "targets": ids([3, 5, 5, 6])}, "targets that are"),
        ({"loss_positions": ids([1, 2, 1, 5])}, "loss positions 1 to 5, expected 0 to 4"),
    ],
)
def test_a_broken_forest_is_refused(fields: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(ShardRefused, match=reason):
        check(replace(make_row(), **fields))
