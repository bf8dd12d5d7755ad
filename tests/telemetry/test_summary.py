"""Tests of the means, sums and maxima in summary.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.builders.record_builders import (
    evaluation_record,
    history_of,
    step_record,
    summary_of,
    unmeasured_step,
)

from actors.trajectory_queue.ledger import EvictionReason, LedgerCounts
from actors.types import BranchReason, Outcome
from service.report.document import checks
from service.report.tables import summary_tables
from service.telemetry.records import StageSeconds
from service.telemetry.summary import write_summary


def test_rewards_are_means_of_the_first_and_last_five_steps() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 9.0, 0.6, 0.7, 0.8, 0.9, 1.0]
    run = history_of(
        steps=tuple(
            step_record(step, scaled_reward_mean=reward) for step, reward in enumerate(rewards, 1)
        )
    )
    summary = summary_of(run)
    assert summary.reward_first == pytest.approx(0.2)
    assert summary.reward_last == pytest.approx(0.8)
    assert summary.is_reward_scaled


def test_the_plain_return_is_used_if_the_best_return_is_unknown() -> None:
    run = history_of(steps=(step_record(1, reward_mean=3.0, scaled_reward_mean=None),))
    summary = summary_of(run)
    assert summary.reward_last == 3.0
    assert not summary.is_reward_scaled


def test_steps_without_a_reward_do_not_count_in_the_mean() -> None:
    run = history_of(steps=(unmeasured_step(1), step_record(2, scaled_reward_mean=0.4)))
    assert summary_of(run).reward_first == pytest.approx(0.4)


def test_mismatch_is_weighted_by_trained_tokens_and_skips_unknown_steps() -> None:
    run = history_of(
        steps=(
            step_record(1, mismatch_k3_mean=1e-9, num_trained_tokens=100, mismatch_max=2e-5),
            step_record(2, mismatch_k3_mean=5e-9, num_trained_tokens=300, mismatch_max=1e-5),
            step_record(3, mismatch_k3_mean=None, num_trained_tokens=900, mismatch_max=None),
        )
    )
    mismatch = summary_of(run).mismatch
    assert mismatch.mean_k3 == pytest.approx(4e-9)
    assert mismatch.max_abs_delta == 2e-5


def test_the_cost_of_logprob_checks_is_their_share_of_the_time_of_all_steps() -> None:
    stages = StageSeconds(collect=1.5, train=0.5)
    run = history_of(
        steps=(
            step_record(1, stages=stages, logprob_check_seconds=0.06),
            step_record(2, stages=stages, logprob_check_seconds=0.02),
            step_record(3, stages=stages, logprob_check_seconds=None),
        )
    )
    check = summary_of(run).logprob_check
    assert check.seconds == 0.06 and check.share == pytest.approx(0.08 / 6)
    texts = {each["name"]: each["text"] for each in checks(summary_of(run), run.totals)}
    assert texts["engines compute as the trainer"].endswith(
        "took up to 0.06 s, all of them 1.3\u00a0% of the time of the steps."
    )


def test_sums_and_maxima_are_over_all_steps() -> None:
    run = history_of(
        steps=(
            step_record(
                1,
                policy_age_max=2,
                outcomes={Outcome.COMPLETED: 3},
                branches={BranchReason.TEMPLATE: 1},
            ),
            step_record(2, policy_age_max=1, outcomes={Outcome.COMPLETED: 1, Outcome.MAX_TURNS: 5}),
        ),
        num_terms=3,
    )
    summary = summary_of(run)
    assert summary.max_policy_age == 2
    assert summary.sampled_tokens == 800
    assert summary.merge.samples_before == 80
    assert summary.merge.ratio == pytest.approx(2.5)
    assert summary.merge.branches == {"template": 1}
    assert list(summary.outcomes.items()) == [("max_turns", 5), ("completed", 4)]
    assert summary.stage_seconds.collect == pytest.approx(1.6)
    assert summary.num_resumes == 2


def test_the_malformed_share_is_of_turns_and_not_a_mean_over_steps() -> None:
    run = history_of(
        steps=(
            step_record(1, num_malformed_turns=10, num_turns=10),
            step_record(2, num_malformed_turns=0, num_turns=90),
        )
    )
    assert summary_of(run).malformed_share["first"] == pytest.approx(0.1)


def test_a_run_without_steps_has_null_means() -> None:
    tree = summary_of(history_of()).to_json()
    assert tree["steps"] == 0
    assert tree["reward_first"] is None
    assert tree["mismatch"] == {"mean_k3": None, "max_abs_delta": None}
    assert tree["evaluation"] == {"first": None, "last": None, "asked": [], "sets": {}}
    assert tree["merge"]["ratio"] is None


def test_named_sets_are_listed_by_name_and_are_not_in_the_curve() -> None:
    own = [evaluation_record(step, reward=0.1 * step) for step in (0, 1)]
    hard = [replace(each, name="hard", reward_mean=0.9, num_samples=4) for each in own]
    summary = summary_of(history_of(evaluations=(own[0], hard[0], own[1], hard[1])))
    assert (summary.evaluation.first, summary.evaluation.last) == (own[0], own[1])
    assert summary.evaluation.sets == {"hard": hard[1]} and summary.evaluation.asked == ()
    (table,) = [each for each in summary_tables(summary) if each.caption == "Last evaluations"]
    assert [row[0] for row in table.rows] == ["held out", "hard"]


def test_the_summary_file_has_every_promised_key_and_only_finite_numbers(tmp_path: Path) -> None:
    run = history_of(
        steps=(
            step_record(1, logprob_check_max=float("nan"), stages=StageSeconds(train=float("inf"))),
        ),
        evaluations=(evaluation_record(0), evaluation_record(1, reward=float("nan"))),
    )
    path = tmp_path / "summary.json"
    write_summary(path, summary_of(run))
    tree = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert {
        "steps",
        "reward_first",
        "reward_last",
        "policy_version",
        "max_policy_age",
        "sampled_tokens",
        "trained_tokens",
        "merge",
        "ledger",
        "mismatch",
        "stage_seconds",
        "wall_s",
        "versions",
    } <= set(tree)
    assert {"samples_before", "samples_after", "branches"} <= set(tree["merge"])
    assert {"admitted", "trained", "evicted", "in_flight"} <= set(tree["ledger"])
    assert {"vllm", "ray", "torch"} <= set(tree["versions"])
    assert tree["logprob_check_max"] is None
    names = {"tokens", "mean", "max", "ratio", "seconds", "share"}
    assert set(tree["logprob_check"]) == names and tree["logprob_check"]["max"] is None
    assert tree["logprob_check"]["ratio"] == 0.01
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_the_summary_has_the_counts_of_the_queue_by_reason() -> None:
    counts = LedgerCounts(admitted=10, trained=6, evicted={EvictionReason.MASKED: 3}, in_flight=1)
    tree = summary_of(history_of(), ledger=counts).to_json()["ledger"]
    assert tree == {
        "admitted": 10, "trained": 6, "evicted": {"masked": 3}, "in_flight": 1, "is_balanced": True,
    }  # fmt: skip
    assert not LedgerCounts(admitted=2, trained=1).is_balanced
