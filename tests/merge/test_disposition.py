"""Tests of dispositions: which trajectories are in the baseline and in the loss, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from worlds.builders.trajectory_builders import linear_turns, make_trajectory, make_turn

from actors.algorithm import AlgorithmSettings, RewardSettings
from actors.expert_records import ModelShape
from actors.merge.groups import classify, classify_groups
from actors.merge.member import Member
from actors.merge.settings import StepSettings
from actors.misalignment import find_misfit
from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory

VOCABULARY = 500


def decide(trajectory: Trajectory, policies: Mapping[str, OutcomePolicy] | None = None) -> Member:
    misfit = find_misfit(trajectory, shape=ModelShape(vocab_size=VOCABULARY))
    return classify(trajectory, misfit=misfit, policies=policies or {})


def ended(outcome: Outcome, *, reward: float = 1.0) -> Trajectory:
    return make_trajectory(linear_turns(2, reward=reward), outcome=outcome)


@pytest.mark.parametrize(
    ("outcome", "baseline_return", "reason"),
    [
        (Outcome.COMPLETED, 1.0, None),
        (Outcome.MAX_TURNS, 0.0, None),
        (Outcome.MALFORMED_TOOL_CALL, 0.0, None),
        (Outcome.TRUNCATED_TOKENS, 1.0, EvictionReason.MASKED),
        (Outcome.WALL_TIMEOUT, None, EvictionReason.WALL_TIMEOUT),
        (Outcome.REWARD_ERROR, None, EvictionReason.REWARD_ERROR),
    ],
)
def test_the_default_dispositions(
    outcome: Outcome, baseline_return: float | None, reason: EvictionReason | None
) -> None:
    member = decide(ended(outcome))
    assert (member.baseline_return, member.reason) == (baseline_return, reason)


def test_clamping_does_not_change_a_negative_return() -> None:
    assert decide(ended(Outcome.MAX_TURNS, reward=-2.0)).baseline_return == -2.0


def test_a_clamped_return_is_at_most_that_of_the_worst_completed_answer() -> None:
    rule = OutcomeRule(disposition=Disposition.TRAIN_CLAMPED)
    policies = {"guessing": OutcomePolicy(overrides={Outcome.TRUNCATED_TOKENS: rule})}
    group = [
        replace(ended(outcome, reward=reward), rollout_id=f"r{number}", environment="guessing")
        for number, (outcome, reward) in enumerate(
            [
                (Outcome.COMPLETED, 1.0),
                (Outcome.COMPLETED, -1.0),
                (Outcome.TRUNCATED_TOKENS, 0.0),
                (Outcome.TRUNCATED_TOKENS, -3.0),
                (Outcome.MAX_TURNS, 2.0),
            ]
        )
    ]
    settings = StepSettings(
        algorithm=AlgorithmSettings(),
        trainer=TrainerSettings(),
        max_context_tokens=100,
        seed=0,
        policies=policies,
    )
    (members,) = classify_groups([group], settings)
    assert [member.baseline_return for member in members] == [1.0, -1.0, -1.0, -3.0, -1.0]


def test_disposition_score_trains_graded_trajectories_and_masks_others() -> None:
    rule = OutcomeRule(disposition=Disposition.SCORE)
    policies = {"guessing": OutcomePolicy(overrides={Outcome.TRUNCATED_TOKENS: rule})}
    graded = replace(ended(Outcome.TRUNCATED_TOKENS), environment="guessing")
    member = decide(graded, policies)
    assert (member.baseline_return, member.reason) == (1.0, None)
    cut_off = make_trajectory([make_turn([1], [2, 3])], outcome=Outcome.TRUNCATED_TOKENS)
    member = decide(replace(cut_off, environment="guessing"), policies)
    assert (member.baseline_return, member.reason) == (None, EvictionReason.MASKED)


def test_a_masked_trajectory_that_was_not_graded_is_not_in_the_baseline() -> None:
    cut_off = make_trajectory([make_turn([1], [2, 3])], outcome=Outcome.TRUNCATED_TOKENS)
    member = decide(cut_off)
    assert member.baseline_return is None and member.reason is EvictionReason.MASKED


@pytest.mark.parametrize(
    ("outcome", "reward", "baseline_return"),
    [
        # A failed score does not count as 0; an interrupted rollout counts if its end was scored.
        (Outcome.REWARD_ERROR, 1.0, None),
        (Outcome.WALL_TIMEOUT, None, None),
        (Outcome.WALL_TIMEOUT, 1.0, 1.0),
        (Outcome.ENVIRONMENT_ERROR, None, None),
        (Outcome.MAX_TURNS, None, 0.0),
    ],
)
def test_an_unscored_trajectory_is_not_in_the_baseline(
    outcome: Outcome, reward: float | None, baseline_return: float | None
) -> None:
    unscored = make_trajectory([make_turn([1], [2, 3])], outcome=outcome)
    trajectory = unscored if reward is None else ended(outcome, reward=reward)
    rule = OutcomeRule(disposition=Disposition.MASK)
    member = decide(trajectory, {"game": OutcomePolicy(overrides={outcome: rule})})
    assert (member.baseline_return, member.reason) == (baseline_return, EvictionReason.MASKED)


def test_an_environment_can_override_the_disposition_of_an_outcome() -> None:
    rule = OutcomeRule(disposition=Disposition.TRAIN)
    policies = {"game": OutcomePolicy(overrides={Outcome.TRUNCATED_TOKENS: rule})}
    assert decide(ended(Outcome.TRUNCATED_TOKENS), policies).reason is None
    assert decide(ended(Outcome.TRUNCATED_TOKENS), {"other": policies["game"]}).reason


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED_TOKENS, Outcome.AGENT_ERROR])
def test_a_penalty_lowers_the_return_at_the_last_turn(outcome: Outcome) -> None:
    rule = OutcomeRule(disposition=Disposition.TRAIN_PENALISED, penalty=1.5)
    member = decide(ended(outcome), {"game": OutcomePolicy(overrides={outcome: rule})})
    assert (member.baseline_return, member.reason) == (-0.5, None)
    assert member.rewards.tolist() == [0.0, -0.5] and member.shaped_return == 1.0


def test_shaping_comes_before_the_outcomes_rule() -> None:
    reward = RewardSettings(clip=(-1.0, 0.5))
    trajectory = ended(Outcome.MAX_TURNS, reward=-3.0)
    member = classify(trajectory, policies={}, reward=reward)
    assert (member.baseline_return, member.shaped_return) == (-1.0, -1.0)
    malformed = ended(Outcome.MALFORMED_TOOL_CALL)
    member = classify(malformed, policies={}, reward=reward)
    assert (member.baseline_return, member.shaped_return) == (0.0, 0.5)
    assert member.is_malformed_rewarded and member.rewards.tolist() == [0.0, 0.0]


def test_a_malformed_trajectory_with_a_positive_reward_is_an_alarm() -> None:
    assert decide(ended(Outcome.MALFORMED_TOOL_CALL)).is_malformed_rewarded
    assert not decide(ended(Outcome.MALFORMED_TOOL_CALL, reward=0.0)).is_malformed_rewarded
    assert not decide(ended(Outcome.COMPLETED)).is_malformed_rewarded


def test_a_trajectory_that_cannot_be_trained_has_a_reason_of_its_own() -> None:
    nan = float("nan")
    misaligned = decide(make_trajectory([make_turn([1], [2, VOCABULARY])]))
    assert (misaligned.baseline_return, misaligned.reason) == (
        None,
        EvictionReason.TOKEN_MISALIGNED,
    )
    no_logprobs = decide(make_trajectory([make_turn([1], [2], logprobs=[nan], reward=1.0)]))
    assert (no_logprobs.baseline_return, no_logprobs.reason) == (
        1.0,
        EvictionReason.TOKEN_MISALIGNED,
    )
    assert decide(make_trajectory([make_turn([1], [])])).reason is EvictionReason.EMPTY
    bad_reward = decide(make_trajectory([make_turn([1], [2], reward=nan)]))
    assert (bad_reward.baseline_return, bad_reward.reason) == (None, EvictionReason.REWARD_ERROR)
