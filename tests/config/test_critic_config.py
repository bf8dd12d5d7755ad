"""Tests of the configuration of critics, reference models and KL in the reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.algorithm import Baseline
from actors.outcomes import Disposition
from actors.types import SESSION, TRUNCATIONS, Outcome
from service.config.file import ConfigError, parse_config
from service.config.resumable import refused_changes
from service.config.tree import Config


def config_with(*, outcomes: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    tree = {
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "rollouts": {"outcomes": outcomes or {}},
        "trainer": {"betas": [0.8, 0.9], "adam_epsilon": 1e-6, "max_grad_norm": 0.5},
        "algorithm": algorithm,
    }
    return parse_config(tree, source="test")


def test_the_settings_decide_which_models_are_loaded_and_which_values_are_scored() -> None:
    plain = config_with().algorithm
    assert not (plain.has_critic or plain.needs_reference or plain.scores_first)
    critic = config_with(baseline="critic", scale="none").algorithm
    assert critic.has_critic and critic.scores_first and not critic.needs_reference
    assert critic.bootstraps and not plain.bootstraps
    masks = {"truncation": "mask"}
    assert not config_with(baseline="critic", scale="none", critic=masks).algorithm.bootstraps
    shaped = config_with(reward={"kl": {"coefficient": 0.1}}).algorithm
    assert shaped.needs_reference and shaped.shapes_by_reference and shaped.scores_first
    assert not (shaped.has_critic or shaped.loss.needs_reference or shaped.trains_without_signal)
    in_loss = config_with(loss={"kl": {"coefficient": 0.1}}).algorithm
    assert in_loss.needs_reference and not in_loss.scores_first and in_loss.trains_without_signal


@pytest.mark.parametrize(
    ("critic", "disposition", "penalty"),
    [
        ({}, Disposition.TRAIN, 0.0),
        ({"truncation": "terminal"}, Disposition.TRAIN, 0.0),
        ({"truncation": "mask"}, Disposition.MASK, 0.0),
        ({"truncation": "penalty", "truncation_penalty": 0.5}, Disposition.TRAIN_PENALISED, 0.5),
        ({"truncation": "drop"}, Disposition.DROP, 0.0),
    ],
)
def test_a_critic_sets_the_rule_for_truncated_rollouts(
    critic: dict[str, Any], disposition: Disposition, penalty: float
) -> None:
    policy = config_with(baseline="critic", scale="none", critic=critic).outcome_policy
    for outcome in TRUNCATIONS:
        assert policy.rule(outcome).disposition is disposition
        assert policy.rule(outcome).penalty == penalty
    plain = config_with().outcome_policy
    assert policy.rule(Outcome.MAX_TURNS) == plain.rule(Outcome.MAX_TURNS)


def test_a_configured_rule_takes_precedence_over_the_critics() -> None:
    outcomes = {"truncated_tokens": {"disposition": "drop"}}
    policy = config_with(baseline="critic", scale="none", outcomes=outcomes).outcome_policy
    assert policy.rule(Outcome.TRUNCATED_TOKENS).disposition is Disposition.DROP
    assert policy.rule(Outcome.TRUNCATED_CONTEXT).disposition is Disposition.TRAIN


def test_a_session_is_never_retried_and_has_the_dispositions_of_the_run() -> None:
    outcomes = {"wall_timeout": {"disposition": "mask", "max_retries": 3}}
    config = config_with(baseline="critic", scale="none", outcomes=outcomes)
    own, of_sessions = config.policies["guessing"], config.policies[SESSION]
    assert own == config.outcome_policy
    for outcome in Outcome:
        expected = replace(own.rule(outcome), max_retries=0)
        assert of_sessions.rule(outcome) == expected
        assert not of_sessions.is_retried(outcome, attempt=0)
    assert own.is_retried(Outcome.WALL_TIMEOUT, attempt=2)
    assert of_sessions.disposition(Outcome.WALL_TIMEOUT) is Disposition.MASK


@pytest.mark.parametrize(
    "algorithm", [{"baseline": "critic", "scale": "none"}, {"reward": {"kl": {"coefficient": 1}}}]
)
def test_there_is_no_group_rule_if_returns_need_a_critic_or_kl(
    algorithm: dict[str, Any],
) -> None:
    assert config_with(**algorithm).group_rule is None
    rule = config_with(loss={"entropy_coefficient": 0.1}).group_rule
    assert rule is not None and rule.trains_without_signal and rule.baseline is Baseline.MEAN


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"critic": {"decay": 0.5}}, ["algorithm.critic is set", "baseline mean"]),
        (
            {"baseline": "critic"},
            ["scale is std", "critic", "set algorithm.scale to none"],
        ),
        ({"baseline": "critic", "scale": "mean"}, ["scale is mean", "baseline critic"]),
        ({"critic": {"decay": 1.1}}, ["algorithm.critic.decay", "got 1.1"]),
        ({"critic": {"value_clip": 0}}, ["algorithm.critic.value_clip", "got 0"]),
        ({"critic": {"learning_rate": -1}}, ["algorithm.critic.learning_rate", "got -1"]),
        (
            {"baseline": "critic", "scale": "none", "critic": {"truncation": "penalty"}},
            ["truncation_penalty is 0 with truncation penalty", "expected more than 0"],
        ),
        (
            {"baseline": "critic", "scale": "none", "critic": {"truncation_penalty": 1}},
            ["truncation_penalty is 1 with truncation bootstrap"],
        ),
        (
            {"baseline": "critic", "scale": "none", "max_variance_refills": 2},
            ["max_variance_refills is 2", "baseline critic"],
        ),
        ({"reference": "base"}, ["algorithm.reference is base", "nothing is compared with it"]),
        ({"reward": {"kl": {"coefficient": 0}}}, ["algorithm.reward.kl.coefficient", "got 0"]),
    ],
)
def test_settings_without_an_effect_are_refused(
    algorithm: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**algorithm)
    for word in words:
        assert word in str(caught.value)


def test_a_run_is_not_resumed_with_or_without_a_critic_if_it_began_otherwise() -> None:
    plain, with_critic = config_with(), config_with(baseline="critic", scale="none")
    for before, now in ((plain, with_critic), (with_critic, plain)):
        (refusal,) = refused_changes(before, now)
        assert "expected a critic in both or in neither" in refusal
    other = config_with(normalise_advantages=True, baseline="critic", scale="none")
    assert refused_changes(with_critic, other) == []


def test_a_run_is_not_resumed_with_another_critic_or_reference() -> None:
    kl = {"reward": {"kl": {"coefficient": 0.1}}}
    pairs = [
        ("algorithm.reference", config_with(**kl), config_with(**kl, reference="other")),
        (
            "algorithm.critic.model",
            config_with(baseline="critic", scale="none"),
            config_with(baseline="critic", scale="none", critic={"model": "other"}),
        ),
    ]
    for key, before, now in pairs:
        (refusal,) = refused_changes(before, now)
        assert refusal.startswith(f"{key} is other, the run began with null; expected the same")
