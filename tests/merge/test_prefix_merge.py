"""Exact-prefix merge: worked examples, branching, and its invariants as properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    turns_strategy,
)

from actors.merge.mismatch import MismatchKind, common_prefix
from actors.merge.prefix import Merged, find_misalignment, merge_turns
from actors.trajectory_queue.columns import decode, encode
from actors.types import Trajectory, Turn, VersionSpan


def merge(turns: list[Turn]) -> Merged:
    return merge_turns(make_trajectory(turns))


def test_the_worked_example() -> None:
    merged = merge(
        [
            make_turn([10, 20, 30], [40, 50], logprobs=[-1, -2], version=3),
            make_turn([10, 20, 30, 40, 50, 60, 70], [80, 90], logprobs=[-3, -4], version=4),
        ]
    )
    (sample,) = merged.samples
    assert sample.prompt_length == 3 and sample.turns == (0, 1)
    assert sample.token_ids.tolist() == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, 0, -1, -2, 0, 0, -3, -4]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4, 4]
    assert merged.num_unmerged_tokens == 14 and merged.num_merged_tokens == 9
    assert merged.mismatches == ()


def test_a_prompt_equal_to_the_sample_extends_it_without_an_observation() -> None:
    (sample,) = merge([make_turn([1], [2]), make_turn([1, 2], [3])]).samples
    assert sample.token_ids.tolist() == [1, 2, 3] and sample.mask.tolist() == [0, 1, 1]


def test_a_sub_agent_branches_off_and_the_main_line_goes_on() -> None:
    merged = merge(
        [
            make_turn([1, 2], [3]),
            make_turn([9, 9], [8]),  # the sub-agent
            make_turn([9, 9, 8, 7], [6]),
            make_turn([1, 2, 3, 4], [5]),  # the main line again
        ]
    )
    assert [sample.turns for sample in merged.samples] == [(0, 3), (1, 2)]
    assert len(merged.mismatches) == 1 and merged.mismatches[0].turn == 1


def test_the_longest_match_wins_and_the_newest_among_equals() -> None:
    same = make_turn([1], [2])
    longest = merge([same, make_turn([1, 2, 3], [4]), make_turn([5], [6])])
    assert [sample.turns for sample in longest.samples] == [(0, 1), (2,)]
    # Two samples with the same ids: a second identical call does not extend the first.
    merged = merge([same, same, make_turn([1, 2, 3], [4])])
    assert [sample.turns for sample in merged.samples] == [(0,), (1, 2)]


def test_a_version_that_changes_within_a_turn_follows_its_tokens() -> None:
    spans = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=1, end=3))
    turn = replace(make_turn([1, 2], [3, 4, 5]), version_spans=spans)
    assert merge([turn]).samples[0].versions.tolist() == [-1, -1, 4, 5, 5]


def test_sampled_tokens_without_a_finite_log_probability_are_masked_and_counted() -> None:
    nan, inf = float("nan"), float("inf")
    merged = merge([make_turn([1], [2, 3, 4, 5], logprobs=[-1, nan, -inf, -2])])
    (sample,) = merged.samples
    assert sample.mask.tolist() == [0, 1, 0, 0, 1]
    assert sample.logprobs.tolist() == [0, -1, 0, 0, -2]
    assert sample.versions.tolist() == [-1, 0, -1, -1, 0]
    assert merged.num_masked_tokens == 2 and merged.num_trained_tokens == 2


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (make_turn([1], [2, 3], logprobs=[-1]), "1 log-probabilities for 2 sampled tokens"),
        (make_turn([], [2]), "an empty prompt"),
        (replace(make_turn([1], [2]), version_spans=()), "spans cover 0 of 1"),
        (
            replace(make_turn([1], [2]), version_spans=(VersionSpan(version=0, start=1, end=1),)),
            "span from 1, expected 0",
        ),
    ],
)
def test_turns_that_do_not_fit_together_are_found(turn: Turn, words: str) -> None:
    found = find_misalignment(make_trajectory([turn]))
    assert found is not None and words in found
    assert find_misalignment(make_trajectory(linear_turns(3))) is None


HEAD = [1, 2, 3, 4, 5, 6]
ACT = [11, 12, 13, 14, 15, 16, 17]
OBS = [21, 22, 23, 24, 25, 26, 27]
ACT2 = [31, 32, 33, 34, 35]


@pytest.mark.parametrize(
    ("prompt", "position", "kind"),
    [
        # two of the sampled tokens come back as one other token
        ([*HEAD, 11, 99, 14, 15, 16, 17, *OBS, *ACT2], 7, MismatchKind.RETOKENISED),
        # the template renders the observation with another token in it
        (HEAD + ACT + [21, 99, 23, 24, 25, 26, 27] + ACT2, 14, MismatchKind.TEMPLATE),
        # the template puts something between two messages
        (HEAD + ACT + [77] + OBS + ACT2, 13, MismatchKind.TEMPLATE),
        # the system text or the tool schemas differ
        ([1, 2, 99, 4, 5, 6, *ACT, *OBS, *ACT2], 2, MismatchKind.TOOLS_CHANGED),
        ([*HEAD[:3], 98, 99, *HEAD[3:], *ACT, *OBS, *ACT2], 3, MismatchKind.TOOLS_CHANGED),
        (HEAD[:3] + HEAD[5:] + ACT + OBS + ACT2, 3, MismatchKind.TOOLS_CHANGED),
        # thoughts are stripped from the action
        (HEAD + ACT[4:] + OBS + ACT2, 6, MismatchKind.HISTORY_REWRITTEN),
        # the history is compacted to a summary
        ([*HEAD, 91, 92, 93], 6, MismatchKind.HISTORY_REWRITTEN),
        # it is rolled back
        (HEAD + ACT, 13, MismatchKind.HISTORY_REWRITTEN),
        # a conversation of its own
        ([50, 51, 52, 53, 54, 55, 56], 0, MismatchKind.HISTORY_REWRITTEN),
        # a whole exchange is replaced
        ([*HEAD, 81, 82, 83, *ACT2], 6, MismatchKind.HISTORY_REWRITTEN),
    ],
)
def test_a_mismatch_tells_where_and_what_changed(
    prompt: list[int], position: int, kind: MismatchKind
) -> None:
    turns = [make_turn(HEAD, ACT), make_turn(HEAD + ACT + OBS, ACT2), make_turn(prompt, [1])]
    (mismatch,) = merge(turns).mismatches
    assert (mismatch.turn, mismatch.position, mismatch.kind) == (2, position, kind)


def test_a_changed_last_token_is_a_retokenised_one() -> None:
    turns = [make_turn(HEAD, ACT), make_turn([*HEAD, *ACT[:-1], 99, 5], [1])]
    assert merge(turns).mismatches[0].kind is MismatchKind.RETOKENISED


@given(turns_strategy.map(make_trajectory))
def test_every_sampled_token_is_in_exactly_one_sample_in_order(trajectory: Trajectory) -> None:
    merged = merge_turns(trajectory)
    turns = sorted(index for sample in merged.samples for index in sample.turns)
    assert turns == list(range(len(trajectory.turns)))
    finite = [np.isfinite(turn.logprobs) for turn in trajectory.turns]
    assert merged.num_trained_tokens == sum(int(f.sum()) for f in finite)
    assert merged.num_masked_tokens == sum(int((~f).sum()) for f in finite)
    for sample in merged.samples:
        own = [trajectory.turns[i] for i in sample.turns]
        assert list(sample.turns) == sorted(sample.turns)
        expected = np.concatenate(
            [turn.sampled_token_ids[np.isfinite(turn.logprobs)] for turn in own]
        )
        np.testing.assert_array_equal(sample.token_ids[sample.mask == 1], expected)
        assert (sample.logprobs[sample.mask == 0] == 0).all()
        assert (sample.versions[sample.mask == 0] == -1).all()
        assert (sample.versions[sample.mask == 1] >= 0).all()
        assert sample.prompt_length == own[0].prompt_token_ids.shape[0]
        assert not sample.mask[: sample.prompt_length].any()


@given(turns_strategy.map(make_trajectory))
def test_each_turn_saw_exactly_the_ids_that_stand_before_it_in_its_sample(
    trajectory: Trajectory,
) -> None:
    for sample in merge_turns(trajectory).samples:
        for index in sample.turns:
            turn = trajectory.turns[index]
            num_prompt = turn.prompt_token_ids.shape[0]
            np.testing.assert_array_equal(sample.token_ids[:num_prompt], turn.prompt_token_ids)
            end = num_prompt + turn.num_sampled
            np.testing.assert_array_equal(sample.token_ids[num_prompt:end], turn.sampled_token_ids)


@given(turns_strategy.map(make_trajectory))
def test_merging_the_turns_of_a_sample_again_gives_that_sample(trajectory: Trajectory) -> None:
    for sample in merge_turns(trajectory).samples:
        own = replace(trajectory, turns=tuple(trajectory.turns[i] for i in sample.turns))
        again = merge_turns(own)
        assert again.mismatches == () and len(again.samples) == 1
        for name in ("token_ids", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again.samples[0], name), getattr(sample, name))


@given(turns_strategy.map(make_trajectory))
def test_merging_what_went_through_the_queue_gives_the_same(trajectory: Trajectory) -> None:
    direct, queued = merge_turns(trajectory), merge_turns(decode(encode([trajectory]), 0))
    assert direct.mismatches == queued.mismatches
    for a, b in zip(direct.samples, queued.samples, strict=True):
        assert a.turns == b.turns
        for name in ("token_ids", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 4))
def test_turns_that_each_extend_the_last_give_one_sample(
    num_turns: int, observed: int, sampled: int
) -> None:
    merged = merge(linear_turns(num_turns, observed=observed, sampled=sampled))
    assert len(merged.samples) == 1 and merged.mismatches == ()


@given(turns_strategy.map(make_trajectory))
def test_a_turn_that_opens_a_sample_extends_none_that_was_open(trajectory: Trajectory) -> None:
    merged = merge_turns(trajectory)
    assert len(merged.mismatches) == max(0, len(merged.samples) - 1)
    for mismatch in merged.mismatches:
        prompt = trajectory.turns[mismatch.turn].prompt_token_ids
        shared = []
        for sample in merged.samples:
            last = max((i for i in sample.turns if i < mismatch.turn), default=None)
            if last is not None:
                turn = trajectory.turns[last]
                full = np.concatenate([turn.prompt_token_ids, turn.sampled_token_ids])
                shared.append(common_prefix(prompt, full))
                assert shared[-1] < turn.prompt_token_ids.shape[0] + turn.num_sampled
        assert mismatch.position == max(shared)
