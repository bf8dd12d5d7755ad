"""Tests of a critic and a reference in the trainer's ranks: scores, training, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.builders.settings import changed, rank_settings, step_settings
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts.trainer_world import (
    World,
    largest_difference,
    obvious_logprobs,
    random_samples,
    shards,
)

from actors.algorithm import (
    Baseline,
    CriticSettings,
    KlRewardSettings,
    RewardSettings,
    Scale,
    ScheduleSettings,
)
from actors.merge.groups import classify_groups
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.step import StepResult, build_step
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats

GROUP = tuple(
    make_trajectory(linear_turns(3, reward=reward, seed=member), rollout_id=f"g000000.0-{member}")
    for member, reward in enumerate([1.0, 0.0, 1.0, 0.5])
)
REWARD = RewardSettings(kl=KlRewardSettings(coefficient=0.1))


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    return rank_settings(
        tiny_models[True],
        tmp_path / "run",
        # As in the tests of ranks, so that the rounding of a zero gradient does not become a step.
        adam_epsilon=1e-4,
        reward=REWARD,
        baseline=Baseline.CRITIC,
        critic=CriticSettings(learning_rate=1e-3, warmup_updates=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    built: StepResult
    stats: StepStats


def play(world: World, *, version: int) -> Step:
    """Run one whole step: plan, scores, batch and updates."""
    merging = step_settings(
        baseline=Baseline.CRITIC,
        scale=Scale.NONE,
        num_ranks=world.num_ranks,
        tokens_per_micro_batch=64,
        reward=REWARD,
    )
    merged = classify_groups([GROUP], merging)
    plan = plan_scores(merged, merging, step=version, trainer_version=version)
    answers = world.call_each("score_rows", [{"shard": shard} for shard in plan])
    scored = read_scores(merged, merging, answers)
    built = build_step(scored, merging, step=version, trainer_version=version)
    stats = world.call_each("train_step", [{"shard": shard} for shard in built.shards])
    return Step(built=built, stats=stats[0])


def values_of(step: Step) -> np.ndarray:
    parts = [scores.values for member in step.built.members for scores in member.scores]
    return np.concatenate([part for part in parts if part is not None])


def reference_of(step: Step) -> np.ndarray:
    parts = [s.reference_logprobs for member in step.built.members for s in member.scores]
    return np.concatenate([part for part in parts if part is not None])


def of_critic(stats: StepStats) -> dict[str, float]:
    return {name: at for name, at in stats.statistics.items() if name.startswith("critic_")}


def test_a_new_critic_gives_values_of_0_and_the_reference_is_the_initial_model(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(settings)
    first, second = (play(one_rank, version=version) for version in range(2))
    assert not values_of(first).any() and values_of(second).any()
    np.testing.assert_array_equal(reference_of(first), reference_of(second))
    member = first.built.members[0]
    (sample,), (scores,) = member.samples, member.scores
    causal_lm = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    expected = obvious_logprobs(causal_lm, sample.token_ids).detach().numpy()
    trained = sample.mask[1:] == 1
    np.testing.assert_allclose(scores.reference_logprobs, expected[trained], atol=1e-5)
    values = [step.stats.statistics["critic_value_mean"] for step in (first, second)]
    assert values[0] == 0.0 != values[1]
    assert first.stats.trained_tokens > 0


def test_the_kl_penalty_is_in_the_returns_that_the_critic_learns(
    one_rank: World, settings: RankSettings
) -> None:
    step = play(one_rank.start(settings), version=0)
    charged = 0.0
    for member in step.built.members:
        (sample,), (scores,) = member.samples, member.scores
        delta = sample.logprobs[sample.mask == 1] - scores.reference_logprobs
        charged += 0.1 * float(delta.astype(np.float64).sum())
    # The mean of the returns 1, 0, 1 and .5, minus the mean penalty.
    assert step.built.report.statistics["reward_mean"] == pytest.approx(
        0.625 - charged / 4, abs=1e-5
    )


@pytest.mark.proof
@pytest.mark.slow
def test_two_ranks_score_and_train_a_critic_as_one_does(
    one_rank: World, two_ranks: World, settings: RankSettings
) -> None:
    alone, both = (
        [play(world.start(settings), version=0), play(world, version=1)]
        for world in (one_rank, two_ranks)
    )
    for one, two in zip(alone, both, strict=True):
        np.testing.assert_allclose(values_of(one), values_of(two), atol=1e-5)
        np.testing.assert_allclose(reference_of(one), reference_of(two), atol=1e-5)
        assert one.stats.statistics["loss"] == pytest.approx(two.stats.statistics["loss"], abs=1e-5)
        assert one.stats.statistics["critic_loss"] == pytest.approx(
            two.stats.statistics["critic_loss"], rel=1e-4
        )
    assert largest_difference(one_rank.weights(), two_ranks.weights()) < 2e-5


@pytest.mark.proof
@pytest.mark.slow
def test_a_critic_resumes_bit_for_bit_with_its_optimiser_and_learning_rate(
    two_ranks: World, settings: RankSettings
) -> None:
    decay = ScheduleSettings(kind="linear", updates=4)
    critic = CriticSettings(learning_rate=1e-3, warmup_updates=0, schedule=decay)
    settings = changed(settings, critic=critic)
    two_ranks.start(settings)
    play(two_ranks, version=0)
    path = two_ranks.call("save", step=1, term=0)[0]
    going_on = play(two_ranks, version=1)
    progress = two_ranks.start(settings).call("load", path=path)[0]
    assert progress.critic_updates == 1
    resumed = play(two_ranks, version=1)
    np.testing.assert_array_equal(values_of(resumed), values_of(going_on))
    assert of_critic(resumed.stats) == of_critic(going_on.stats) != {}
    assert of_critic(resumed.stats)["critic_learning_rate"] == 0.75e-3


def test_a_checkpoint_needs_a_critic_if_one_is_trained_and_may_have_one_otherwise(
    one_rank: World, settings: RankSettings
) -> None:
    plain = changed(settings, baseline=Baseline.MEAN)
    without = one_rank.start(plain).call("save", step=1, term=0)[0]
    with pytest.raises(CheckpointError, match="got no critic, expected one"):
        one_rank.start(settings).call("load", path=without)
    play(one_rank.start(settings), version=0)
    path = one_rank.call("save", step=2, term=0)[0]
    weights = one_rank.weights()
    one_rank.start(plain).call("load", path=path)
    assert largest_difference(weights, one_rank.weights()) == 0.0


def test_a_shard_has_rows_for_a_critic_exactly_if_there_is_one(
    one_rank: World, settings: RankSettings
) -> None:
    (shard,) = shards([random_samples(1, 4)], num_ranks=1, num_micro=1)
    one_rank.start(settings)
    with pytest.raises(AssertionError):
        one_rank.call("train_step", shard=shard)
    built = play(one_rank, version=0).built
    one_rank.start(changed(settings, baseline=Baseline.MEAN))
    with pytest.raises(AssertionError):
        one_rank.call("train_step", shard=built.shards[0])
