"""Tests of the numbers of an evaluation, with values computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from worlds.builders.trajectory_builders import make_trajectory, make_turn
from worlds.parts.control_world import played

from actors.environment.evaluation import EvaluationSet, plays_of, rollout_line
from actors.environment.settings import Sampling
from actors.environment.turn_loop import MAX_ANSWER_CHARS, short_answer
from actors.types import Outcome, Task
from service.config.sections import EvaluationSettings
from service.telemetry.evaluation import (
    evaluation_record,
    majority,
    sampling_of_parts,
    standard_error,
)
from service.telemetry.records import evaluation_line

FOUR = Sampling(num_samples=4, temperature=1.0, ks=(1, 2, 4))


def answered(task_id, answers, rewards, **changes):  # type: ignore[no-untyped-def]
    return [
        replace(played(task_id, reward=reward), answer=answer, **changes)
        for answer, reward in zip(answers, rewards, strict=True)
    ]


def test_the_mean_over_all_samples_has_its_standard_error_over_tasks() -> None:
    # The tasks' means are 0.5, 1 and 0. Their deviation is 0.5, which is divided by the root of 3.
    assert standard_error([[1, 0], [1, 1], [0, 0]]) == pytest.approx(0.5 / 3**0.5)
    assert standard_error([[1, 0, 1]]) is None
    found = answered("a", "1122", (1, 1, 0, 0)) + answered("b", "1111", (1, 1, 1, 1))
    record = evaluation_record(3, found, version=3, sampling=FOUR)
    assert record.reward_mean == 0.75 and record.standard_error == pytest.approx(0.25)
    # Two of the four samples of task a pass: 1 - C(2, 2) / C(4, 2) = 5/6.
    assert record.pass_at == {1: 0.75, 2: pytest.approx((5 / 6 + 1) / 2), 4: 1.0}


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ([("7", 1.0), ("7", 1.0), ("8", 0.0)], 1.0),
        ([("7", 1.0), ("8", 0.0), ("8", 0.0)], 0.0),
        # A tie counts as the mean of the tied answers, and less frequent answers do not count.
        ([("7", 1.0), ("7", 1.0), ("8", 0.0), ("8", 0.0), ("9", 1.0)], 0.5),
        # Equal answers may have different returns, such as a bonus for the form.
        ([("7", 1.0), ("7", 0.5), ("8", 0.0)], 0.75),
        # A missing answer is not a vote, but an empty answer is.
        ([(None, 0.0), (None, 0.0), ("7", 1.0)], 1.0),
        ([("", 0.0), ("", 0.0), (None, 1.0), ("7", 1.0)], 0.0),
        ([(None, 0.0), (None, 0.5)], 0.25),
    ],
)
def test_the_majority_has_the_mean_return_of_the_most_frequent_answer(votes, value) -> None:  # type: ignore[no-untyped-def]
    assert majority(votes) == pytest.approx(value)


def test_majority_is_unknown_without_answers() -> None:
    silent = answered("a", [None] * 4, (1, 1, 0, 0))
    assert evaluation_record(0, silent, version=0, sampling=FOUR).majority_mean is None
    # If another task has answers, a task without answers counts with the mean of its samples.
    both = silent + answered("b", "1112", (0, 0, 0, 1))
    assert evaluation_record(0, both, version=0, sampling=FOUR).majority_mean == 0.25


@pytest.mark.parametrize("outcome", [Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR])
def test_a_failed_rollout_is_not_a_wrong_answer_and_is_counted_separately(outcome: Outcome) -> None:
    good = answered("a", "777", (1, 1, 1))
    # The rollout sampled tokens and gave an answer before it failed.
    failed = answered("a", "8", (0,), outcome=outcome)
    record = evaluation_record(0, good + failed, version=0, sampling=FOUR)
    assert (record.reward_mean, record.majority_mean, record.num_failed) == (1.0, 1.0, 1)
    # Three samples remain, which are too few for pass@4.
    assert record.pass_at == {1: 1.0, 2: 1.0}
    assert record.outcomes == {Outcome.COMPLETED: 3, outcome: 1}
    nothing = evaluation_record(0, failed, version=0, sampling=FOUR)
    assert (nothing.reward_mean, nothing.standard_error, nothing.pass_at) == (None, None, {})


def test_a_truncated_answer_is_wrong_and_not_missing() -> None:
    found = answered("a", "7", (1,)) + answered(
        "a", [None], (0,), outcome=Outcome.TRUNCATED_TOKENS, is_graded=False
    )
    record = evaluation_record(0, found, version=0, sampling=FOUR)
    assert (record.reward_mean, record.num_failed) == (0.5, 0)


def test_numbers_are_scaled_by_the_best_return_if_it_is_known() -> None:
    found = answered("a", "7788", (2, 2, 1, 0), best_return=2.0)
    record = evaluation_record(0, found, version=0, sampling=FOUR)
    assert (record.reward_mean, record.scaled_reward_mean) == (1.25, 0.625)
    assert (record.majority_mean, record.pass_at[1]) == (0.625, 0.5)


def test_the_line_of_an_evaluation_of_several_samples_has_all_numbers() -> None:
    found = answered("a", "1122", (1, 1, 0, 0)) + answered(
        "b", "1", (0,), outcome=Outcome.REWARD_ERROR
    )
    record = evaluation_record(3, found, version=3, sampling=FOUR)
    assert evaluation_line(record) == (
        "evaluation  v3  reward 0.50  2 held-out tasks, 4 samples each at temperature 1"
        "  pass@1 0.50  pass@2 0.83  pass@4 1.00  majority@4 0.50  1 failed"
    )


def test_pass_at_k_is_computed_for_powers_of_two_up_to_the_samples() -> None:
    for samples, ks in ((1, (1,)), (6, (1, 2, 4)), (8, (1, 2, 4, 8))):
        assert EvaluationSettings(samples=samples).sampling.ks == ks


def test_the_line_of_a_rollout_has_all_tokens_of_its_trajectory() -> None:
    turns = [
        make_turn([1, 2], [3, 4], logprobs=[-0.1, -2.3], reward_components={"hit": 1.0}),
        make_turn([1, 2, 3, 4, 5], [6], logprobs=[-0.7], reward=1.0, version=2),
        # This turn extends no sample, so it begins a new one.
        make_turn([9], [8, 7], logprobs=[-1e-7, -3.0], reward_components={"hit": 0.5}),
    ]
    trajectory = make_trajectory(turns, answer="6", best_return=2.0)
    trajectory = replace(trajectory, rollout_id="evaluation-g-5")
    text = rollout_line(trajectory, decode=lambda token_ids: f"{len(token_ids)} tokens")
    assert b"\n" not in text
    line = json.loads(text)
    assert (line["task_id"], line["sample"]) == (trajectory.task_id, 5)
    assert (line["outcome"], line["answer"], line["num_turns"]) == ("completed", "6", 3)
    assert (line["return"], line["best_return"], line["components"]) == (1.0, 2.0, {"hit": 1.5})
    assert line["policy_versions"] == [0, 2]
    assert len(line["samples"]) == len(trajectory.samples) == 2
    for found, sample in zip(line["samples"], trajectory.samples, strict=True):
        assert found["token_ids"] == sample.token_ids.tolist()
        assert found["mask"] == sample.mask.tolist()
        np.testing.assert_array_equal(np.array(found["logprobs"], np.float32), sample.logprobs)
        assert found["text"] == f"{sample.num_tokens} tokens"


def test_each_sample_of_a_task_is_played_with_its_own_id() -> None:
    tasks = [Task(task_id=name, environment="game", seed=0) for name in "ab"]
    plays = plays_of(tasks, 3)
    assert [(each.task.task_id, each.rollout_id) for each in plays] == [
        (name, f"evaluation-{name}-{number}") for name in "ab" for number in range(3)
    ]


def test_long_answers_are_shortened_and_still_distinguishable() -> None:
    assert short_answer("x" * MAX_ANSWER_CHARS) == "x" * MAX_ANSWER_CHARS
    one, other = (short_answer("x" * 1000 + end) for end in "ab")
    assert len(one) == MAX_ANSWER_CHARS and one != other and one[:200] == other[:200]
    assert one == short_answer("x" * 1000 + "a")
    assert short_answer("half a \ud800 character") == "half a ? character"


def test_parts_with_different_sampling_have_no_common_pass_at_k() -> None:
    greedy, sampled = Sampling(), Sampling(num_samples=4, temperature=0.5, ks=(1, 2, 4))

    def parts(*samplings: Sampling) -> list[EvaluationSet]:
        return [
            EvaluationSet(name=str(number), tasks=(), sampling=each, is_part=True)
            for number, each in enumerate(samplings)
        ]

    assert sampling_of_parts(parts(sampled, sampled)) == sampled
    assert sampling_of_parts(parts(sampled, greedy)) == replace(sampled, ks=())
