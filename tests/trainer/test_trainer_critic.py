"""A critic and a reference in the trainer's ranks: asked first, then trained, then kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.trainer_world import World, largest_difference, obvious_logprobs, random_samples, shards
from worlds.trajectory_builders import linear_turns, make_trajectory

from actors.merge.advantages import Baseline, Scale
from actors.merge.credit import Scores
from actors.merge.groups import TrajectoryGroup, classify_groups
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.settings import StepSettings
from actors.merge.shaping import KlEstimate, KlInReward, ShapingSettings
from actors.merge.step import StepResult, build_step
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.critic_settings import CriticTraining
from actors.trainer.settings import TrainerSettings
from actors.trainer.statistics import StepStats

GROUP = TrajectoryGroup(
    group_id="g000000.0",
    trajectories=tuple(
        make_trajectory(
            linear_turns(3, reward=reward, seed=member), rollout_id=f"g000000.0-{member}"
        )
        for member, reward in enumerate([1.0, 0.0, 1.0, 0.5])
    ),
)
KL = KlInReward(estimate=KlEstimate.K1, coefficient=0.1)


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(
        model=tiny_models[True],
        checkpoint_dir=tmp_path / "run",
        # As in the tests of ranks: the rounding of a zero gradient is no step.
        eps=1e-4,
        scores_reference=True,
        critic=CriticTraining(learning_rate=1e-3, eps=1e-4),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    scores: Scores
    built: StepResult
    stats: StepStats


def play(world: World, *, version: int) -> Step:
    """One whole step: plan, scores, batch, updates."""
    merging = StepSettings(
        baseline=Baseline.CRITIC,
        scale=Scale.NONE,
        num_ranks=world.num_ranks,
        tokens_per_micro_batch=64,
        shaping=ShapingSettings(kl=KL),
    )
    merged = classify_groups([GROUP], merging)
    plan = plan_scores(merged, merging, step=version, trainer_version=version)
    answers = world.call_each("score_rows", [{"shard": shard} for shard in plan.shards])
    scores = read_scores(plan, answers)
    built = build_step(merged, merging, step=version, trainer_version=version, scores=scores)
    pairs = zip(built.shards, built.value_shards, strict=True)
    stats = world.call_each("train_step", [{"shard": s, "value_shard": v} for s, v in pairs])
    return Step(scores=scores, built=built, stats=stats[0])


def values_of(step: Step) -> np.ndarray:
    parts = [s.values for name in sorted(step.scores) for s in step.scores[name]]
    return np.concatenate([part for part in parts if part is not None])


def reference_of(step: Step) -> np.ndarray:
    parts = [s.reference_logprobs for name in sorted(step.scores) for s in step.scores[name]]
    return np.concatenate([part for part in parts if part is not None])


def test_a_new_critic_knows_nothing_and_the_reference_is_the_model_as_it_began(
    one_rank: World, settings: TrainerSettings
) -> None:
    one_rank.start(settings)
    first, second = (play(one_rank, version=version) for version in range(2))
    assert not values_of(first).any() and values_of(second).any()
    np.testing.assert_array_equal(reference_of(first), reference_of(second))
    (sample,) = classify_groups([GROUP], StepSettings())[0].members[0].trajectory.samples
    causal_lm = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    expected = obvious_logprobs(causal_lm, sample.token_ids).detach().numpy()
    trained = sample.mask[1:] == 1
    found = first.scores[sample.trajectory_id][0].reference_logprobs
    np.testing.assert_allclose(found[1:][trained], expected[trained], atol=1e-5)  # type: ignore[index]
    assert first.stats.critic is not None and second.stats.critic is not None
    assert first.stats.critic.value_mean == 0.0 != second.stats.critic.value_mean
    assert first.stats.critic.num_tokens == first.stats.trained_tokens > 0


def test_what_kl_takes_is_in_the_returns_that_the_critic_learns(
    one_rank: World, settings: TrainerSettings
) -> None:
    step = play(one_rank.start(settings), version=0)
    charged = 0.0
    for member in classify_groups([GROUP], StepSettings())[0].members:
        (sample,) = member.trajectory.samples
        (scored,) = step.scores[sample.trajectory_id]
        delta = sample.logprobs - scored.reference_logprobs
        charged += 0.1 * float(delta[sample.mask == 1].astype(np.float64).sum())
    # The mean of returns 1, 0, 1, .5, less the mean penalty.
    assert step.built.report.returns is not None
    assert step.built.report.returns.mean == pytest.approx(0.625 - charged / 4, abs=1e-5)


def test_two_ranks_score_and_train_as_one_does(
    one_rank: World, two_ranks: World, settings: TrainerSettings
) -> None:
    alone, both = (
        [play(world.start(settings), version=0), play(world, version=1)]
        for world in (one_rank, two_ranks)
    )
    for one, two in zip(alone, both, strict=True):
        np.testing.assert_allclose(values_of(one), values_of(two), atol=1e-5)
        np.testing.assert_allclose(reference_of(one), reference_of(two), atol=1e-5)
        assert one.stats.loss == pytest.approx(two.stats.loss, abs=1e-5)
        assert one.stats.critic is not None and two.stats.critic is not None
        assert one.stats.critic.loss == pytest.approx(two.stats.critic.loss, rel=1e-4)
    assert largest_difference(one_rank.weights(), two_ranks.weights()) < 2e-5


def test_a_critic_resumes_bit_for_bit_with_its_optimiser_and_warm_up(
    two_ranks: World, settings: TrainerSettings
) -> None:
    settings = replace(settings, critic=CriticTraining(learning_rate=1e-3, warmup_steps=5))
    two_ranks.start(settings)
    play(two_ranks, version=0)
    path = two_ranks.call("save", step=1, epoch=0)[0]
    going_on = play(two_ranks, version=1)
    progress = two_ranks.start(settings).call("load", path=path)[0]
    assert progress.critic_updates == 1
    resumed = play(two_ranks, version=1)
    np.testing.assert_array_equal(values_of(resumed), values_of(going_on))
    assert resumed.stats.critic == going_on.stats.critic


def test_a_checkpoint_without_a_critic_is_refused_and_one_too_many_is_left(
    one_rank: World, settings: TrainerSettings
) -> None:
    plain = replace(settings, critic=None)
    without = one_rank.start(plain).call("save", step=1, epoch=0)[0]
    with pytest.raises(CheckpointError, match="got none of a critic, expected one"):
        one_rank.start(settings).call("load", path=without)
    play(one_rank.start(settings), version=0)
    path = one_rank.call("save", step=2, epoch=0)[0]
    weights = one_rank.weights()
    one_rank.start(plain).call("load", path=path)
    assert largest_difference(weights, one_rank.weights()) == 0.0


def test_a_step_brings_values_exactly_where_there_is_a_critic(
    one_rank: World, settings: TrainerSettings
) -> None:
    (shard,) = shards([random_samples(1, 4)], num_ranks=1, num_micro=1)
    one_rank.start(settings)
    with pytest.raises(ValueError, match="got no value shard with a critic"):
        one_rank.call("train_step", shard=shard)
    built = play(one_rank, version=0).built
    one_rank.start(replace(settings, critic=None))
    with pytest.raises(ValueError, match="got a value shard without a critic"):
        one_rank.call("train_step", shard=shard, value_shard=built.value_shards[0])
