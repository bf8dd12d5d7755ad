"""Tests of reward shaping: values from papers or by hand, and rewards that must not change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    turns_strategy,
)

from actors.algorithm import KlRewardSettings, OverlongSettings, RewardSettings
from actors.merge.groups import (
    add_at_end,
    clip_return,
    is_end_missing,
    kl_rewards,
    overlong_punishment,
    shaped_rewards,
    total,
    turn_rewards,
)
from actors.types import FinishReason, Turn


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    # DAPO, equation 13, with its numbers: L_max 20480, L_cache 4096.
    [(0, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_the_overlong_punishment_of_dapo(num_tokens: int, expected: float) -> None:
    assert overlong_punishment(num_tokens, max_tokens=20480, cache_tokens=4096) == expected


def test_the_overlong_length_is_that_of_all_turns_of_the_trajectory() -> None:
    # Three turns of 6 sampled tokens: (10 - 18) / 10; observations do not count.
    trajectory = make_trajectory(linear_turns(3, reward=1.0))
    settings = RewardSettings(overlong=OverlongSettings(max_tokens=20, cache_tokens=10, factor=0.5))
    np.testing.assert_allclose(shaped_rewards(trajectory, settings), [0, 0, 1 - 0.4])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 3], [1, 1]), ([-3, -1], [-3, 1]), ([1, 0.5], [1, 0.5]), ([], [])],
)
def test_clipping_a_return_changes_only_the_last_turn(
    rewards: list[float], expected: list[float]
) -> None:
    assert clip_return(np.array(rewards, float), low=-2, high=2).tolist() == expected


@pytest.mark.parametrize("rewards", [[1e30], [-1e30, 1e17], [1e17, 0.5]])
def test_a_return_too_large_to_be_corrected_is_clipped_too(rewards: list[float]) -> None:
    clipped = clip_return(np.array(rewards), low=-1, high=1)
    assert clipped.tolist() == [0.0] * (len(rewards) - 1) + [1.0 if sum(rewards) > 0 else -1.0]


def test_k3_of_a_token_with_an_extreme_ratio_is_finite() -> None:
    logprobs, reference = np.array([-9999, -1], np.float32), np.array([-1, -1], np.float32)
    kl = KlRewardSettings(estimator="k3", coefficient=1.0)
    penalties = kl_rewards(logprobs, reference, kl=kl)
    assert penalties.tolist() == pytest.approx([-(math.expm1(20) - 20), 0.0])


def test_an_answer_without_an_end_is_penalised() -> None:
    turn = make_turn([1], [2, 3], reward=1.0)
    cut_off = replace(turn, finish_reason=FinishReason.LENGTH)
    settings = RewardSettings(missing_end_penalty=0.25)
    assert shaped_rewards(make_trajectory([turn, cut_off]), settings).tolist() == [1.0, 0.75]
    assert shaped_rewards(make_trajectory([cut_off, turn]), settings).tolist() == [1.0, 1.0]
    assert not is_end_missing(make_trajectory([]))


@pytest.mark.parametrize(
    ("estimate", "logprob", "reference", "expected"),
    [
        # d = log p_ref - log p = -ln 2: k1 = ln 2; k3 = 1/2 - 1 + ln 2.
        ("k1", 0.0, -math.log(2), -0.693147),
        ("k3", 0.0, -math.log(2), -0.193147),
        # d = ln 2: k1 = -ln 2, paid back; k3 = 2 - 1 - ln 2, never negative.
        ("k1", -math.log(2), 0.0, 0.693147),
        ("k3", -math.log(2), 0.0, -0.306853),
        ("k3", -1.0, -1.0, 0.0),
    ],
)
def test_the_kl_penalty(
    estimate: Literal["k1", "k3"],
    logprob: float,
    reference: float,
    expected: float,
) -> None:
    for coefficient in (1.0, 0.1):
        kl = KlRewardSettings(estimator=estimate, coefficient=coefficient)
        found = kl_rewards(
            np.array([logprob], np.float32), np.array([reference], np.float32), kl=kl
        )
        np.testing.assert_allclose(found, [coefficient * expected], atol=1e-6)


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), max_size=20))
def test_k3_is_never_a_reward_and_k1_is_the_difference(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = (np.array([p[i] for p in pairs], np.float32) for i in (0, 1))
    k3 = kl_rewards(logprobs, reference, kl=KlRewardSettings(estimator="k3", coefficient=2.0))
    assert (k3 <= 0).all()
    k1 = kl_rewards(logprobs, reference, kl=KlRewardSettings(estimator="k1", coefficient=2.0))
    wide = reference.astype(np.float64) - logprobs.astype(np.float64)
    np.testing.assert_array_equal(k1, 2 * wide)


@given(turns_strategy)
def test_without_settings_rewards_are_those_of_the_environment(turns: list[Turn]) -> None:
    trajectory = make_trajectory(turns)
    rewards = shaped_rewards(trajectory, RewardSettings())
    assert rewards.tolist() == [turn.reward for turn in turns]
    # The sum is exact: training must not change by a rounding error.
    assert total(rewards) == trajectory.episode_return


@given(turns_strategy, st.floats(-3, 3))
def test_an_added_amount_goes_to_the_last_turn(turns: list[Turn], amount: float) -> None:
    before = turn_rewards(make_trajectory(turns))
    after = add_at_end(before, amount)
    assert after[:-1].tolist() == before[:-1].tolist()
    if turns:
        assert total(after) == pytest.approx(total(before) + amount)


def test_shaping_clips_then_punishes_overlong_then_a_missing_end() -> None:
    cut_off = replace(make_turn([1], [2] * 10, reward=5.0), finish_reason=FinishReason.LENGTH)
    settings = RewardSettings(
        clip=(-1, 1),
        overlong=OverlongSettings(max_tokens=10, cache_tokens=5),
        missing_end_penalty=0.5,
    )
    # 5 -> 1, less 1, less 1/2: penalties are not clipped away.
    assert shaped_rewards(make_trajectory([cut_off]), settings).tolist() == [-0.5]
