"""What a shard must be to be trained on: weights and trajectories of each token."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from worlds.trainer_world import pack, random_samples

from actors.batch import MicroBatch, Minibatch, RankShard
from actors.expert_records import ExpertRecords, MixtureShape, ModelShape
from actors.trainer.shard_check import ShardRefused, check_shard

MIXTURE = MixtureShape(num_layers=2, num_experts=4, num_chosen=2)
RECORDS = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]]], np.uint8)


def check(row: MicroBatch, *, mixture: MixtureShape | None = MIXTURE) -> None:
    shard = RankShard(step=3, trainer_version=0, minibatches=(Minibatch(micro_batches=(row,)),))
    shape = ModelShape(vocab_size=500, mixture=mixture)
    check_shard(shard, trainer_version=0, shape=shape, max_policy_age=None)


def row_with(positions: list[int], indices: np.ndarray) -> MicroBatch:
    records = ExpertRecords(positions=np.array(positions, np.int32), indices=indices)
    return replace(pack(random_samples(0, 3)), experts=records)


def weights_with(row: MicroBatch, value: float) -> np.ndarray:
    return np.array([*row.loss_weights[:-1], value], np.float32)


def test_a_packed_row_passes() -> None:
    check(pack(random_samples(0, 3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5])
def test_a_loss_weight_that_is_no_share_is_refused(value: float) -> None:
    row = pack(random_samples(0, 3))
    with pytest.raises(ShardRefused, match=r"step 3 has loss weights .* expected finite ones"):
        check(replace(row, loss_weights=weights_with(row, value)))


@pytest.mark.parametrize("target", [-45, -1, 500, 503])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    row = pack(random_samples(0, 3))
    targets = np.array([target, *row.targets[1:]], np.int32)
    with pytest.raises(ShardRefused, match=f"a target {target}, expected 0 to 499"):
        check(replace(row, targets=targets))


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


def test_expert_records_of_the_models_shape_pass() -> None:
    check(row_with([0, 5], RECORDS))


def test_expert_records_for_a_dense_model_are_refused() -> None:
    with pytest.raises(ShardRefused, match=r"a model whose routing cannot be replayed; leave them"):
        check(row_with([0, 5], RECORDS), mixture=None)


@pytest.mark.parametrize(
    ("indices", "found"),
    [(RECORDS[:, :1], "(1, 2)"), (RECORDS[:, :, :1], "(2, 1)"), (RECORDS[0], "(2,)")],
)
def test_expert_records_of_another_mixture_are_refused(indices: np.ndarray, found: str) -> None:
    expected = f"expert records for {found} layers and experts, the trained model has (2, 2)"
    with pytest.raises(ShardRefused, match=re.escape(expected)):
        check(row_with([0, 5], indices))


@pytest.mark.parametrize(("positions", "num_records"), [([0, 5, 6], 2), ([], 0)])
def test_expert_records_without_a_position_each_are_refused(
    positions: list[int], num_records: int
) -> None:
    expected = f"{num_records} expert records at {len(positions)} positions, expected one for each"
    with pytest.raises(ShardRefused, match=expected):
        check(row_with(positions, RECORDS[:num_records]))


@pytest.mark.parametrize("positions", [[-1, 5], [5, 5], [5, 0], [0, 10_000]])
def test_expert_records_out_of_place_are_refused(positions: list[int]) -> None:
    with pytest.raises(ShardRefused, match=r"expert records at positions .* expected ascending"):
        check(row_with(positions, RECORDS))


@pytest.mark.parametrize("expert", [-1, 4])
def test_expert_records_of_an_expert_that_is_not_there_are_refused(expert: int) -> None:
    indices = RECORDS.astype(np.int16)
    indices[1, 0, 1] = expert
    with pytest.raises(ShardRefused, match=rf"of experts .*{expert}.* expected 0 to 3; record"):
        check(row_with([0, 5], indices))


def test_an_expert_named_twice_for_a_token_is_refused() -> None:
    indices = RECORDS.copy()
    indices[1, 0] = 2
    with pytest.raises(ShardRefused, match="name an expert twice, expected different ones"):
        check(row_with([0, 5], indices))
