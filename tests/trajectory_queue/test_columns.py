"""Columnar encoding: lossless, each token once, read without a copy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.same import assert_same_trajectory
from worlds.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    trajectories_strategy,
)

from actors.trajectory_queue.columns import decode, encode
from actors.types import Trajectory, summarize


@given(st.lists(trajectories_strategy(), max_size=4))
def test_decoding_gives_back_what_was_encoded(trajectories: list[Trajectory]) -> None:
    columns = pickle.loads(pickle.dumps(encode(trajectories)))
    assert columns.num_rows == len(trajectories)
    for row, expected in enumerate(trajectories):
        assert_same_trajectory(decode(columns, row), expected)


def test_a_trajectory_whose_lengths_disagree_survives_the_round_trip() -> None:
    broken = make_trajectory([make_turn([1, 2], [3, 4, 5], logprobs=[-1.0])])
    assert_same_trajectory(decode(encode([broken]), 0), broken)


def test_a_linear_trajectory_stores_each_token_once_and_is_decoded_without_a_copy() -> None:
    trajectory = make_trajectory(linear_turns(5, prompt=9, sampled=6, observed=4))
    columns = encode([make_trajectory(linear_turns(2, seed=1)), trajectory])
    own = int(columns.row_offsets[2, 2] - columns.row_offsets[1, 2])
    assert own == 9 + 5 * 6 + 4 * 4
    for turn in decode(columns, 1).turns:
        assert np.shares_memory(turn.prompt_token_ids, columns.token_ids)
        assert np.shares_memory(turn.sampled_token_ids, columns.token_ids)
        assert np.shares_memory(turn.logprobs, columns.logprobs)


def test_a_branch_off_an_earlier_turn_shares_its_tokens() -> None:
    main = linear_turns(2, prompt=50, sampled=10, observed=10)
    aside = make_turn([1, 2, 3], [4])
    tail = main[1].prompt_token_ids.tolist() + main[1].sampled_token_ids.tolist() + [7, 7]
    columns = encode([make_trajectory([*main, aside, make_turn(tail, [8])])])
    assert columns.token_ids.shape[0] == (50 + 10 + 10 + 10) + (3 + 1) + (2 + 1)


def test_row_bytes_add_up_to_the_bytes_of_the_arrays() -> None:
    columns = encode([make_trajectory(linear_turns(n, seed=n)) for n in (1, 2, 3)])
    arrays = [columns.turns, columns.token_ids, columns.logprobs, columns.spans]
    arrays += [columns.samples, columns.token_rewards, columns.experts]
    arrays += [columns.component_names, columns.component_values, columns.row_offsets]
    assert columns.num_bytes == sum(array.nbytes for array in arrays)
    summary = summarize(decode(columns, 1), num_bytes=columns.row_num_bytes(1))
    assert summary.num_turns == 2 and summary.num_bytes > 0


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="row 1 of a block of 1"):
        decode(encode([make_trajectory([])]), 1)
