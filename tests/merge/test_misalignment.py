"""Tests of the checks of a trajectory's turns: each message names the place and a remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds.builders.trajectory_builders import linear_turns, make_trajectory, make_turn

from actors.expert_records import MixtureShape, ModelShape
from actors.misalignment import find_misalignment, find_misfit
from actors.types import Turn, VersionSpan

TURN = make_turn([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (make_turn([1], [2, 3], logprobs=[-1]), "1 log-probabilities for 2 sampled tokens"),
        (make_turn([], [2]), "an empty prompt; send the ids"),
        (replace(TURN, version_spans=()), "version spans cover 0 of 2 sampled tokens"),
        (
            replace(TURN, version_spans=(VersionSpan(version=1, start=1, end=2),)),
            "a version span from 1 to 2, expected one from 0",
        ),
        (
            replace(TURN, version_spans=(VersionSpan(version=1, start=0, end=1),)),
            "version spans cover 1 of 2 sampled tokens",
        ),
        (
            # The spans meet and end at the right place, but one of them runs backwards.
            replace(
                TURN,
                version_spans=(
                    VersionSpan(version=1, start=0, end=5),
                    VersionSpan(version=2, start=5, end=2),
                ),
            ),
            "a version span from 5 to 2, expected one from 5 that is not empty",
        ),
        (
            replace(TURN, version_spans=(VersionSpan(version=-1, start=0, end=2),)),
            "policy version -1; record",
        ),
        (replace(TURN, token_rewards=np.zeros(1, np.float32)), "shape (1,) for 2 sampled tokens"),
        (
            replace(TURN, token_rewards=np.array([0, 0.5], np.float32), reward=1.0),
            "token rewards sum to 0.5, the reward is 1; make them agree",
        ),
        (
            replace(TURN, token_rewards=np.array([0, np.nan], np.float32)),
            "token rewards sum to nan",
        ),
        (
            replace(TURN, expert_indices=np.zeros((3, 2, 2), np.uint8)),
            "expert indices of shape (3, 2, 2) for 2 sampled tokens",
        ),
        (
            replace(TURN, expert_indices=np.full((2, 2, 2), -1, np.int16)),
            "expert indices below 0; leave out tokens without a record",
        ),
        (
            replace(TURN, version_spans=(VersionSpan(version=2**31, start=0, end=2),)),
            "policy version 2147483648; record",
        ),
        (make_turn([1], [2, 3], logprobs=[-1, 5]), "a log-probability of 5, expected at most 0"),
        # A NaN does not hide the other value.
        (make_turn([1], [2, 3], logprobs=[np.nan, 5]), "a log-probability of 5, expected at most"),
        (make_turn([1, -2], [3]), "1 prompt ids are outside the vocabulary, expected 0 upwards"),
        (make_turn([1], [3, -4, -5]), "2 sampled ids are outside the vocabulary"),
    ],
)
def test_a_misfit_is_reported_with_a_remedy(turn: Turn, words: str) -> None:
    found = find_misalignment(turn)
    assert found is not None and words in found
    assert find_misalignment(TURN) is None


def test_a_log_probability_may_exceed_0_only_by_rounding() -> None:
    assert find_misalignment(make_turn([1], [2], logprobs=[1e-4])) is None


def test_log_probabilities_may_be_not_finite() -> None:
    assert find_misalignment(make_turn([1], [2, 3], logprobs=[np.nan, -np.inf])) is None


def test_ids_above_the_vocabulary_are_reported_if_its_size_is_known() -> None:
    main, aside = linear_turns(3, seed=1), make_turn([4, 99], [5])
    trajectory = make_trajectory([main[0], aside, *main[1:]])
    assert find_misfit(trajectory, shape=None) is None
    assert find_misfit(trajectory, shape=ModelShape(vocab_size=100)) is None
    found = find_misfit(make_trajectory([aside]), shape=ModelShape(vocab_size=99))
    assert found == (
        "sample 0: 1 token ids are outside the vocabulary, expected 0 to 98; use the policy's own "
        "tokenizer"
    )


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([[[0, 1]]], "for (1, 2) layers and experts, the trained model has (2, 2)"),
        ([[[0], [1]]], "for (2, 1) layers and experts, the trained model has (2, 2)"),
        ([[[0, 1], [2, 4]]], "of experts 0 to 4, expected 0 to 3"),
        ([[[0, 1], [2, 2]]], "name an expert twice"),
        ([[[0, 1], [3, 2]]], None),
        # The engine processed none of one sampled token, so that no shape is to be checked.
        (np.zeros((0, 2, 2)), None),
        (np.zeros((0, 0, 0)), None),
    ],
)
def test_expert_records_of_another_mixture_are_reported(
    indices: list[list[list[int]]], words: str | None
) -> None:
    turn = replace(TURN, expert_indices=np.array(indices, np.uint8))
    mixture = MixtureShape(num_layers=2, num_experts=4, num_chosen=2)
    shape = ModelShape(vocab_size=500, mixture=mixture)
    found = find_misfit(make_trajectory([turn]), shape=shape)
    if words is None:
        assert found is None
    else:
        assert found is not None and found.startswith("sample 0: expert records") and words in found


def test_expert_records_for_a_model_without_a_mixture_are_reported() -> None:
    turn = replace(TURN, expert_indices=np.zeros((1, 2, 2), np.uint8))
    found = find_misfit(make_trajectory([turn]), shape=ModelShape(vocab_size=500))
    assert found == (
        "sample 0: expert records for a model whose routing cannot be replayed; leave them out"
    )


def test_a_trajectory_without_turns_has_no_misfit() -> None:
    assert find_misfit(make_trajectory([]), shape=ModelShape(vocab_size=5)) is None
