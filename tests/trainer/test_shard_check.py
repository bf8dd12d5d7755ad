"""What a rank demands of its shard at run time: the versions of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.trainer_world import PADDING, pack, random_samples

from actors.batch import MicroBatch, Minibatch, RankShard
from actors.trainer.shard_check import PolicyTooOld, ShardRefused, check_versions


def check(*rows: MicroBatch, made_for: int = 5, max_policy_age: int | None = None) -> None:
    shard = RankShard(
        step=3, trainer_version=made_for, minibatches=(Minibatch(micro_batches=rows),)
    )
    check_versions(shard, trainer_version=5, max_policy_age=max_policy_age)


def row_of(*versions: int) -> MicroBatch:
    return pack([random_samples(version, 1, version=version)[0] for version in versions])


def test_tokens_of_the_trainers_version_and_of_older_ones_pass() -> None:
    check(row_of(5, 3), PADDING, row_of(4))
    check(row_of(5, 3), max_policy_age=2)
    check(PADDING, max_policy_age=0)


def test_a_shard_made_for_another_version_is_refused() -> None:
    with pytest.raises(ShardRefused, match="made for version 4, expected version 5"):
        check(row_of(4), made_for=4)


def test_a_token_of_a_version_to_come_is_refused() -> None:
    with pytest.raises(ShardRefused, match="sampled by version 6, expected at most 5"):
        check(row_of(5), row_of(4, 6))


def test_one_token_beyond_the_age_bound_is_too_old() -> None:
    with pytest.raises(PolicyTooOld, match="3 versions old, expected at most 2"):
        check(row_of(5), row_of(2, 5), max_policy_age=2)


def test_a_shard_without_tokens_has_no_age() -> None:
    check()
    assert PADDING.sampled_versions.dtype == np.int32
