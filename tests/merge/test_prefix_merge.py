"""Tests of the exact-prefix merge: worked examples, branches, and invariants as properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.trajectory_builders import (
    linear_turns,
    make_trajectory,
    make_turn,
    turns_strategy,
)
from worlds.checks.prefix_merge import merge_turns
from worlds.checks.same import assert_same_samples

from actors.branches import common_prefix
from actors.environment.sample_builder import build_samples
from actors.merge.report import report_merge
from actors.types import BranchReason, Sample, Turn, VersionSpan


def merge(turns: list[Turn]) -> tuple[Sample, ...]:
    """Merge the turns, and check that a run's sample builder makes the same samples."""
    samples = merge_turns(turns, trajectory_id="t")
    assert_same_samples(build_samples(turns, trajectory_id="t"), samples)
    return samples


def turns_in(samples: tuple[Sample, ...]) -> list[list[int]]:
    return [[turn.index for turn in sample.turns] for sample in samples]


def test_the_worked_example() -> None:
    turns = [
        make_turn([10, 20, 30], [40, 50], logprobs=[-1, -2], version=3),
        make_turn([10, 20, 30, 40, 50, 60, 70], [80, 90], logprobs=[-3, -4], version=4),
    ]
    (sample,) = merge(turns)
    assert sample.prompt_length == 3 and [turn.index for turn in sample.turns] == [0, 1]
    assert sample.token_ids.tolist() == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, 0, -1, -2, 0, 0, -3, -4]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4, 4]
    report = report_merge([make_trajectory(turns)])
    assert (report.samples_before, report.samples_after) == (2, 1)
    assert report.num_saved_tokens == 14 - 9 and report.branches == {}


def test_a_prompt_equal_to_the_sample_extends_it_without_an_observation() -> None:
    (sample,) = merge([make_turn([1], [2]), make_turn([1, 2], [3])])
    assert sample.token_ids.tolist() == [1, 2, 3] and sample.mask.tolist() == [0, 1, 1]


def test_a_sub_agent_branches_off_and_the_main_line_continues() -> None:
    samples = merge(
        [
            make_turn([1, 2], [3]),
            make_turn([9, 9], [8]),  # the sub-agent
            make_turn([9, 9, 8, 7], [6]),
            make_turn([1, 2, 3, 4], [5]),  # the main line again
        ]
    )
    assert turns_in(samples) == [[0, 3], [1, 2]]
    assert [sample.branch_reason is None for sample in samples] == [True, False]


def test_a_turn_extends_the_longest_match_and_the_newest_of_equals() -> None:
    same = make_turn([1], [2])
    longest = merge([same, make_turn([1, 2, 3], [4]), make_turn([5], [6])])
    assert turns_in(longest) == [[0, 1], [2]]
    # Two samples with the same ids: a second identical call does not extend the first.
    assert turns_in(merge([same, same, make_turn([1, 2, 3], [4])])) == [[0], [1, 2]]


def test_a_prompt_that_ends_within_a_sample_does_not_extend_it() -> None:
    # The prompt equals the beginning of the sample, but the sample is longer.
    samples = merge([make_turn([1, 2], [3, 4]), make_turn([1, 2, 3], [4])])
    assert turns_in(samples) == [[0], [1]]


def test_a_version_that_changes_within_a_turn_is_recorded_per_token() -> None:
    spans = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=1, end=3))
    turn = replace(make_turn([1, 2], [3, 4, 5]), version_spans=spans)
    assert merge([turn])[0].versions.tolist() == [-1, -1, 4, 5, 5]


def test_versions_stay_in_place_after_a_turn_without_tokens() -> None:
    spans = (VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=2))
    turns = [make_turn([1], []), replace(make_turn([1, 2], [3, 4]), version_spans=spans)]
    assert merge(turns)[0].versions.tolist() == [-1, -1, 1, 2]


def test_sampled_tokens_without_a_finite_log_probability_are_masked_and_counted() -> None:
    nan, inf = float("nan"), float("inf")
    turns = [make_turn([1], [2, 3, 4, 5], logprobs=[-1, nan, -inf, -2])]
    (sample,) = merge(turns)
    assert sample.mask.tolist() == [0, 1, 0, 0, 1]
    assert sample.logprobs.tolist() == [0, -1, 0, 0, -2]
    assert sample.versions.tolist() == [-1, 0, -1, -1, 0]
    assert report_merge([make_trajectory(turns)]).num_masked_tokens == 2 and sample.num_trained == 2


HEAD = [1, 2, 3, 4, 5, 6]
ACT = [11, 12, 13, 14, 15, 16, 17]
OBS = [21, 22, 23, 24, 25, 26, 27]
ACT2 = [31, 32, 33, 34, 35]


@pytest.mark.parametrize(
    ("prompt", "position", "kind"),
    [
        # two of the sampled tokens return as one other token
        ([*HEAD, 11, 99, 14, 15, 16, 17, *OBS, *ACT2], 7, BranchReason.RETOKENISED),
        # the template renders the observation with one token changed
        (HEAD + ACT + [21, 99, 23, 24, 25, 26, 27] + ACT2, 14, BranchReason.TEMPLATE),
        # the template puts something between two messages
        (HEAD + ACT + [77] + OBS + ACT2, 13, BranchReason.TEMPLATE),
        # the system text or the tool schemas differ
        ([1, 2, 99, 4, 5, 6, *ACT, *OBS, *ACT2], 2, BranchReason.TOOLS_CHANGED),
        ([*HEAD[:3], 98, 99, *HEAD[3:], *ACT, *OBS, *ACT2], 3, BranchReason.TOOLS_CHANGED),
        (HEAD[:3] + HEAD[5:] + ACT + OBS + ACT2, 3, BranchReason.TOOLS_CHANGED),
        # thoughts are stripped from the action
        (HEAD + ACT[4:] + OBS + ACT2, 6, BranchReason.HISTORY_REWRITTEN),
        # the history is compacted to a summary
        ([*HEAD, 91, 92, 93], 6, BranchReason.HISTORY_REWRITTEN),
        # the history is rolled back
        (HEAD + ACT, 13, BranchReason.HISTORY_REWRITTEN),
        # a separate conversation
        ([50, 51, 52, 53, 54, 55, 56], 0, BranchReason.HISTORY_REWRITTEN),
        # a whole exchange is replaced
        ([*HEAD, 81, 82, 83, *ACT2], 6, BranchReason.HISTORY_REWRITTEN),
    ],
)
def test_a_branch_records_where_it_starts_and_why(
    prompt: list[int], position: int, kind: BranchReason
) -> None:
    turns = [make_turn(HEAD, ACT), make_turn(HEAD + ACT + OBS, ACT2), make_turn(prompt, [1])]
    _, branch = merge(turns)
    assert (branch.turns[0].index, branch.num_shared, branch.branch_reason) == (2, position, kind)


def test_a_branch_at_the_last_sampled_token_is_retokenised() -> None:
    turns = [make_turn(HEAD, ACT), make_turn([*HEAD, *ACT[:-1], 99, 5], [1])]
    assert merge(turns)[1].branch_reason is BranchReason.RETOKENISED


@given(turns_strategy)
def test_every_sampled_token_is_in_exactly_one_sample_in_order(turns: list[Turn]) -> None:
    samples = merge(turns)
    assert sorted(index for chain in turns_in(samples) for index in chain) == list(
        range(len(turns))
    )
    finite = [np.isfinite(turn.logprobs) for turn in turns]
    assert sum(sample.num_trained for sample in samples) == sum(int(f.sum()) for f in finite)
    report = report_merge([make_trajectory(turns)])
    assert report.num_masked_tokens == sum(int((~f).sum()) for f in finite)
    for sample in samples:
        indices = [turn.index for turn in sample.turns]
        own = [turns[i] for i in indices]
        assert indices == sorted(indices)
        expected = np.concatenate(
            [turn.sampled_token_ids[np.isfinite(turn.logprobs)] for turn in own]
        )
        np.testing.assert_array_equal(sample.token_ids[sample.mask == 1], expected)
        assert (sample.logprobs[sample.mask == 0] == 0).all()
        assert (sample.versions[sample.mask == 0] == -1).all()
        assert (sample.versions[sample.mask == 1] >= 0).all()
        assert sample.prompt_length == own[0].prompt_token_ids.shape[0]
        assert not sample.mask[: sample.prompt_length].any()


@given(turns_strategy)
def test_the_ids_before_a_turn_in_its_sample_are_its_prompt(
    turns: list[Turn],
) -> None:
    for sample in merge(turns):
        for span in sample.turns:
            turn = turns[span.index]
            np.testing.assert_array_equal(sample.token_ids[: span.start], turn.prompt_token_ids)
            np.testing.assert_array_equal(sample.token_ids[span.tokens], turn.sampled_token_ids)
            assert (span.reward, span.is_malformed) == (turn.reward, turn.is_malformed)


@given(turns_strategy)
def test_merging_the_turns_of_a_sample_gives_that_sample(turns: list[Turn]) -> None:
    for sample in merge(turns):
        (again,) = merge([turns[span.index] for span in sample.turns])
        assert again.branch_reason is None
        for name in ("token_ids", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again, name), getattr(sample, name))


@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 4))
def test_turns_that_each_extend_the_last_give_one_sample(
    num_turns: int, observed: int, sampled: int
) -> None:
    (sample,) = merge(linear_turns(num_turns, observed=observed, sampled=sampled))
    assert len(sample.turns) == num_turns


@given(turns_strategy)
def test_a_turn_begins_a_sample_only_if_it_extends_no_open_one(turns: list[Turn]) -> None:
    samples = merge(turns)
    for branch in samples[1:]:
        assert branch.branch_reason is not None
        first = branch.turns[0].index
        prompt = turns[first].prompt_token_ids
        shared = []
        for sample in samples:
            last = max((span.index for span in sample.turns if span.index < first), default=None)
            if last is not None:
                turn = turns[last]
                full = np.concatenate([turn.prompt_token_ids, turn.sampled_token_ids])
                shared.append(common_prefix(prompt, full))
                assert shared[-1] < full.shape[0]
        assert branch.num_shared == max(shared)
