"""The settings of rewards and outcomes, and what no single one of them can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from actors.merge.gae import Truncation
from actors.merge.shaping import KlEstimate, KlInReward
from actors.outcomes import DEFAULT_RULES, Disposition, OutcomeRule
from actors.trajectory import TRUNCATIONS, Outcome
from service.config.fields import Finite, Natural, NotNegative, Positive, Rate, Section

if TYPE_CHECKING:
    from service.config.tree import Config


class OutcomeRuleConfig(Section):
    disposition: Disposition = Field(
        description="train, train_clamped, train_penalised, mask or drop"
    )
    max_retries: Natural = Field(0, description="further attempts before the disposition holds")
    penalty: NotNegative = Field(0.0, description="off the return, with train_penalised")


class OverlongConfig(Section):
    max_tokens: Positive = Field(description="sampled in a trajectory, punished in full; L_max")
    cache_tokens: Positive = Field(description="over which the punishment grows; L_cache")
    factor: Rate = Field(1.0, description="the whole punishment")


class KlRewardConfig(Section):
    coefficient: Rate = Field(description="off the return, for each nat")
    estimator: Literal["k1", "k3"] = Field("k1", description="of the KL at each token")


class RewardConfig(Section):
    clip: tuple[Finite, Finite] | None = Field(None, description="lowest and highest return")
    overlong: OverlongConfig | None = Field(None, description="soft punishment of length (DAPO)")
    missing_end_penalty: NotNegative = Field(
        0.0, description="off the return when the last answer was cut off"
    )
    kl: KlRewardConfig | None = Field(
        None, description="KL(policy || reference) taken off the rewards, at each token"
    )

    @field_validator("clip")
    @classmethod
    def _low_below_high(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(
                f"algorithm.reward.clip is [{clip[0]:g}, {clip[1]:g}], expected the lower bound "
                "first and another one second"
            )
        return clip


def kl_in_reward(reward: RewardConfig) -> KlInReward | None:
    if reward.kl is None:
        return None
    return KlInReward(estimate=KlEstimate(reward.kl.estimator), coefficient=reward.kl.coefficient)


def outcome_rules(config: Config) -> dict[Outcome, OutcomeRule]:
    """The rows that differ from the default table: a critic's, with the run's own laid over them.

    Raises: ValueError, as OutcomeRule.
    """
    own = {
        outcome: OutcomeRule(
            disposition=rule.disposition, max_retries=rule.max_retries, penalty=rule.penalty
        )
        for outcome, rule in config.rollouts.outcomes.items()
    }
    return {**_rules_of_critic(config), **own}


def _rules_of_critic(config: Config) -> dict[Outcome, OutcomeRule]:
    critic = config.algorithm.critic
    if not config.algorithm.has_critic:
        return {}
    rule = Truncation(critic.truncation).rule(penalty=critic.truncation_penalty)
    return dict.fromkeys(TRUNCATIONS, rule)


def reward_disagreements(config: Config) -> list[str]:
    """Rules, rewards and refills that could never be had: each with got, expected and remedy."""
    return [*_of_rules(config), *_of_overlong(config), *_of_ends(config), *_of_refills(config)]


def _of_rules(config: Config) -> list[str]:
    return [
        f"rollouts.outcomes.{outcome.value} has penalty {rule.penalty:g} with disposition "
        f"{rule.disposition.value}; expected more than 0 with train_penalised and 0 with every "
        "other one; set both"
        for outcome, rule in config.rollouts.outcomes.items()
        if (rule.disposition is Disposition.TRAIN_PENALISED) != (rule.penalty > 0)
    ]


def _of_overlong(config: Config) -> list[str]:
    overlong, rollouts = config.algorithm.reward.overlong, config.rollouts
    if overlong is None:
        return []
    if overlong.cache_tokens > overlong.max_tokens:
        return [
            f"algorithm.reward.overlong.cache_tokens is {overlong.cache_tokens}, expected at most "
            f"overlong.max_tokens ({overlong.max_tokens}); lower it"
        ]
    free = overlong.max_tokens - overlong.cache_tokens
    most = rollouts.max_turns * rollouts.max_tokens_per_turn
    if free < most:
        return []
    return [
        f"algorithm.reward.overlong punishes from {free} tokens on, but a trajectory samples at "
        f"most {most} (rollouts.max_turns times max_tokens_per_turn): nothing would ever be "
        "punished; lower overlong.max_tokens"
    ]


def _of_ends(config: Config) -> list[str]:
    penalty = config.algorithm.reward.missing_end_penalty
    cut_off = {_disposition(config, outcome) for outcome in TRUNCATIONS}
    if not penalty or not cut_off <= {Disposition.MASK, Disposition.DROP}:
        return []
    return [
        f"algorithm.reward.missing_end_penalty is {penalty:g}, but no trajectory that was cut off "
        "is in the loss; expected a rule that trains one; set rollouts.outcomes.truncated_tokens "
        "to {disposition: train}, or leave the penalty out"
    ]


def _of_refills(config: Config) -> list[str]:
    algorithm = config.algorithm
    if not algorithm.max_variance_refills:
        return []
    got = f"algorithm.max_variance_refills is {algorithm.max_variance_refills} with "
    found = []
    if algorithm.baseline in ("none", "critic"):
        found.append(
            got + f"baseline {algorithm.baseline}, which trains groups of equal returns as well; "
            "expected 0; choose a group baseline or leave it out"
        )
    if algorithm.turn_discount is not None:
        found.append(
            got + "turn_discount: equal returns that fell to different turns are a signal there; "
            "expected one of the two; leave the other out"
        )
    return found


def _disposition(config: Config, outcome: Outcome) -> Disposition:
    """Of the run's own table, or else a critic's, or else the default one."""
    own = config.rollouts.outcomes.get(outcome)
    if own is not None:
        return own.disposition
    return _rules_of_critic(config).get(outcome, DEFAULT_RULES[outcome]).disposition
