"""Tests of the ranks' inputs of the loss: old and reference log-probabilities, and entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.builders.settings import changed, rank_settings
from worlds.parts.trainer_world import World, largest_difference, random_samples

from actors.algorithm import KlSettings, LossSettings
from actors.trainer.settings import RankSettings

LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 2e-5


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    return rank_settings(tiny_models[True], tmp_path, adam_epsilon=1e-4)


def test_a_loss_with_all_terms_is_the_same_on_one_rank_and_two(
    one_rank: World, two_ranks: World, settings: RankSettings
) -> None:
    loss = LossSettings(
        ratio="sequence", denominator="old", clip_low=0.1, clip_high=0.1,
        correction="truncate_sequence", outlier_below=0.45,
        kl=KlSettings(coefficient=0.1, corrected=True), entropy_coefficient=0.01,
    )  # fmt: skip
    settings = changed(settings, loss=loss, epochs=2)
    minibatches = [random_samples(30, 7), random_samples(31, 6)]
    alone = one_rank.start(settings).step(minibatches)
    both = two_ranks.start(settings).step(minibatches, num_micro=4)
    one, two = alone.statistics, both.statistics
    assert two["loss"] == pytest.approx(one["loss"], abs=LOSS_TOLERANCE)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert largest_difference(one_rank.weights(), two_ranks.weights()) < WEIGHT_TOLERANCE
    assert 0 < one["masked_fraction"] == two["masked_fraction"] < 1
    assert two["kl_max"] == pytest.approx(one["kl_max"], rel=1e-3)
    assert two["policy_logprob_positive_mean"] == pytest.approx(
        one["policy_logprob_positive_mean"], rel=1e-5
    )
    assert two["advantage_min"] == one["advantage_min"] < 0


def logprobs(statistics: Mapping[str, float], policy: str) -> list[float]:
    """Return the statistics of one policy's log-probabilities, in the order of the table."""
    return [value for name, value in statistics.items() if name.startswith(f"{policy}_logprob")]


def test_the_old_policy_is_the_trainer_at_the_steps_start_in_every_update(
    one_rank: World, settings: RankSettings
) -> None:
    settings = changed(settings, loss=LossSettings(denominator="old"))
    samples = random_samples(32, 5)
    once = one_rank.start(settings).step([samples]).statistics
    # A single update starts at the old policy, so that all ratios are 1.
    assert once["ratio_mean"] == once["ratio_max"] == 1.0
    assert logprobs(once, "old") == logprobs(once, "policy")
    thrice = one_rank.start(changed(settings, epochs=3)).step([samples]).statistics
    assert thrice["ratio_max"] > 1.001
    start = once["policy_logprob_mean"]
    assert thrice["old_logprob_mean"] == pytest.approx(start, rel=1e-6)
    assert abs(thrice["policy_logprob_mean"] - start) > 1e-4
    # The old policy of the next step is the result of this one.
    after = one_rank.step([samples], step=1, version=1).statistics
    assert abs(after["old_logprob_mean"] - start) > 1e-4


def test_the_reference_remains_the_initial_policy(two_ranks: World, settings: RankSettings) -> None:
    settings = changed(settings, loss=LossSettings(kl=KlSettings(coefficient=0.01)))
    samples = random_samples(33, 6)
    two_ranks.start(settings)
    first = two_ranks.step([samples]).statistics
    second = two_ranks.step([samples], step=1, version=1).statistics
    assert first["kl_max"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_mean"] > 1e-7
    assert logprobs(second, "reference") == logprobs(first, "reference")
    assert logprobs(second, "policy") != logprobs(first, "policy")


def test_without_a_kl_term_no_reference_is_scored_or_reported(
    one_rank: World, settings: RankSettings
) -> None:
    stats = one_rank.start(changed(settings, reference="/nowhere")).step([random_samples(34, 3)])
    assert logprobs(stats.statistics, "policy")
    assert not logprobs(stats.statistics, "reference") and not logprobs(stats.statistics, "old")
    assert "kl_mean" not in stats.statistics


def test_only_an_entropy_bonus_raises_the_entropy_if_advantages_are_zero(
    one_rank: World, settings: RankSettings
) -> None:
    samples = [
        replace(sample, advantages=0 * sample.advantages) for sample in random_samples(35, 5)
    ]
    ends = []
    for coefficient in (1.0, 0.0):
        loss = LossSettings(entropy_coefficient=coefficient)
        one_rank.start(changed(settings, loss=loss, logprob_chunk=16))
        start = one_rank.step([samples]).statistics["entropy_mean"]
        ends.append(one_rank.step([samples], step=1, version=1).statistics["entropy_mean"] - start)
    assert ends[0] > 1e-5 and ends[1] == pytest.approx(0, abs=1e-7)
