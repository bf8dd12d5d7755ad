"""Scores from a model: each sample in one row, its part of the answer back, however packed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.trajectory_builders import linear_turns, make_trajectory, random_turns

from actors.batch import MicroBatch
from actors.merge.advantages import Baseline, Scale
from actors.merge.credit import Scores
from actors.merge.groups import TrajectoryGroup, classify_groups
from actors.merge.scoring import ScorePlan, plan_scores, read_scores
from actors.merge.settings import StepSettings
from actors.merge.step import build_step
from actors.row_scores import RowScores
from actors.types import Outcome


def make_group(rewards: list[float], outcomes: dict[int, Outcome] | None = None) -> TrajectoryGroup:
    trajectories = tuple(
        make_trajectory(
            linear_turns(2, reward=reward, seed=member),
            rollout_id=f"g000000.0-{member}",
            outcome=(outcomes or {}).get(member, Outcome.COMPLETED),
        )
        for member, reward in enumerate(rewards)
    )
    return TrajectoryGroup(group_id="g000000.0", trajectories=trajectories)


def random_group(number: int, seed: int) -> TrajectoryGroup:
    rng = np.random.default_rng([number, seed])
    trajectories = tuple(
        make_trajectory(random_turns(rng, max_turns=5), rollout_id=f"g{number:06d}.0-{member}")
        for member in range(4)
    )
    return TrajectoryGroup(group_id=f"g{number:06d}.0", trajectories=trajectories)


def answer(row: MicroBatch) -> RowScores:
    """A model that can be told from its answers: its scores are of ids, places and targets."""
    return RowScores(
        reference_logprobs=(row.behaviour_logprobs * 2).astype(np.float32),
        values=(row.token_ids + row.position_ids / 64).astype(np.float32),
    )


def answers(plan: ScorePlan) -> list[list[RowScores]]:
    return [[answer(row) for row in shard.minibatches[0].micro_batches] for shard in plan.shards]


def plan_for(groups: list[TrajectoryGroup], **fields: int) -> ScorePlan:
    settings = StepSettings(**fields)  # type: ignore[arg-type]
    return plan_scores(classify_groups(groups, settings), settings, step=0, trainer_version=0)


def score(groups: list[TrajectoryGroup], **fields: int) -> Scores:
    plan = plan_for(groups, **fields)
    return read_scores(plan, answers(plan))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(8, 64))
def test_every_sample_gets_its_own_scores_back_however_rows_are_packed(
    seed: int, num_ranks: int, budget: int
) -> None:
    groups = [random_group(number, seed) for number in range(2)]
    plan = plan_for(groups, num_ranks=num_ranks, tokens_per_micro_batch=budget)
    rows = [shard.minibatches[0].micro_batches for shard in plan.shards]
    assert len({len(of_rank) for of_rank in rows}) == 1
    scores = read_scores(plan, answers(plan))
    for trajectory in (t for group in groups for t in group.trajectories):
        found = scores.get(trajectory.trajectory_id, ())
        assert len(found) == len(trajectory.samples)
        for sample, scored in zip(trajectory.samples, found, strict=True):
            places = np.arange(sample.num_tokens) / 64
            np.testing.assert_allclose(scored.values, sample.token_ids + places, rtol=1e-6)
            np.testing.assert_array_equal(scored.reference_logprobs, sample.logprobs * 2)


def test_only_what_is_in_a_baseline_is_scored() -> None:
    outcomes = {1: Outcome.WALL_TIMEOUT, 2: Outcome.TRUNCATED_TOKENS}
    group = make_group([1.0, 1.0, 0.5], outcomes)
    plan = plan_for([group], num_ranks=2)
    names = Counter(s.trajectory_id for rank in plan.samples for row in rank for s in row)
    # Masked and graded: its return stands in the baseline.
    assert names == {"g000000.0-0.a0": 1, "g000000.0-2.a0": 1}


def test_a_step_of_a_critic_is_built_with_the_scores_that_come_back() -> None:
    group = make_group([1.0, 0.0])
    wanted = StepSettings(baseline=Baseline.CRITIC, scale=Scale.NONE)
    merged = classify_groups([group], wanted)
    result = build_step(merged, wanted, step=0, trainer_version=0, scores=score([group]))
    assert result.report.num_trained_tokens == 24


def test_an_answer_that_does_not_fit_its_row_is_refused_with_a_trajectory_named() -> None:
    plan = plan_for([make_group([1.0, 0.0])])
    short = RowScores(values=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"trajectory g000000\.0-0\.a0 has values of shape \(3,\)"):
        read_scores(plan, [[short]])
