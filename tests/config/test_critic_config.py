"""Critics, references and KL in the reward, as the configuration has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.merge.advantages import Baseline, Truncation
from actors.merge.shaping import KlEstimate, KlInReward
from actors.outcomes import Disposition
from actors.types import TRUNCATIONS, Outcome
from service.config.file import ConfigError, parse_config
from service.config.resumable import refused_changes
from service.config.settings_of import (
    journal_settings,
    merge_settings,
    outcome_policy,
    trainer_settings,
)
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


def test_every_key_of_a_critic_reaches_the_advantages_and_the_ranks() -> None:
    config = config_with(
        baseline="critic",
        scale="none",
        group_size=1,
        min_group_size=1,
        reference="base",
        reward={"kl": {"coefficient": 0.02, "estimator": "k3"}},
        critic={
            "model": "judge", "discount": 0.9, "decay": 0.8, "truncation": "terminal",
            "learning_rate": 3e-4, "warmup_updates": 7, "value_clip": None,
        },
    )  # fmt: skip
    merge = merge_settings(config)
    assert merge.baseline is Baseline.CRITIC and merge.needs_values and merge.needs_reference
    assert (merge.critic.discount, merge.critic.decay) == (0.9, 0.8)
    assert merge.critic.truncation is Truncation.TERMINAL
    assert merge.shaping.kl == KlInReward(estimate=KlEstimate.K3, coefficient=0.02)
    trainer = trainer_settings(config, model="m", checkpoint_dir=Path("c"))
    assert trainer.scores_reference and trainer.needs_reference
    assert not trainer.loss.needs_reference
    assert (trainer.reference_model, trainer.critic_model) == ("base", "judge")
    critic = trainer.critic
    assert critic is not None
    assert (critic.learning_rate, critic.warmup_steps, critic.value_clip) == (3e-4, 7, None)
    assert (critic.betas, critic.eps, critic.max_grad_norm) == ((0.8, 0.9), 1e-6, 0.5)
    assert config.algorithm.scores_first


def test_without_one_nobody_is_asked_and_nothing_is_loaded() -> None:
    config = config_with()
    trainer = trainer_settings(config, model="m", checkpoint_dir=Path("c"))
    assert trainer.critic is None and not trainer.needs_reference
    assert not config.algorithm.scores_first


def test_kl_in_the_reward_alone_needs_the_reference() -> None:
    config = config_with(reward={"kl": {"coefficient": 0.1}})
    assert config.algorithm.scores_first
    trainer = trainer_settings(config, model="m", checkpoint_dir=Path("c"))
    assert trainer.needs_reference and trainer.critic is None
    assert merge_settings(config).shaping.kl == KlInReward(estimate=KlEstimate.K1, coefficient=0.1)


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
def test_a_critic_has_a_rule_of_its_own_for_what_was_cut_off(
    critic: dict[str, Any], disposition: Disposition, penalty: float
) -> None:
    policy = outcome_policy(config_with(baseline="critic", scale="none", critic=critic))
    for outcome in TRUNCATIONS:
        assert policy.rule(outcome).disposition is disposition
        assert policy.rule(outcome).penalty == penalty
    plain = outcome_policy(config_with())
    assert policy.rule(Outcome.MAX_TURNS) == plain.rule(Outcome.MAX_TURNS)


def test_a_rule_that_the_run_gives_comes_before_the_critics() -> None:
    outcomes = {"truncated_tokens": {"disposition": "drop"}}
    policy = outcome_policy(config_with(baseline="critic", scale="none", outcomes=outcomes))
    assert policy.rule(Outcome.TRUNCATED_TOKENS).disposition is Disposition.DROP
    assert policy.rule(Outcome.TRUNCATED_CONTEXT).disposition is Disposition.TRAIN


@pytest.mark.parametrize(
    "algorithm", [{"baseline": "critic", "scale": "none"}, {"reward": {"kl": {"coefficient": 1}}}]
)
def test_the_audit_does_not_compare_what_a_group_alone_cannot_tell(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    for given, is_compared in ((algorithm, False), ({}, True)):
        settings = journal_settings(config_with(**given), directory=tmp_path, epoch=1)
        assert settings is not None
        assert (settings.group_rule is not None) is is_compared


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"critic": {"decay": 0.5}}, ["algorithm.critic is set", "baseline mean"]),
        (
            {"baseline": "critic", "scale": "none", "turn_discount": 0.9},
            ["turn_discount is 0.9", "credit by token"],
        ),
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
def test_what_could_never_be_of_use_is_refused(algorithm: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**algorithm)
    for word in words:
        assert word in str(caught.value)


def test_a_run_is_not_resumed_with_a_critic_that_it_did_not_have() -> None:
    plain, with_critic = config_with(), config_with(baseline="critic", scale="none")
    for before, now in ((plain, with_critic), (with_critic, plain)):
        (refusal,) = refused_changes(before, now)
        assert "expected a critic in both or in neither" in refusal
    assert refused_changes(with_critic, config_with(baseline="critic", scale="none")) == []


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
