"""What a shard must be to be trained on: weights and trajectories of each token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trainer_world import pack, random_samples

from actors.batch import MicroBatch, Minibatch, RankShard
from actors.trainer.shard_check import ShardRefused, check_shard


def check(row: MicroBatch) -> None:
    shard = RankShard(step=3, trainer_version=0, minibatches=(Minibatch(micro_batches=(row,)),))
    check_shard(shard, trainer_version=0, vocab_size=500, max_policy_age=None)


def weights_with(row: MicroBatch, value: float) -> np.ndarray:
    return np.array([*row.loss_weights[:-1], value], np.float32)


def test_a_packed_row_passes() -> None:
    check(pack(random_samples(0, 3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5])
def test_a_loss_weight_that_is_no_share_is_refused(value: float) -> None:
    row = pack(random_samples(0, 3))
    with pytest.raises(ShardRefused, match=r"step 3 has loss weights .* expected finite ones"):
        check(replace(row, loss_weights=weights_with(row, value)))


@pytest.mark.parametrize("number", [-1, 10_000])
def test_a_trajectory_number_outside_the_row_is_refused(number: int) -> None:
    row = pack(random_samples(0, 3))
    numbers = np.array([*row.trajectory_index[:-1], number], np.int32)
    with pytest.raises(ShardRefused, match=r"trajectory numbers .* expected 0 to"):
        check(replace(row, trajectory_index=numbers))


@pytest.mark.parametrize("name", ["loss_weights", "trajectory_index", "advantages"])
def test_a_column_of_another_length_is_refused_by_name(name: str) -> None:
    row = pack(random_samples(0, 3))
    short = getattr(row, name)[:-1]
    with pytest.raises(ShardRefused, match=f"'{name}': {len(short)}.* expected equal lengths"):
        check(replace(row, **{name: short}))
