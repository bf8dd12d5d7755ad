"""Tests that the sample builder gives the same samples as the reference, `merge_turns`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    random_turns,
    whole_turns,
)
from worlds.checks.prefix_merge import merge_turns
from worlds.checks.same import assert_same_samples

from actors.environment.sample_builder import SampleBuilder, build_samples
from actors.types import BranchReason, Sample, Turn, VersionSpan

seeds = st.integers(0, 2**32 - 1)


def turns_of(seed: int, *, max_turns: int = 8) -> list[Turn]:
    """Return random turns; some have rewards by token, routing records or two versions."""
    rng = np.random.default_rng(seed)
    turns = random_turns(rng, max_turns=max_turns)
    for index, turn in enumerate(turns):
        count = turn.num_sampled
        if rng.random() < 0.5:
            rewards = rng.choice([0.0, 0.5, 1.0], count).astype(np.float32)
            turn = replace(turn, token_rewards=rewards, reward=float(rewards.sum()))
        if rng.random() < 0.5:
            shape = (rng.integers(0, count + 1), 2, 3)
            turn = replace(turn, expert_indices=rng.integers(0, 9, shape).astype(np.int16))
        if count > 1 and rng.random() < 0.3:
            cut = int(rng.integers(1, count))
            first = VersionSpan(version=1, start=0, end=cut)
            spans = (first, VersionSpan(version=2, start=cut, end=count))
            turn = replace(turn, version_spans=spans)
        turns[index] = turn
    return turns


def build_and_compare(turns: list[Turn]) -> tuple[Sample, ...]:
    samples = build_samples(turns, trajectory_id="t")
    assert_same_samples(samples, merge_turns(turns, trajectory_id="t"))
    return samples


@given(seeds)
def test_adding_turns_by_whole_prompts_gives_the_samples_of_merge_turns(seed: int) -> None:
    build_and_compare(turns_of(seed, max_turns=12))


@given(seeds)
def test_appending_continued_turns_gives_the_samples_of_merge_turns(seed: int) -> None:
    turns = turns_of(seed)
    expected = merge_turns(turns, trajectory_id="t")
    follows = {
        later.index: earlier.index
        for sample in expected
        for earlier, later in zip(sample.turns, sample.turns[1:], strict=False)
    }
    builder = SampleBuilder("t")
    for index, turn in enumerate(turns):
        # A turn loop only knows that a turn continues the one before it.
        if follows.get(index) == index - 1:
            builder.append(turn)
        else:
            builder.add(turn)
    assert_same_samples(builder.samples(), expected)


@given(seeds)
def test_the_turns_of_samples_give_the_same_samples(seed: int) -> None:
    trajectory = make_trajectory(turns_of(seed))
    again = merge_turns(whole_turns(trajectory), trajectory_id=trajectory.trajectory_id)
    assert_same_samples(again, trajectory.samples)


@given(seeds)
@settings(max_examples=200)
def test_turns_of_interleaved_branching_chats_give_the_samples_of_merge_turns(
    seed: int,
) -> None:
    # With few distinct ids, many samples are equal or are prefixes of others.
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    histories = [[7, number] for number in range(rng.integers(1, 4))]
    for _ in range(rng.integers(1, 25)):
        number = int(rng.integers(len(histories)))
        history = histories[number]
        # Samples a thought that the next prompt leaves out; an older turn may have the same one.
        turns.append(make_turn(history, [int(rng.integers(3, 5)), 5][: rng.integers(0, 3)]))
        if rng.random() < 0.8:
            histories[number] = [*history, *rng.integers(0, 3, rng.integers(1, 3)).tolist()]
        else:
            histories[number] = history[: rng.integers(1, len(history) + 1)]
    build_and_compare(turns)


@given(st.lists(st.integers(1, 1999), min_size=1, max_size=6), st.booleans())
@example([1000], False)
@example([999], True)
@settings(max_examples=30)
def test_the_exact_token_at_which_long_samples_differ_is_found(
    places: list[int], continues: bool
) -> None:
    line = list(range(1, 2001))
    turns = [make_turn(line[:1000], line[1000:])]
    for place in places:
        more = [5] if continues else []
        turns += [make_turn([*line[:place], 0, *line[place + 1 :]], more)]
        turns += [make_turn(line[:place], more)]
    build_and_compare(turns)


@pytest.mark.parametrize("num_common", [0, 3])
def test_a_sample_that_is_a_prefix_of_another_is_extended_until_it_grows(num_common: int) -> None:
    head = [7] * num_common
    first = [make_turn([*head, 1, 2, 3], [4]), make_turn([*head, 1], [2])]
    extended = build_and_compare([*first, make_turn([*head, 1, 2, 3], [9])])
    assert [[turn.index for turn in sample.turns] for sample in extended] == [[0], [1, 2]]
    grown = make_turn([*head, 1, 2, 5], [])
    branched = build_and_compare([*first, grown, make_turn([*head, 1, 2, 3], [9])])
    assert (branched[2].parent, branched[2].num_shared) == (0, num_common + 3)


def test_the_parent_is_the_newest_of_the_samples_with_the_longest_common_prefix() -> None:
    turns = [
        make_turn([1, 2, 3, 4, 5, 6], [8]),
        make_turn([1, 2, 3], [8]),
        make_turn([1, 2], [3, 4, 5, 9]),
        make_turn([1, 2, 3, 4, 7], [8]),
    ]
    assert (build_and_compare(turns)[3].parent, build_and_compare(turns)[3].num_shared) == (2, 4)


def test_token_rewards_and_routing_records_stay_at_their_tokens() -> None:
    experts = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    (sample,) = build_and_compare(
        [
            make_turn([1, 2], [3, 4], reward=1.0),
            make_turn(
                [1, 2, 3, 4, 5],
                [6, 7, 8],
                reward=0.75,
                token_rewards=np.array([0, 0.25, 0.5], np.float32),
                expert_indices=experts,
            ),
        ]
    )
    assert sample.token_rewards is not None and sample.experts is not None
    assert sample.token_rewards.tolist() == [0, 0, 0, 1, 0, 0, 0.25, 0.5]
    # The engine never gets the last sampled token as input, so it has no routing record.
    assert sample.experts.positions.tolist() == [5, 6]
    np.testing.assert_array_equal(sample.experts.indices, experts)


def test_unrecorded_token_rewards_and_experts_are_none() -> None:
    (sample,) = build_and_compare(linear_turns(2))
    assert sample.token_rewards is None and sample.experts is None


def test_a_branch_keeps_the_reason_given_with_its_turn() -> None:
    builder = SampleBuilder("t")
    builder.append(make_turn([1, 2], [3]))
    builder.append(make_turn([1, 2, 3, 4], [5]))
    builder.add(make_turn([1, 2, 9], [7]), reason=BranchReason.TEMPLATE)
    builder.add(make_turn([1, 2, 3, 4, 5, 6], [8]), reason=BranchReason.TEMPLATE)
    first, second = builder.samples()
    assert [turn.index for turn in first.turns] == [0, 1, 3] and first.branch_reason is None
    assert (second.parent, second.num_shared) == (0, 2)
    assert second.branch_reason is BranchReason.TEMPLATE


def test_a_separate_conversation_has_no_parent_but_a_branch_reason() -> None:
    _, second = build_and_compare([make_turn([1, 2], [3]), make_turn([7, 8], [9])])
    assert (second.parent, second.num_shared) == (None, 0)
    assert second.branch_reason is BranchReason.HISTORY_REWRITTEN


def test_a_score_is_that_of_the_last_turn() -> None:
    builder = SampleBuilder("t")
    builder.append(make_turn([1, 2], [3]))
    builder.score(reward=0.5, components={"hit": 1.0}, is_malformed=False)
    builder.append(make_turn([1, 2, 3, 4], [5]))
    builder.score(reward=-1.0, components={}, is_malformed=True)
    first, second = builder.samples()[0].turns
    assert (first.reward, first.reward_components, first.is_malformed) == (0.5, {"hit": 1.0}, False)
    assert (second.reward, second.reward_components, second.is_malformed) == (-1.0, {}, True)


def test_no_turns_give_no_samples() -> None:
    assert build_and_compare([]) == ()


def test_an_observation_after_the_last_turn_is_the_end_of_the_sample() -> None:
    builder = SampleBuilder("t")
    rewards = np.array([0.5], np.float32)
    builder.add(replace(make_turn([1, 2], [3], reward=0.5), token_rewards=rewards))
    builder.observe(np.array([1, 2, 3, 8, 9], np.int32))
    (sample,) = builder.samples()
    assert sample.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert sample.mask.tolist() == [0, 0, 1, 0, 0]
    assert sample.token_rewards is not None
    assert sample.token_rewards.tolist() == [0, 0, 0.5, 0, 0]
    assert (sample.turns[-1].start, sample.turns[-1].end) == (2, 3)


@pytest.mark.parametrize("prompt", [[1, 9, 3, 8], [1, 2], [4]])
def test_a_prompt_that_does_not_extend_the_last_sample_is_not_kept(prompt: list[int]) -> None:
    builder = SampleBuilder("t")
    builder.observe(np.array(prompt, np.int32))
    assert builder.samples() == ()
    builder.add(make_turn([1, 2], [3]))
    builder.observe(np.array(prompt, np.int32))
    assert [sample.token_ids.tolist() for sample in builder.samples()] == [[1, 2, 3]]
