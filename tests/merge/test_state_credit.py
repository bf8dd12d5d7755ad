"""Tests of credit by state (GiGPO), by hand and against the exact policy gradient."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from worlds.builders.settings import step_settings

from actors.algorithm import Baseline, Scale, StateCreditSettings
from actors.merge.advantages import group_advantages, state_advantages
from service.config.file import ConfigError, parse_config

PLAIN = {"baseline": Baseline.MEAN, "scale": Scale.NONE}


def test_turns_of_the_same_state_are_compared_and_others_get_zero() -> None:
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 0.0])]
    first, second = state_advantages(rewards, [["s", "a"], ["s", "b"]], discount=0.5, **PLAIN)
    assert first.tolist() == [0.25, 0.0] and second.tolist() == [-0.25, 0.0]


def test_a_state_counts_at_any_turn_and_in_trajectories_of_any_length() -> None:
    # R: [1, 1, 1], [0], [4]; state b: 1 (turn 1), 0 (turn 0), 4 (turn 0), mean 5/3.
    rewards = [np.array([0.0, 0.0, 1.0]), np.array([0.0]), np.array([4.0])]
    found = state_advantages(rewards, [["a", "b", "c"], ["b"], ["b"]], discount=1.0, **PLAIN)
    assert found[0] == pytest.approx([0.0, 1 - 5 / 3, 0.0])
    assert found[1] == pytest.approx([-5 / 3]) and found[2] == pytest.approx([4 - 5 / 3])


def test_the_scale_is_that_of_group_advantages_and_zero_turns_have_no_state() -> None:
    rewards = [np.array([1.0]), np.array([0.0]), np.empty(0)]
    found = state_advantages(rewards, [["s"], ["s"], []], discount=1.0)
    assert [each.tolist() for each in found[:2]] == [[0.5 / (0.5**0.5 + 1e-6)], [-found[0][0]]]
    assert found[2].shape == (0,)


LOGITS = np.array([[0.3, -0.2], [0.8, 0.1], [-0.5, 0.4]])
PAYS = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): -0.5, (1, 1): 2.0}
SIZE, WEIGHT = 3, 0.7


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits)
    return raised / raised.sum()


def score(state: int, action: int) -> np.ndarray:
    """Return the gradient of log pi(action | state) with respect to all logits."""
    found = np.zeros_like(LOGITS)
    found[state] = -softmax(LOGITS[state])
    found[state, action] += 1
    return found


def episodes(*, meets_by_action: bool) -> list[tuple[float, list[int], tuple[int, int], float]]:
    """Return probability, states, actions and return of the four plays of a game of two turns.

    The second state depends on the first action, or is the same for all.
    """
    found = []
    for first, second in product(range(2), repeat=2):
        state = 1 + first if meets_by_action else 1
        chance = softmax(LOGITS[0])[first] * softmax(LOGITS[state])[second]
        found.append((float(chance), [0, state], (first, second), PAYS[first, second]))
    return found


def expected_estimate(*, meets_by_action: bool) -> np.ndarray:
    """Return the mean of the estimate over every group, with leave-one-out and no scale."""
    total = np.zeros_like(LOGITS)
    chosen = {"baseline": Baseline.LEAVE_ONE_OUT, "scale": Scale.NONE}
    for group in product(episodes(meets_by_action=meets_by_action), repeat=SIZE):
        chance = np.prod([each[0] for each in group])
        whole = group_advantages([each[3] for each in group], **chosen)
        rewards = [np.array([0.0, each[3]]) for each in group]
        of_states = state_advantages(rewards, [each[1] for each in group], discount=1.0, **chosen)
        for (_, states, actions, _), own, turns in zip(group, whole, of_states, strict=True):
            for state, action, value in zip(states, actions, turns, strict=True):
                total += chance / SIZE * (own + WEIGHT * value) * score(state, action)
    return total


def exact_gradient(*, meets_by_action: bool, of_state: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean return, with each state's part multiplied by its factor."""
    total = np.zeros_like(LOGITS)
    for chance, states, actions, value in episodes(meets_by_action=meets_by_action):
        for state, action in zip(states, actions, strict=True):
            total += chance * value * of_state[state] * score(state, action)
    return total


def test_the_estimate_is_a_multiple_of_the_gradient_if_all_meet_the_same_states() -> None:
    exact = exact_gradient(meets_by_action=False, of_state=np.full(3, 1 + WEIGHT))
    found = expected_estimate(meets_by_action=False)
    assert np.abs(exact).max() > 0.1
    np.testing.assert_allclose(found, exact, atol=1e-12)


def test_a_states_part_counts_by_the_chance_that_another_member_meets_it() -> None:
    reached = np.array([1.0, *softmax(LOGITS[0])])
    is_met = 1 - (1 - reached) ** (SIZE - 1)
    exact = exact_gradient(meets_by_action=True, of_state=1 + WEIGHT * is_met)
    np.testing.assert_allclose(expected_estimate(meets_by_action=True), exact, atol=1e-12)
    plain = exact_gradient(meets_by_action=True, of_state=np.full(3, 1 + WEIGHT))
    assert np.abs(exact - plain).max() > 0.01


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"baseline": "none", "scale": "none"}, ["baseline none", "mean or leave_one_out"]),
        ({"scale": "mean"}, ["algorithm.scale mean", "std or none"]),
        ({"turn_discount": 0.9}, ["algorithm.turn_discount", "leave one out"]),
        ({"max_variance_refills": 2}, ["max_variance_refills is 2", "expected 0"]),
    ],
)
def test_settings_that_contradict_credit_by_state_are_refused(
    algorithm: dict[str, object], words: list[str]
) -> None:
    tree = {
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "algorithm": {"state_credit": {"weight": 0.5}, **algorithm},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, source="test")
    assert all(word in str(caught.value) for word in words)


def test_credit_by_state_is_off_by_default() -> None:
    assert step_settings().algorithm.state_credit is None
    assert StateCreditSettings() == StateCreditSettings(weight=1.0, discount=1.0)
