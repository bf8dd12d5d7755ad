"""Tests that a collapse of the mean return is found soon, and other changes are not reported."""

from __future__ import annotations

import math
import random

import pytest

from service.telemetry.reward_drop import RewardDrop, RewardWatch

# Mean returns that change by 0.02 from step to step. The noise of a step is
# 1.4826 * 0.02 / sqrt(2) = 0.021, that of the comparison of 3 steps with 20 is
# 0.021 * sqrt(1/3 + 1/20) = 0.013. After 47 earlier steps, a fall is reported if it is at least
# 4.2 * (1 + 20/47) * 0.013 = 0.078.
CALM = [0.81, 0.79] * 25


def found(
    means: list[float], *, std: float = 0.1, num_returns: int = 100
) -> list[RewardDrop | None]:
    watch, drops = RewardWatch(), []
    for step, mean in enumerate(means, 1):
        watch.add(step, mean=mean, std=std, num_returns=num_returns)
        drops.append(watch.drop)
    return drops


def first(drops: list[RewardDrop | None]) -> RewardDrop | None:
    return next((each for each in drops if each is not None), None)


def test_a_fall_of_015_is_found_at_its_second_step() -> None:
    """Find the fall at its second step: the mean of three steps fell by 0.05, then by 0.1."""
    drop = first(found(CALM + [0.65] * 10))
    assert drop is not None and (drop.since, drop.found) == (51, 52)
    assert drop.before == pytest.approx(0.8) and drop.now == pytest.approx((0.79 + 1.3) / 3)


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (10.0, -10.0), (0.001, 5.0)])
def test_the_same_fall_is_found_at_the_same_step_in_every_scale(
    factor: float, offset: float
) -> None:
    means = [factor * each + offset for each in CALM + [0.65] * 10]
    drop = first(found(means, std=0.1 * factor))
    assert drop is not None and (drop.since, drop.found) == (51, 52)


def test_a_fall_that_is_small_against_the_spread_of_returns_is_not_reported() -> None:
    """Ignore a fall of 0.15 if it is below a third of the deviation, even with precise means."""
    assert first(found(CALM + [0.65] * 30, std=0.5, num_returns=10**6)) is None
    assert first(found(CALM + [0.65] * 30, std=0.4, num_returns=10**6)) is not None


def test_a_fall_of_few_returns_is_not_reported() -> None:
    """Ignore a fall below 4.2 standard errors: 0.2 for 4 returns, and 0.07 for 12 steps."""
    assert first(found(CALM + [0.65] * 30, std=0.4, num_returns=4)) is None


def test_a_fall_is_over_when_half_of_it_is_regained() -> None:
    drops = found(CALM + [0.2] * 10 + [0.8] * 20 + [0.2] * 3)
    assert [each is not None for each in drops[59:]] == 5 * [True] + 16 * [False] + 3 * [True]


def test_a_fall_that_is_never_regained_keeps_its_first_step() -> None:
    drops = found(CALM + [0.2] * 1000)
    assert drops[-1] is not None and drops[-1].since == 51


def test_a_learning_run_and_a_short_one_are_not_reported() -> None:
    rng = random.Random(7)
    learning = [
        0.1 + 0.8 / (1 + math.exp(-(step - 150) / 20)) + rng.gauss(0, 0.02) for step in range(400)
    ]
    assert first(found(learning)) is None
    assert first(found(CALM[:20] + [0.1] * 5)) is None


def test_the_first_step_of_a_fall_after_a_rise_is_not_in_the_rise() -> None:
    rising = [0.2 + 0.6 * step / 100 for step in range(100)]
    drop = first(found(rising + [0.3] * 10))
    assert drop is not None and drop.since == 101


def test_equal_returns_and_nonfinite_means_are_not_a_fall() -> None:
    assert first(found([0.7] * 300, std=0.0)) is None
    assert first(found([1.0, 1.0 - 1e-12] * 150, std=0.0)) is None
    assert first(found([*CALM, math.nan, math.inf, -math.inf, *CALM])) is None


def test_a_constant_reward_that_falls_to_another_constant_is_found_at_once() -> None:
    drop = first(found([1.0] * 60 + [0.0] * 3, std=0.0))
    assert drop is not None and drop.found == 61
