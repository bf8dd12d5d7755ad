"""Tests of the comparison of returns that the queue and the merge actor share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.merge.advantages import reason_without_signal
from actors.outcomes import are_equal


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([], True),
        ([7.0], True),
        ([0.1 + 0.2, 0.3], True),
        ([0.3, 0.4], False),
        # The tolerance is relative to the largest, and to 1 at least.
        ([1e12, 1e12 + 100], True),
        ([0.0, 1e-8], False),
    ],
)
def test_equal_returns_by_example(returns: list[float], expected: bool) -> None:
    assert are_equal(returns) is expected


@given(st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=1, max_size=5))
def test_a_group_has_a_signal_exactly_when_its_returns_differ(returns: list[float]) -> None:
    assert (reason_without_signal(returns) is not None) is are_equal(returns)
