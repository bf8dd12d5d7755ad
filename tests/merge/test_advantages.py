"""Group advantages: hand-computed vectors and the cases without a signal."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.merge.advantages import Baseline, Scale, group_advantages, group_divisor

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
        ([1, 0, 0, 0], NO_BASELINE, Scale.MEAN, [4, 0, 0, 0]),
        ([2, -1], NO_BASELINE, Scale.NONE, [2, -1]),
        ([3], NO_BASELINE, Scale.NONE, [3]),
        ([3], NO_BASELINE, Scale.STD, [3]),
        ([2, 2], NO_BASELINE, Scale.STD, [2, 2]),
    ],
)
def test_vectors(
    returns: list[float], baseline: Baseline, scale: Scale, expected: list[float]
) -> None:
    result = group_advantages(returns, baseline=baseline, scale=scale)
    assert result.has_signal
    np.testing.assert_allclose(result.values, expected, atol=1e-6)


@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("baseline", [MEAN, LOO])
@pytest.mark.parametrize("returns", [[7.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3]])
def test_a_group_of_one_and_a_group_of_equal_returns_have_no_signal(
    returns: list[float], baseline: Baseline, scale: Scale
) -> None:
    result = group_advantages(returns, baseline=baseline, scale=scale)
    assert not result.has_signal and (result.values == 0).all()


def test_a_group_of_mean_zero_has_no_signal_under_scale_mean() -> None:
    result = group_advantages([0, 0], baseline=NO_BASELINE, scale=Scale.MEAN)
    assert not result.has_signal and (result.values == 0).all()


def test_negative_returns_are_refused_under_scale_mean() -> None:
    with pytest.raises(ValueError, match="scale mean needs non-negative returns, got -1"):
        group_advantages([1, -1], scale=Scale.MEAN)


@pytest.mark.parametrize("returns", [[], [1.0, float("nan")]])
def test_no_returns_and_returns_that_are_not_finite_are_refused(returns: list[float]) -> None:
    with pytest.raises(ValueError, match="advantages: "):
        group_advantages(returns)


returns_strategy = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=1, max_size=9)


@given(returns_strategy, st.sampled_from([MEAN, LOO]), st.sampled_from([Scale.NONE, Scale.STD]))
def test_with_a_group_baseline_advantages_sum_to_zero_and_keep_the_order(
    returns: list[float], baseline: Baseline, scale: Scale
) -> None:
    values = group_advantages(returns, baseline=baseline, scale=scale).values
    assert abs(values.sum()) < 1e-6 * max(1, np.abs(values).max())
    for i, a in enumerate(returns):
        for j, b in enumerate(returns):
            assert (a > b) <= (values[i] > values[j])


@given(returns_strategy, st.floats(-5, 5))
def test_a_group_baseline_does_not_see_a_shift_of_all_returns(
    returns: list[float], shift: float
) -> None:
    a = group_advantages(returns).values
    b = group_advantages([value + shift for value in returns]).values
    np.testing.assert_allclose(a, b, atol=1e-6)


@given(returns_strategy, st.sampled_from([MEAN, LOO]), st.randoms())
def test_advantages_follow_their_members(
    returns: list[float], baseline: Baseline, random: Random
) -> None:
    order = random.sample(range(len(returns)), len(returns))
    plain = group_advantages(returns, baseline=baseline).values
    shuffled = group_advantages([returns[i] for i in order], baseline=baseline).values
    np.testing.assert_allclose(shuffled, plain[order], atol=1e-9)


@given(returns_strategy, st.sampled_from([MEAN, LOO, NO_BASELINE]), st.sampled_from([0.5, 3, 40]))
def test_scale_none_grows_with_the_returns_and_scale_mean_does_not_see_their_unit(
    returns: list[float], baseline: Baseline, unit: float
) -> None:
    def values(each: list[float], scale: Scale) -> np.ndarray:
        return group_advantages(each, baseline=baseline, scale=scale).values

    grown = [unit * value for value in returns]
    np.testing.assert_allclose(values(grown, Scale.NONE), unit * values(returns, Scale.NONE))
    positive, in_unit = [abs(r) for r in returns], [unit * abs(r) for r in returns]
    np.testing.assert_allclose(values(in_unit, Scale.MEAN), values(positive, Scale.MEAN), atol=1e-9)


def test_scale_std_does_not_see_the_unit_of_returns_but_for_its_epsilon() -> None:
    a, b = group_advantages([1, 0, 0, 3]).values, group_advantages([10, 0, 0, 30]).values
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    ("scale", "expected"), [(Scale.NONE, 1.0), (Scale.STD, 0.500001), (Scale.MEAN, 0.25)]
)
def test_what_a_critics_advantages_are_divided_by(scale: Scale, expected: float) -> None:
    assert group_divisor([1, 0, 0, 0], scale=scale) == pytest.approx(expected, abs=1e-9)


def test_errors_name_the_trajectories_where_there_are_names() -> None:
    names = ["g1-0.a0", "g1-1.a0"]
    with pytest.raises(ValueError, match=r"trajectory g1-1\.a0 of 2 have a return that is not fin"):
        group_advantages([1.0, float("nan")], names=names)
    with pytest.raises(ValueError, match=r"got -2\.0 of trajectory g1-0\.a0"):
        group_advantages([-2, 1], scale=Scale.MEAN, names=names)
    with pytest.raises(ValueError, match="1 names for 2 returns"):
        group_advantages([1, 2], names=["one"])


def test_returns_have_no_advantage_over_a_critic() -> None:
    with pytest.raises(ValueError, match="per token: use gae"):
        group_advantages([1, 0], baseline=Baseline.CRITIC)
