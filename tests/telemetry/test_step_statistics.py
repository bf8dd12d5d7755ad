"""From what trainer and merge actor report to flat names: each number once, and no invented one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from worlds.record_builders import step_record

from actors.merge.report import MergeReport, Spread, StepReport
from actors.trainer.critic_settings import CriticStats
from actors.trainer.statistics import (
    LogprobStats,
    LossStats,
    MismatchStats,
    PhaseSeconds,
    StepStats,
    TokenSpread,
)
from service.run.ports import PublishedVersion
from service.telemetry.records import StageSeconds, StepRecord
from service.telemetry.statistic_names import STATISTIC_NAMES
from service.telemetry.step_record import step_record as make_step_record
from service.telemetry.step_statistics import step_statistics


def logprobs(start: float) -> LogprobStats:
    return LogprobStats(
        mean=start, max=start + 0.1, positive_mean=start + 0.2, positive_max=start + 0.3,
        negative_mean=start + 0.4, negative_max=start + 0.5,
    )  # fmt: skip


# Every number differs from every other, so that none can stand in another's place.
LOSS = LossStats(
    policy_logprobs=logprobs(-3.0), old_logprobs=logprobs(-5.0), reference_logprobs=logprobs(-7.0),
    surrogate_mean=0.02, unclipped_surrogate_mean=0.03,
    kl=TokenSpread(mean=0.2, min=0.01, max=4.0),
    clip_fraction_low=0.04, clip_fraction_high=0.05,
    masked_fraction=0.1, masked_token_fraction=0.06, masked_sequence_fraction=0.07,
    masked_outlier_fraction=0.08, importance_weight_mean=0.9, importance_weight_max=2.0,
    advantage=TokenSpread(mean=0.11, min=-1.5, max=1.6),
)  # fmt: skip

STATS = StepStats(
    step=0, trainer_version=0, loss=0.5, grad_norm=1.5, learning_rate=1e-3, trained_tokens=10,
    packed_tokens=20, ratio_mean=1.01, ratio_max=3.3, clip_fraction=0.09,
    effective_sample_fraction=0.7, entropy_mean=1.2, advantage_mean=0.11, policy_age_mean=0.0,
    policy_age_max=0, num_updates=1, num_empty_updates=0, num_skipped_updates=0, tokens=LOSS,
    mismatch=MismatchStats(k1_mean=-1e-4, k3_mean=1e-8, max_abs_delta=1e-3, num_tokens=10),
    seconds=PhaseSeconds(total_s=0, prepare_s=0, forward_s=0, backward_s=0, optimizer_s=0),
    critic=CriticStats(
        loss=0.31, grad_norm=0.32, value_mean=0.33, target_mean=0.34, explained_variance=0.35,
        clip_fraction=0.36, num_tokens=10, is_skipped=False,
    ),
)  # fmt: skip

REPORT = StepReport(
    step=0, trainer_version=0, num_groups=1, num_zero_variance_groups=0, num_trajectories=2,
    outcomes={}, evictions={}, num_malformed_rewarded=0,
    merge=MergeReport(
        samples_before=2, samples_after=1, branches={}, num_saved_tokens=0, num_masked_tokens=0
    ),
    returns=Spread(mean=0.5, std=0.25, min=-0.75, max=1.25), scaled_return_mean=None,
    advantages=Spread(mean=0.12, std=0.8, min=-1.1, max=1.7), policy_age_max=0, policy_age_mean=0.0,
    num_turns=2, num_malformed_turns=0, num_inserted_tokens=0, num_sampled_tokens=10,
    num_trained_tokens=10, num_packed_tokens=20, num_micro_batches=1, num_fillers=0,
    num_overruled_records=0,
)  # fmt: skip

# As a trainer and a merge actor describe a step in which every group was lost.
NOTHING_TRAINED = replace(
    STATS, trained_tokens=0, ratio_mean=0.0, ratio_max=0.0, effective_sample_fraction=0.0,
    mismatch=None, tokens=None,
    critic=CriticStats(
        loss=0.0, grad_norm=0.0, value_mean=0.0, target_mean=0.0, explained_variance=None,
        clip_fraction=0.0, num_tokens=0, is_skipped=False,
    ),
)  # fmt: skip


def numbers_in(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from numbers_in(value)
    elif tree is not None:
        yield tree


def test_each_number_has_the_name_that_says_what_it_is() -> None:
    found = step_statistics(STATS, REPORT)
    assert {
        "policy_logprob_mean": -3.0,
        "policy_logprob_positive_mean": -2.8,
        "policy_logprob_negative_max": -2.5,
        "old_logprob_positive_max": -4.7,
        "reference_logprob_max": -6.9,
        "surrogate_mean": 0.02,
        "unclipped_surrogate_mean": 0.03,
        "kl_mean": 0.2,
        "kl_min": 0.01,
        "kl_max": 4.0,
        "clip_fraction_low": 0.04,
        "clip_fraction_high": 0.05,
        "masked_fraction": 0.1,
        "masked_token_fraction": 0.06,
        "masked_sequence_fraction": 0.07,
        "masked_outlier_fraction": 0.08,
        "importance_weight_mean": 0.9,
        "importance_weight_max": 2.0,
        "ratio_mean": 1.01,
        "ratio_max": 3.3,
        "effective_sample_fraction": 0.7,
        "mismatch_k1_mean": -1e-4,
        "advantage_mean": 0.11,
        "advantage_min": -1.5,
        "advantage_max": 1.6,
        "trajectory_advantage_mean": 0.12,
        "trajectory_advantage_std": 0.8,
        "trajectory_advantage_min": -1.1,
        "trajectory_advantage_max": 1.7,
        "critic_loss": 0.31,
        "critic_grad_norm": 0.32,
        "critic_value_mean": 0.33,
        "critic_target_mean": 0.34,
        "critic_explained_variance": 0.35,
        "critic_clip_fraction": 0.36,
        "reward_std": 0.25,
        "reward_min": -0.75,
        "reward_max": 1.25,
    }.items() <= found.items()


def test_no_number_of_the_loss_is_left_behind() -> None:
    numbers = list(numbers_in(asdict(LOSS)))
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(step_statistics(STATS, REPORT).values())


def test_the_names_are_those_that_are_listed_each_once() -> None:
    assert sorted(step_statistics(STATS, REPORT)) == sorted(STATISTIC_NAMES)
    assert len(set(STATISTIC_NAMES)) == len(STATISTIC_NAMES)


def test_what_the_loss_does_not_ask_for_is_absent() -> None:
    tokens = replace(
        LOSS,
        old_logprobs=None,
        reference_logprobs=None,
        kl=None,
        policy_logprobs=replace(LOSS.policy_logprobs, negative_mean=None, negative_max=None),
    )
    found = step_statistics(replace(STATS, tokens=tokens, mismatch=None, critic=None), REPORT)
    others = ("old_", "reference_", "kl_", "critic_")
    missing = {name for name in STATISTIC_NAMES if name.startswith(others)}
    missing |= {"policy_logprob_negative_mean", "policy_logprob_negative_max", "mismatch_k1_mean"}
    assert set(STATISTIC_NAMES) - found.keys() == missing


def test_a_step_that_trained_nothing_knows_its_rewards_and_no_zero_beside_them() -> None:
    found = step_statistics(NOTHING_TRAINED, replace(REPORT, advantages=None))
    assert found == {"reward_std": 0.25, "reward_min": -0.75, "reward_max": 1.25}
    assert step_statistics(NOTHING_TRAINED, replace(REPORT, returns=None, advantages=None)) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_known(value: float) -> None:
    tokens = replace(LOSS, kl=TokenSpread(mean=value, min=0.01, max=value))
    found = step_statistics(replace(STATS, tokens=tokens), REPORT)
    assert set(STATISTIC_NAMES) - found.keys() == {"kl_mean", "kl_max"}


def test_a_zero_that_was_measured_stays() -> None:
    tokens = replace(LOSS, masked_fraction=0.0, clip_fraction_low=0.0)
    found = step_statistics(replace(STATS, tokens=tokens), REPORT)
    assert found["masked_fraction"] == found["clip_fraction_low"] == 0.0


def test_the_record_of_a_step_keeps_its_statistics_on_the_way_to_the_store_and_back() -> None:
    published = PublishedVersion(version=1, num_engines=1, parity_max=None, wall_s=0.0)
    record = make_step_record(1, REPORT, STATS, published, StageSeconds())
    assert record.statistics == step_statistics(STATS, REPORT)
    assert record.ratio_max == record.statistics["ratio_max"]
    assert StepRecord.from_json(record.to_json()) == record


def test_a_record_that_was_stored_without_statistics_can_still_be_read() -> None:
    tree = step_record(3).to_json()
    del tree["statistics"]
    assert StepRecord.from_json(tree) == step_record(3, statistics={})
