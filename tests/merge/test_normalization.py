"""REINFORCE++: normalisation over the tokens of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.merge.normalization import normalise_over_tokens

Pairs = list[tuple[float, int]]


def normalise(pairs: Pairs) -> np.ndarray:
    """One advantage and one token count a trajectory."""
    values = normalise_over_tokens(
        [np.array([a], float) for a, _ in pairs], [np.array([n]) for _, n in pairs]
    )
    return np.concatenate(values)


def test_the_mean_and_the_deviation_are_over_tokens() -> None:
    # By hand: m = (1 - 3) / 4, s^2 = (1.5^2 + 3 * .5^2) / 4 = .75.
    np.testing.assert_allclose(normalise([(1, 1), (-1, 3)]), [1.732049, -0.577350], atol=1e-6)


pairs_strategy = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda x: x / 4), st.integers(1, 9)), min_size=1, max_size=8
)


@given(pairs_strategy)
def test_over_its_tokens_a_step_has_mean_zero_and_deviation_one(pairs: Pairs) -> None:
    values, counts = normalise(pairs), np.array([n for _, n in pairs])
    assert abs((values * counts).sum()) < 1e-6
    if len({a for a, _ in pairs}) == 1:
        assert (values == 0).all()
    else:
        assert (values**2 * counts).sum() / counts.sum() == pytest.approx(1, abs=1e-4)


@given(pairs_strategy)
def test_a_count_is_as_good_as_so_many_tokens(pairs: Pairs) -> None:
    tokens = [np.full(n, a) for a, n in pairs]
    alone = normalise_over_tokens(tokens, [np.ones(n, np.int64) for _, n in pairs])
    np.testing.assert_allclose([each[0] for each in alone], normalise(pairs), atol=1e-9)


def test_nothing_to_normalise_is_left_alone() -> None:
    assert normalise_over_tokens([], []) == []
    assert normalise([(2.0, 0)]).tolist() == [0.0]


def test_what_does_not_fit_together_is_refused_with_its_place() -> None:
    one, two = np.ones(1), np.ones(2)
    with pytest.raises(ValueError, match="trajectory 1 has 2 advantages for 1 token counts"):
        normalise_over_tokens([one, two], [np.ones(1, np.int64)] * 2)
    with pytest.raises(ValueError, match=r"trajectory 0 .* finite"):
        normalise([(float("inf"), 1)])


def test_counts_of_other_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="token counts of 0 trajectories for the advantages of 1"):
        normalise_over_tokens([np.array([1.0])], [])
