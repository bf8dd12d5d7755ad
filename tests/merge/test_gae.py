"""Tests of GAE over action tokens: examples of the docs, a plain loop, truncation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.algorithm import CriticSettings, Truncation
from actors.merge.advantages import end_value, token_advantages
from actors.outcomes import Disposition

ZEROS, VALUES = np.zeros(3), np.array([0.5, 0.6, 0.7])


@pytest.mark.parametrize(
    ("is_truncated", "truncation", "expected"),
    [
        # docs/semantics.md: V(s_T) = .8 after a truncated trajectory, 0 after a terminated one.
        (True, "bootstrap", [0.3, 0.2, 0.1]),
        (True, "terminal", [-0.5, -0.6, -0.7]),
        (True, "penalty", [-0.5, -0.6, -0.7]),
        (False, "bootstrap", [-0.5, -0.6, -0.7]),
    ],
)
def test_truncated_is_not_terminated(
    is_truncated: bool, truncation: Truncation, expected: list[float]
) -> None:
    end = end_value(0.8, is_truncated=is_truncated, truncation=truncation)
    found = token_advantages(ZEROS, VALUES, discount=1.0, decay=1.0, end_value=end)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_decay_weighs_later_errors() -> None:
    # By hand, discount 1, decay .5: errors .1, .1, 1 - .7 = .3; .1 + .5 (.1 + .5 * .3) = .225.
    rewards = np.array([0.0, 0.0, 1.0])
    found = token_advantages(rewards, VALUES, discount=1.0, decay=0.5)
    np.testing.assert_allclose(found, [0.225, 0.25, 0.3], atol=1e-12)


numbers = st.integers(-8, 8).map(lambda x: x / 4)


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    numbers,
)
def test_advantages_equal_those_of_a_plain_loop(
    tokens: list[tuple[float, float]], discount: float, decay: float, end: float
) -> None:
    rewards, values = (np.array(column) for column in zip(*tokens, strict=True))
    expected, running, next_value = [], 0.0, end
    for reward, value in reversed(tokens):
        running = reward + discount * next_value - value + discount * decay * running
        next_value = value
        expected.append(running)
    found = token_advantages(rewards, values, discount=discount, decay=decay, end_value=end)
    np.testing.assert_allclose(found, expected[::-1], atol=1e-10)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), numbers)
def test_with_discount_and_decay_one_value_targets_are_returns_to_go(
    tokens: list[tuple[float, float]], end: float
) -> None:
    rewards, values = (np.array(column) for column in zip(*tokens, strict=True))
    found = token_advantages(rewards, values, discount=1.0, decay=1.0, end_value=end)
    to_go = np.cumsum(rewards[::-1])[::-1] + end
    np.testing.assert_allclose(found + values, to_go, atol=1e-10)


@pytest.mark.parametrize(
    ("truncation", "disposition"),
    [
        ("bootstrap", Disposition.TRAIN),
        ("terminal", Disposition.TRAIN),
        ("mask", Disposition.MASK),
        ("penalty", Disposition.TRAIN_PENALISED),
        ("drop", Disposition.DROP),
    ],
)
def test_each_truncation_setting_has_its_outcome_rule(
    truncation: Truncation, disposition: Disposition
) -> None:
    settings = CriticSettings(truncation=truncation, truncation_penalty=0.5)
    assert settings.truncation_rule.disposition is disposition
    assert settings.truncation_rule.penalty == (0.5 if truncation == "penalty" else 0)
