"""The sections of rewards and outcomes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from actors.merge.shaping import KlEstimate, KlInReward
from actors.outcomes import Disposition
from service.config.fields import Finite, NotNegative, Positive, Rate, Retries, Section


class OutcomeRuleConfig(Section):
    disposition: Disposition = Field(
        description="train, train_clamped, train_penalised, mask or drop"
    )
    max_retries: Retries = Field(0, description="further attempts before the disposition holds")
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
