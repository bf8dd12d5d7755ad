"""Tests of a rank's checks of the versions of its shard and of the shard's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.parts.trainer_world import PADDING, pack, random_samples

from actors.batch import MicroBatch, RankShard
from actors.policy_age import marked, newest_kept, oldest_version, policy_ages, undone_after
from actors.trainer.agreement import PolicyTooOld, ShardRefused, check_versions
from actors.types import UNDONE, VersionSpan


def check(
    *rows: MicroBatch,
    made_for: int = 5,
    max_policy_age: int | None = None,
    republished: tuple[int, ...] = (),
) -> None:
    shard = RankShard(step=3, trainer_version=made_for, minibatches=(rows,))
    check_versions(shard, trainer_version=5, max_policy_age=max_policy_age, republished=republished)


def row_of(*versions: int) -> MicroBatch:
    return pack([random_samples(version, 1, version=version)[0] for version in versions])


def test_tokens_of_the_trainers_version_and_of_older_ones_pass() -> None:
    check(row_of(5, 3), PADDING, row_of(4))
    check(row_of(5, 3), max_policy_age=2)
    check(PADDING, max_policy_age=0)


def test_a_shard_made_for_another_version_is_refused() -> None:
    with pytest.raises(ShardRefused, match="made for version 4, expected version 5"):
        check(row_of(4), made_for=4)


def test_a_token_of_a_later_version_is_refused() -> None:
    with pytest.raises(ShardRefused, match="sampled by version 6, expected at most 5"):
        check(row_of(5), row_of(4, 6))


def test_a_single_token_beyond_the_age_bound_is_refused() -> None:
    with pytest.raises(PolicyTooOld, match="3 training steps old, expected at most 2"):
        check(row_of(5), row_of(2, 5), max_policy_age=2)


def test_a_republished_version_does_not_increase_the_age_of_tokens() -> None:
    np.testing.assert_array_equal(
        policy_ages(np.array([4, 5, 6, 7], np.int32), 6, [5]), [1, 1, 0, -1]
    )
    check(row_of(5, 2), max_policy_age=2, republished=(4,))
    with pytest.raises(PolicyTooOld, match="3 training steps old, expected at most 2"):
        check(row_of(5, 1), max_policy_age=2, republished=(4,))
    # The shard was waiting for its step when its version was published again.
    check(row_of(4), made_for=4, republished=(5,))
    with pytest.raises(ShardRefused, match="made for version 3, expected version 5"):
        check(row_of(3), made_for=3, republished=(5,))


@given(
    st.integers(0, 12), st.integers(0, 4), st.sets(st.integers(0, 12)).map(sorted)
)  # fmt: skip
def test_oldest_version_is_the_first_within_the_age(
    version: int, max_age: int, republished: list[int]
) -> None:
    candidates = np.arange(-20, version + 1, dtype=np.int32)
    fits = policy_ages(candidates, version, republished) <= max_age
    assert candidates[fits].min() == oldest_version(version, max_age, republished)


def test_a_token_of_an_undone_version_counts_as_no_newer_than_the_trainer() -> None:
    """Check undone versions with numbers below, equal to and above the trainer's."""
    undone = np.array([UNDONE + 3, UNDONE + 5, UNDONE + 9, 3], np.int32)
    np.testing.assert_array_equal(policy_ages(undone, 5), [2, 0, 0, 2])
    np.testing.assert_array_equal(policy_ages(undone, 5, [4, 7]), [1, 0, 0, 1])
    assert newest_kept(undone) == 3 and newest_kept(undone[:3]) == -1
    check(row_of(UNDONE + 9, 5, UNDONE + 5), max_policy_age=0)
    with pytest.raises(PolicyTooOld, match="2 training steps old, expected at most 1"):
        check(row_of(UNDONE + 3), max_policy_age=1)
    with pytest.raises(ShardRefused, match="sampled by version 6, expected at most 5"):
        check(row_of(UNDONE + 9, 6))


def test_a_version_is_undone_if_a_later_term_continued_from_an_older_one() -> None:
    first_versions = {1: 0, 2: 6, 3: 4, 4: 8}
    kept = [undone_after(term, first_versions) for term in (1, 2, 3, 4)]
    assert kept == [4, 4, 8, None]
    turn = (VersionSpan(version=4, start=0, end=2), VersionSpan(version=5, start=2, end=9))
    assert [span.version for span in marked(turn, 4)] == [4, UNDONE + 5]
    assert [(span.start, span.end) for span in marked(turn, 4)] == [(0, 2), (2, 9)]
    assert marked(turn, 5) == marked(turn, None) == turn


def test_a_shard_without_tokens_has_no_age() -> None:
    check()
    assert PADDING.sampled_versions.dtype == np.int32
