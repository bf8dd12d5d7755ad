"""Tests of the codec: it loses nothing, and its size grows only with tokens that are not shared."""

from __future__ import annotations

import pickle
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    trajectories_strategy,
)
from worlds.checks.same import assert_same_trajectory

from actors.trajectory_queue.codec import TrajectoryBlock, decode, encode, without_shared
from actors.types import Outcome, Trajectory, Turn, summarize


@given(st.lists(trajectories_strategy(), max_size=4))
def test_decoding_restores_the_encoded_trajectories(trajectories: list[Trajectory]) -> None:
    block = pickle.loads(pickle.dumps(encode(trajectories)))
    assert block.num_rows == len(trajectories)
    for row, expected in enumerate(trajectories):
        assert_same_trajectory(decode(block, row), expected)


def test_token_rewards_and_expert_records_are_restored_for_branching_turns() -> None:
    recorded = {
        "token_rewards": np.array([0.25, 0.75], np.float32),
        "expert_indices": np.arange(4, dtype=np.uint8).reshape(1, 2, 2),
    }
    turns = [make_turn([1, 2, 3], [4, 5], reward=1.0), make_turn([1, 2, 9], [4, 5], reward=1.0)]
    trajectory = make_trajectory([replace(turn, **recorded) for turn in turns])
    assert_same_trajectory(decode(encode([trajectory]), 0), trajectory)


def test_tokens_shared_by_branches_are_sent_once() -> None:
    main = linear_turns(2, prompt=50, sampled=10, observed=10)
    aside = make_turn([1, 2, 3], [4])
    tail = main[1].prompt_token_ids.tolist() + main[1].sampled_token_ids.tolist() + [7, 7]
    sent = without_shared(make_trajectory([*main, aside, make_turn(tail, [8])]))
    # The last turn extends the main branch.
    assert [sample.num_tokens for sample in sent.samples] == [80 + 3, 4]
    # A repeated turn branches off, and only its answer is sent again.
    again = without_shared(make_trajectory([*main, main[1]]))
    assert [sample.num_tokens for sample in again.samples] == [80, 10]


def thoughts_stripped(num_turns: int) -> list[Turn]:
    """Return turns of which none extends another: each prompt lacks the 20 tokens of a thought."""
    rng = np.random.default_rng(0)
    history = rng.integers(5, 5000, 50).tolist()
    turns = []
    for _ in range(num_turns):
        thought, answer, observed = (rng.integers(5, 5000, n).tolist() for n in (20, 10, 30))
        turns.append(make_turn(history, thought + answer))
        history = history + answer + observed
    return turns


def test_the_size_of_rewritten_histories_is_linear_in_the_number_of_turns() -> None:
    sizes = {}
    for num_turns in (20, 40, 80):
        trajectory = make_trajectory(thoughts_stripped(num_turns))
        assert len(trajectory.samples) == num_turns
        own = sum(sample.num_tokens for sample in without_shared(trajectory).samples)
        # A turn adds its thought and answer, and the answer and observation of the previous turn.
        assert own == 50 + 30 + (num_turns - 1) * 70
        sizes[num_turns] = encode([trajectory]).row_num_bytes(0)
    growth = (sizes[80] - sizes[40]) / (sizes[40] - sizes[20])
    # Positions are encoded as numbers, which need one or two more bytes as they grow.
    assert growth == pytest.approx(2, rel=0.02)


def test_the_size_of_each_row_is_known() -> None:
    block = encode([make_trajectory(linear_turns(n, seed=n)) for n in (1, 2, 3)])
    assert sum(block.row_num_bytes(row) for row in range(3)) == block.data.nbytes
    summary = summarize(decode(block, 1), num_bytes=block.row_num_bytes(1))
    assert summary.num_turns == 2 and summary.num_bytes > 0


def test_a_missing_row_is_refused() -> None:
    with pytest.raises(IndexError, match="row 1 of a block of 1"):
        decode(encode([make_trajectory([])]), 1)


@pytest.mark.parametrize(("reward", "is_graded"), [(0.0, False), (1.0, True)])
def test_a_trajectory_of_an_older_version_counts_as_graded_by_its_rewards(
    reward: float, is_graded: bool
) -> None:
    cut_off = make_trajectory(
        [make_turn([1], [2], reward=reward)], outcome=Outcome.TRUNCATED_TOKENS
    )
    assert cut_off.is_graded is is_graded
    assert all(replace(cut_off, was_rewarded=each).is_graded is each for each in (True, False))
    older = msgspec.msgpack.decode(encode([replace(cut_off, was_rewarded=True)]).data.data)
    del older["was_rewarded"], older["left_out"]
    message = np.frombuffer(msgspec.msgpack.encode(older), np.uint8)
    found = decode(TrajectoryBlock(data=message, offsets=(0, len(message))), 0)
    assert (found.is_graded, found.left_out) == (is_graded, {})
