"""Tests of credit by turn: returns-to-go compared within a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithm import Baseline, Scale
from actors.merge.advantages import (
    discounted_suffix_sums,
    group_advantages,
    reason_without_signal,
    turn_advantages,
)
from actors.trajectory_queue.ledger import EvictionReason

quarters = st.integers(-8, 8).map(lambda x: x / 4)
rewards_strategy = st.lists(st.lists(quarters, min_size=1, max_size=6), min_size=1, max_size=5)


def arrays(rewards: list[list[float]]) -> list[np.ndarray]:
    return [np.array(each, float) for each in rewards]


@given(st.lists(quarters, max_size=40), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_suffix_sums_equal_those_of_a_plain_loop(values: list[float], factor: float) -> None:
    expected, running = [], 0.0
    for value in reversed(values):
        running = value + factor * running
        expected.append(running)
    found = discounted_suffix_sums(np.array(values, float), factor)
    np.testing.assert_allclose(found, expected[::-1], atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "discount", "baseline", "expected"),
    [
        # R = [[.5, 1], [0, 0]]: each turn is compared with the mean of its number.
        ([[0, 1], [0, 0]], 0.5, Baseline.MEAN, [[0.25, 0.5], [-0.25, -0.5]]),
        ([[0, 1], [0, 0]], 0.5, Baseline.LEAVE_ONE_OUT, [[0.5, 1], [-0.5, -1]]),
        ([[0, 1], [0, 0]], 0.5, Baseline.NONE, [[0.5, 1], [0, 0]]),
        # R = [[1], [.5, 1]]: a trajectory that won at once counts with its last turn.
        ([[1], [0, 1]], 0.5, Baseline.MEAN, [[0.25], [-0.25, 0]]),
        # Discount 0: only the turn's own reward counts.
        ([[1, 0], [0, 1]], 0.0, Baseline.MEAN, [[0.5, -0.5], [-0.5, 0.5]]),
    ],
)
def test_turn_advantages_by_example(
    rewards: list[list[float]], discount: float, baseline: Baseline, expected: list[list[float]]
) -> None:
    found, no_signal = turn_advantages(
        arrays(rewards), discount=discount, baseline=baseline, scale=Scale.NONE
    )
    assert no_signal is None
    for values, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 6), quarters), min_size=1, max_size=6),
    st.sampled_from(
        [
            (Baseline.MEAN, Scale.NONE),
            (Baseline.MEAN, Scale.STD),
            (Baseline.LEAVE_ONE_OUT, Scale.STD),
            (Baseline.NONE, Scale.NONE),
        ]
    ),
)
def test_undiscounted_final_rewards_give_every_turn_the_advantage_of_its_trajectory(
    members: list[tuple[int, float]], choice: tuple[Baseline, Scale]
) -> None:
    baseline, scale = choice
    rewards = arrays([[0.0] * (turns - 1) + [reward] for turns, reward in members])
    found, no_signal = turn_advantages(rewards, discount=1.0, baseline=baseline, scale=scale)
    returns = [r for _, r in members]
    assert no_signal == reason_without_signal(returns, baseline=baseline, scale=scale)
    whole = group_advantages(returns, baseline=baseline, scale=scale)
    for values, expected in zip(found, whole, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-12)


@given(rewards_strategy, st.sampled_from([0.0, 0.5, 1.0]), st.randoms())
def test_reordering_a_group_reorders_its_advantages(
    rewards: list[list[float]], discount: float, random: object
) -> None:
    order = random.sample(range(len(rewards)), len(rewards))  # type: ignore[attr-defined]
    plain, _ = turn_advantages(arrays(rewards), discount=discount)
    shuffled, _ = turn_advantages(arrays([rewards[i] for i in order]), discount=discount)
    for position, index in enumerate(order):
        np.testing.assert_allclose(shuffled[position], plain[index], atol=1e-9)


@pytest.mark.parametrize("rewards", [[[3.0]], [[1.0, 2.0], [1.0, 2.0]]])
def test_a_group_of_one_and_a_group_of_equal_turns_have_no_signal(
    rewards: list[list[float]],
) -> None:
    found, no_signal = turn_advantages(arrays(rewards), discount=0.9)
    assert no_signal is EvictionReason.ZERO_VARIANCE and all(
        (values == 0).all() for values in found
    )


def test_with_scale_mean_a_turn_with_a_negative_return_to_go_has_no_signal() -> None:
    # Discount 0: the first turn has [-1, 1], the second [2, 0] with mean 1.
    rewards = arrays([[-1, 2], [1, 0]])
    found, no_signal = turn_advantages(rewards, discount=0.0, scale=Scale.MEAN)
    assert no_signal is None and [values.tolist() for values in found] == [[0, 1], [0, -1]]
    found, no_signal = turn_advantages(arrays([[-1], [1]]), discount=0.0, scale=Scale.MEAN)
    assert no_signal is EvictionReason.NEGATIVE_RETURN
    assert all((values == 0).all() for values in found)
