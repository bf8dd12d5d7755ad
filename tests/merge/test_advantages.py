"""Tests of group advantages: values computed by hand, and groups without a signal."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithm import Baseline, Scale
from actors.merge.advantages import group_advantages, reason_without_signal
from actors.trajectory_queue.ledger import EvictionReason

MEAN, LOO, NO_BASELINE = Baseline.MEAN, Baseline.LEAVE_ONE_OUT, Baseline.NONE


@pytest.mark.parametrize(
    ("returns", "baseline", "scale", "expected"),
    [
        # deviations .75, -.25; sample deviation .5: .75 / .500001
        ([1, 0, 0, 0], MEAN, Scale.STD, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 0, 0, 1], MEAN, Scale.NONE, [0.5, -0.5, -0.5, 0.5]),
        # the others' mean: 0 for the first, 1/3 for the rest
        ([1, 0, 0, 0], LOO, Scale.NONE, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0, 0], LOO, Scale.STD, [1.999996, -0.666665, -0.666665, -0.666665]),
        # MaxRL: (r - mean) / mean
        ([1, 0, 0, 0], MEAN, Scale.MEAN, [3, -1, -1, -1]),
        ([1, 0, 0, 0], LOO, Scale.MEAN, [4, -4 / 3, -4 / 3, -4 / 3]),
        ([2, -1], NO_BASELINE, Scale.NONE, [2, -1]),
        ([3], NO_BASELINE, Scale.NONE, [3]),
        ([2, 2], NO_BASELINE, Scale.NONE, [2, 2]),
    ],
)
def test_advantages_are_those_computed_by_hand(
    returns: list[float], baseline: Baseline, scale: Scale, expected: list[float]
) -> None:
    values = group_advantages(returns, baseline=baseline, scale=scale)
    assert reason_without_signal(returns, baseline=baseline, scale=scale) is None
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("baseline", [MEAN, LOO])
@pytest.mark.parametrize("returns", [[7.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3]])
def test_a_group_of_one_and_a_group_of_equal_returns_have_no_signal(
    returns: list[float], baseline: Baseline, scale: Scale
) -> None:
    reason = reason_without_signal(returns, baseline=baseline, scale=scale)
    assert reason is EvictionReason.ZERO_VARIANCE
    assert (group_advantages(returns, baseline=baseline, scale=scale) == 0).all()


@pytest.mark.parametrize("returns", [[1.0, -1.0], [2.0, -1.0, -1.0], [3.0, -0.5]])
@pytest.mark.parametrize("baseline", [MEAN, LOO])
def test_with_scale_mean_a_negative_return_in_a_group_is_reported_as_such(
    returns: list[float], baseline: Baseline
) -> None:
    reason = reason_without_signal(returns, baseline=baseline, scale=Scale.MEAN)
    assert reason is EvictionReason.NEGATIVE_RETURN
    assert (group_advantages(returns, baseline=baseline, scale=Scale.MEAN) == 0).all()
    for scale in (Scale.NONE, Scale.STD):
        assert reason_without_signal(returns, baseline=baseline, scale=scale) is None
        assert (group_advantages(returns, baseline=baseline, scale=scale) != 0).any()


def test_equal_returns_are_equal_whatever_their_sign() -> None:
    reason = reason_without_signal([-1, -1], scale=Scale.MEAN)
    assert reason is EvictionReason.ZERO_VARIANCE


returns_strategy = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=1, max_size=9)


@given(returns_strategy, st.sampled_from([MEAN, LOO]), st.sampled_from([Scale.NONE, Scale.STD]))
def test_with_a_group_baseline_advantages_sum_to_zero_and_keep_the_order(
    returns: list[float], baseline: Baseline, scale: Scale
) -> None:
    values = group_advantages(returns, baseline=baseline, scale=scale)
    assert abs(values.sum()) < 1e-6 * max(1, np.abs(values).max())
    for i, a in enumerate(returns):
        for j, b in enumerate(returns):
            assert (a > b) <= (values[i] > values[j])


@given(returns_strategy, st.floats(-5, 5))
def test_with_a_group_baseline_a_shift_of_all_returns_changes_nothing(
    returns: list[float], shift: float
) -> None:
    a = group_advantages(returns)
    b = group_advantages([value + shift for value in returns])
    np.testing.assert_allclose(a, b, atol=1e-6)


@given(returns_strategy, st.sampled_from([MEAN, LOO]), st.randoms())
def test_reordering_a_group_reorders_its_advantages(
    returns: list[float], baseline: Baseline, random: Random
) -> None:
    order = random.sample(range(len(returns)), len(returns))
    plain = group_advantages(returns, baseline=baseline)
    shuffled = group_advantages([returns[i] for i in order], baseline=baseline)
    np.testing.assert_allclose(shuffled, plain[order], atol=1e-9)


@given(returns_strategy, st.sampled_from([MEAN, LOO]), st.sampled_from([0.5, 3, 40]))
def test_advantages_scale_with_the_returns_for_none_and_are_unitless_for_mean(
    returns: list[float], baseline: Baseline, unit: float
) -> None:
    def values(each: list[float], scale: Scale) -> np.ndarray:
        return group_advantages(each, baseline=baseline, scale=scale)

    grown = [unit * value for value in returns]
    np.testing.assert_allclose(values(grown, Scale.NONE), unit * values(returns, Scale.NONE))
    positive, in_unit = [abs(r) for r in returns], [unit * abs(r) for r in returns]
    np.testing.assert_allclose(values(in_unit, Scale.MEAN), values(positive, Scale.MEAN), atol=1e-9)


def test_with_scale_std_the_unit_of_returns_changes_only_the_epsilon_term() -> None:
    a, b = group_advantages([1, 0, 0, 3]), group_advantages([10, 0, 0, 30])
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert not np.array_equal(a, b)
