"""Tests of the normalisation of advantages over the tokens of a step (REINFORCE++)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.merge.advantages import normalise_over_tokens

Pairs = list[tuple[float, int]]


def normalise(pairs: Pairs) -> np.ndarray:
    """Normalise trajectories given as (advantage, number of tokens), and return the advantages."""
    values = normalise_over_tokens([np.full(n, a, float) for a, n in pairs])
    assert all(np.ptp(each) == 0 for each in values)
    return np.array([each[0] for each in values])


def test_the_mean_and_the_deviation_are_over_tokens() -> None:
    # By hand: m = (1 - 3) / 4, s^2 = (1.5^2 + 3 * .5^2) / 4 = .75.
    np.testing.assert_allclose(normalise([(1, 1), (-1, 3)]), [1.732049, -0.577350], atol=1e-6)


pairs_strategy = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda x: x / 4), st.integers(1, 9)), min_size=1, max_size=8
)


@given(pairs_strategy)
def test_normalised_tokens_have_mean_zero_and_deviation_one(pairs: Pairs) -> None:
    values, counts = normalise(pairs), np.array([n for _, n in pairs])
    assert abs((values * counts).sum()) < 1e-6
    if len({a for a, _ in pairs}) == 1:
        assert (values == 0).all()
    else:
        assert (values**2 * counts).sum() / counts.sum() == pytest.approx(1, abs=1e-4)


def test_without_tokens_or_deviation_nothing_is_normalised() -> None:
    assert normalise_over_tokens([]) == []
    assert [each.shape for each in normalise_over_tokens([np.empty(0), np.ones(2)])] == [(0,), (2,)]
