"""Tests of the rows for scores and values: every sample once, equally many rows per rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.merge.packing import deal_rows


def test_the_example_of_the_docstring() -> None:
    assert deal_rows([4, 9, 5], num_ranks=2, budget=10) == [[[1]], [[2, 0]]]


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 4), st.integers(5, 40))
def test_every_sample_is_in_one_row_within_the_budget(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    dealt = deal_rows(lengths, num_ranks=num_ranks, budget=budget)
    assert len(dealt) == num_ranks and len({len(rows) for rows in dealt}) == 1
    rows = [row for of_rank in dealt for row in of_rank]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= budget or len(row) == 1 for row in rows)
