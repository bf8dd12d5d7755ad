"""Tests of the token weights of each loss aggregation, by hand and by their sums."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithm import Aggregation
from actors.merge.step import share_of, trajectory_weights

NOTHING = np.zeros(3)


# Three trajectories of 1, 3 and 4 tokens, the first two of group a; without a signal: 2 of 8
# tokens, 1 group.
@pytest.mark.parametrize(
    ("aggregation", "alone", "among"),
    [
        ("token_mean", [1 / 8] * 3, [1 / 16] * 3),
        ("trajectory_mean", [1 / 3, 1 / 9, 1 / 12], [1 / 5, 1 / 15, 1 / 20]),
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 8], [1 / 12, 1 / 12, 1 / 12]),
        ("constant", [1 / 30] * 3, [1 / 50] * 3),
    ],
)
def test_weights_by_hand(aggregation: Aggregation, alone: list[float], among: list[float]) -> None:
    solved = np.array([8.0, 2, 1])
    for without_signal, expected in ((NOTHING, alone), (solved, among)):
        weights = trajectory_weights(
            [1, 3, 4],
            "aab",
            aggregation=aggregation,
            without_signal=without_signal,
            constant_tokens=10,
        )
        assert weights.tolist() == pytest.approx(expected)


def test_prompt_mean_weighs_prompts_equally_whatever_their_length() -> None:
    weights = trajectory_weights(
        [1, 3, 8],
        "aab",
        aggregation="prompt_mean",
        without_signal=NOTHING,
        constant_tokens=1,
    )
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 16]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=9),
    st.sampled_from([a for a in get_args(Aggregation) if a != "constant"]),
)
def test_weights_of_a_mean_sum_to_one(
    drawn: list[tuple[int, str]], aggregation: Aggregation
) -> None:
    num_tokens, group_ids = [count for count, _ in drawn], [group for _, group in drawn]
    weights = trajectory_weights(
        num_tokens,
        group_ids,
        aggregation=aggregation,
        without_signal=NOTHING,
        constant_tokens=1,
    )
    assert weights @ num_tokens == pytest.approx(1.0)


def test_an_update_without_trajectories_has_no_weights() -> None:
    for aggregation in get_args(Aggregation):
        weights = trajectory_weights(
            [], [], aggregation=aggregation, without_signal=NOTHING, constant_tokens=1
        )
        assert weights.shape == (0,)


def test_tokens_without_a_signal_are_divided_in_proportion_to_each_update() -> None:
    whole, part, solved = np.array([12.0, 3, 2]), np.array([3.0, 1, 1]), np.array([10.0, 3, 2])
    assert share_of(solved, part=part, whole=whole).tolist() == [2.5, 1.0, 1.0]
    assert share_of(solved, part=whole, whole=whole).tolist() == solved.tolist()
    assert not share_of(solved, part=NOTHING, whole=NOTHING).any()


def test_doubling_all_tokens_halves_the_weights_of_token_mean() -> None:
    once, twice = (
        trajectory_weights(
            [2 * scale, 5 * scale],
            "ab",
            aggregation="token_mean",
            without_signal=np.array([3.0 * scale, 0, 0]),
            constant_tokens=1,
        )
        for scale in (1, 2)
    )
    np.testing.assert_allclose(once, 2 * twice)
