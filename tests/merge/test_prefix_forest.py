"""Tests of the forest of shared prefixes: every distinct prefix once, every sample readable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import ids

from actors.branches import common_prefix
from actors.merge.prefix_sharing import (
    PrefixForest,
    Size,
    build_flat,
    build_forest,
    measure,
    prefix_order,
)

# With few distinct ids, samples share prefixes, are equal, or are prefixes of each other.
samples_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(ids), min_size=1, max_size=12
)


def distinct_prefixes(samples: list[np.ndarray]) -> set[tuple[int, ...]]:
    return {tuple(each[:stop].tolist()) for each in samples for stop in range(1, len(each) + 1)}


def tokens_by_path(forest: PrefixForest) -> list[tuple[int, ...]]:
    """Return the whole path of every token, found only through the parents of segments."""
    ends = np.cumsum(forest.segment_lengths)
    whole: list[tuple[int, ...]] = []
    found = []
    for end, length, parent in zip(
        ends, forest.segment_lengths, forest.segment_parents, strict=True
    ):
        path = () if parent == -1 else whole[parent]
        for token in forest.token_ids[end - length : end].tolist():
            path = (*path, token)
            found.append(path)
        whole.append(path)
    return found


def test_the_example_of_the_forests_docstring() -> None:
    forest = build_forest([ids([1, 2, 3]), ids([1, 2, 4, 5]), ids([1, 2])])
    assert forest.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert forest.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert forest.segment_lengths.tolist() == [2, 1, 2]
    assert forest.segment_parents.tolist() == [-1, 0, 0]
    assert [path.tolist() for path in forest.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 1]]


def test_branches_at_the_same_token_split_a_segment_only_once() -> None:
    forest = build_forest([ids([7, 1]), ids([7, 2]), ids([7, 3]), ids([8])])
    assert forest.token_ids.tolist() == [7, 1, 2, 3, 8]
    assert forest.segment_parents.tolist() == [-1, 0, 0, 0, -1]


def test_a_full_prefix_and_an_equal_sample_add_and_split_nothing() -> None:
    forest = build_forest([ids([4, 5]), ids([4, 5, 6, 7]), ids([4, 5]), ids([4, 5, 6, 7])])
    assert forest.segment_lengths.tolist() == [4] and forest.segment_parents.tolist() == [-1]
    assert [len(path) for path in forest.paths] == [2, 4, 2, 4]


@given(samples_strategy)
def test_every_sample_reads_back_along_its_path(samples: list[np.ndarray]) -> None:
    forest = build_forest(samples)
    paths = tokens_by_path(forest)
    for sample, path in zip(samples, forest.paths, strict=True):
        np.testing.assert_array_equal(forest.token_ids[path], sample)
        np.testing.assert_array_equal(forest.position_ids[path], np.arange(len(sample)))
        assert [paths[row] for row in path] == [
            tuple(sample[:stop].tolist()) for stop in range(1, len(sample) + 1)
        ]


@given(samples_strategy)
def test_there_is_one_token_per_distinct_prefix(samples: list[np.ndarray]) -> None:
    forest = build_forest(samples)
    paths = tokens_by_path(forest)
    assert len(paths) == len(set(paths)) == forest.token_ids.shape[0]
    assert set(paths) == distinct_prefixes(samples)
    size = measure(samples, attention_tokens=10, share_prefixes=True)
    assert size.num_tokens == len(paths)
    assert size.cost == pytest.approx(sum(1 + (2 * len(path) - 1) / 10 for path in paths))


@given(samples_strategy)
def test_no_two_children_of_a_segment_begin_with_the_same_token(
    samples: list[np.ndarray],
) -> None:
    forest = build_forest(samples)
    starts = np.cumsum(forest.segment_lengths) - forest.segment_lengths
    children = list(zip(forest.segment_parents, forest.token_ids[starts], strict=True))
    assert len(children) == len(set(children))
    # A segment with a single child would form one segment with it.
    inner = forest.segment_parents[forest.segment_parents >= 0]
    assert (np.unique(inner, return_counts=True)[1] > 1).all()


@given(samples_strategy, st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_only_the_order_of_paths(
    samples: list[np.ndarray], random: object
) -> None:
    order = list(range(len(samples)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight, turned = build_forest(samples), build_forest([samples[index] for index in order])
    for name in ("token_ids", "position_ids", "segment_lengths", "segment_parents"):
        np.testing.assert_array_equal(getattr(straight, name), getattr(turned, name))
    for position, index in enumerate(order):
        np.testing.assert_array_equal(straight.paths[index], turned.paths[position])


@given(samples_strategy)
def test_a_flat_row_shares_nothing(samples: list[np.ndarray]) -> None:
    flat = build_flat(samples)
    assert flat.token_ids.tolist() == np.concatenate(samples).tolist()
    assert flat.segment_lengths.tolist() == [len(sample) for sample in samples]
    assert (flat.segment_parents == -1).all()
    for sample, path in zip(samples, flat.paths, strict=True):
        np.testing.assert_array_equal(flat.token_ids[path], sample)
        np.testing.assert_array_equal(flat.position_ids[path], np.arange(len(sample)))


def test_common_prefixes_and_the_order_by_prefix() -> None:
    assert common_prefix(ids([1, 2, 3]), ids([1, 2, 4])) == 2
    assert common_prefix(ids([1, 2]), ids([1, 2, 4])) == 2
    assert common_prefix(ids([]), ids([1])) == 0
    assert prefix_order([ids([1, 2]), ids([0]), ids([1, 2, 3])]) == [1, 2, 0]
    # Ids are compared as numbers, whatever the byte order of the machine.
    assert prefix_order([ids([256]), ids([1]), ids([70_000])]) == [1, 0, 2]


def test_the_sizes_of_the_forests_docstring() -> None:
    samples = [ids([1, 2, 3]), ids([1, 2, 4, 5])]
    shared = measure(samples, attention_tokens=10, share_prefixes=True)
    assert shared == Size(num_tokens=5, cost=pytest.approx(7.1))
    flat = measure(samples, attention_tokens=10, share_prefixes=False)
    assert flat == Size(num_tokens=7, cost=pytest.approx(9.5))
