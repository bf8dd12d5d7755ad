"""Tests of scores from a model: each sample is in one row and gets its own scores back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import linear_turns, make_trajectory, random_turns

from actors.algorithm import Baseline, Scale
from actors.batch import MicroBatch, RankShard, RowScores
from actors.merge.groups import GroupMembers, classify_groups
from actors.merge.scoring import plan_scores, read_scores, score_rows
from actors.merge.settings import StepSettings
from actors.merge.step import build_step
from actors.types import Outcome, Trajectory


def make_group(
    rewards: list[float], outcomes: dict[int, Outcome] | None = None
) -> tuple[Trajectory, ...]:
    trajectories = tuple(
        make_trajectory(
            linear_turns(2, reward=reward, seed=member),
            rollout_id=f"g000000.0-{member}",
            outcome=(outcomes or {}).get(member, Outcome.COMPLETED),
        )
        for member, reward in enumerate(rewards)
    )
    return trajectories


def random_group(number: int, seed: int) -> tuple[Trajectory, ...]:
    rng = np.random.default_rng([number, seed])
    trajectories = tuple(
        make_trajectory(random_turns(rng, max_turns=5), rollout_id=f"g{number:06d}.0-{member}")
        for member in range(4)
    )
    return trajectories


def answer(row: MicroBatch) -> RowScores:
    """Return scores that identify the ids, positions and log-probabilities of a row."""
    return RowScores(
        reference_logprobs=(row.behaviour_logprobs * 2).astype(np.float32),
        values=(row.token_ids + row.position_ids / 64).astype(np.float32),
    )


def answers(shards: tuple[RankShard, ...]) -> list[list[RowScores]]:
    return [[answer(row) for row in shard.minibatches[0]] for shard in shards]


def score(groups: list[tuple[Trajectory, ...]], settings: StepSettings) -> tuple[GroupMembers, ...]:
    merged = classify_groups(groups, settings)
    shards = plan_scores(merged, settings, step=0, trainer_version=0)
    return read_scores(merged, settings, answers(shards))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(8, 64))
def test_every_sample_gets_its_own_scores_however_rows_are_packed(
    seed: int, num_ranks: int, budget: int
) -> None:
    groups = [random_group(number, seed) for number in range(2)]
    wanted = step_settings(num_ranks=num_ranks, tokens_per_micro_batch=budget)
    merged = classify_groups(groups, wanted)
    shards = plan_scores(merged, wanted, step=0, trainer_version=0)
    assert len({len(shard.minibatches[0]) for shard in shards}) == 1
    scored = read_scores(merged, wanted, answers(shards))
    assert [len(group) for group in scored] == [4, 4]
    for member in (member for group in scored for member in group):
        assert len(member.scores) == len(member.samples)
        for sample, scores in zip(member.samples, member.scores, strict=True):
            positions = np.arange(sample.num_tokens) / 64
            np.testing.assert_allclose(scores.values, sample.token_ids + positions, rtol=1e-6)
            np.testing.assert_array_equal(
                scores.reference_logprobs, sample.logprobs[sample.mask == 1] * 2
            )


def test_only_trajectories_in_a_baseline_are_scored() -> None:
    outcomes = {1: Outcome.WALL_TIMEOUT, 2: Outcome.TRUNCATED_TOKENS}
    group = make_group([1.0, 1.0, 0.5], outcomes)
    wanted = step_settings(num_ranks=2)
    weighted, dealt = score_rows(classify_groups([group], wanted), wanted)
    names = Counter(weighted[i].sample.trajectory_id for rows in dealt for row in rows for i in row)
    # The third is masked but graded: its return is in the baseline.
    assert names == {"g000000.0-0.a0": 1, "g000000.0-2.a0": 1}


def test_a_reference_scores_tokens_at_the_temperature_of_their_environment() -> None:
    wanted = step_settings(temperatures={"game": 0.7})
    group = (make_group([1, 0]),)
    [shard] = plan_scores(classify_groups(group, wanted), wanted, step=0, trainer_version=0)
    rows = [row for row in shard.minibatches[0] if row.num_trained]
    assert rows and all(row.temperatures == pytest.approx(0.7) for row in rows)


def test_a_step_with_a_critic_is_built_from_returned_scores() -> None:
    group = make_group([1.0, 0.0])
    wanted = step_settings(baseline=Baseline.CRITIC, scale=Scale.NONE)
    result = build_step(score([group], wanted), wanted, step=0, trainer_version=0)
    assert result.report.num_trained_tokens == 24


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (RowScores(values=np.zeros(3, np.float32)), r"trajectory g0+\.0-0\.a0 of shape \(3,\),"),
        (
            RowScores(reference_logprobs=np.full(24, np.nan, np.float32)),
            r"log-probabilities .* trajectory g0+\.0-0\.a0 that are not finite, .* look",
        ),
    ],
)
def test_scores_that_do_not_fit_their_row_are_refused_with_a_trajectory_named(
    scores: RowScores, words: str
) -> None:
    wanted = step_settings()
    merged = classify_groups([make_group([1.0, 0.0])], wanted)
    with pytest.raises(ValueError, match=words):
        read_scores(merged, wanted, [[scores]])
