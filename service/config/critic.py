"""The section of a critic (PPO)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from actors.merge.advantages import CriticSettings, Truncation
from service.config.fields import Fraction, Natural, NotNegative, Rate, Section


class CriticConfig(Section):
    model: str | None = Field(
        None,
        min_length=1,
        description="what it begins as; null: the model that training starts from",
    )
    discount: Fraction = Field(1.0, description="gamma, from one sampled token to the next")
    decay: Fraction = Field(1.0, description="lambda of GAE, likewise")
    truncation: Literal["bootstrap", "terminal", "mask", "penalty", "drop"] = Field(
        "bootstrap",
        description="what a trajectory that was cut off is: worth V(s_T) at its end, worth 0, out "
        "of the loss, worth 0 less truncation_penalty, or dropped",
    )
    truncation_penalty: NotNegative = Field(0.0, description="off the return, with penalty")
    learning_rate: Rate = Field(1e-4, description="AdamW, after the warm-up")
    warmup_updates: Natural = Field(5, description="updates of linear warm-up, one a step")
    value_clip: Rate | None = Field(
        0.2, description="how far a value may move in one step; null: no clip"
    )

    @model_validator(mode="after")
    def _penalty_where_it_is_taken(self) -> CriticConfig:
        if (self.truncation == "penalty") != (self.truncation_penalty > 0):
            raise ValueError(
                f"critic.truncation_penalty is {self.truncation_penalty:g} with truncation "
                f"{self.truncation}; expected more than 0 with penalty and 0 with every other "
                "one; set both"
            )
        return self


def critic_settings(critic: CriticConfig) -> CriticSettings:
    """How advantages are made of its values."""
    return CriticSettings(
        discount=critic.discount,
        decay=critic.decay,
        truncation=Truncation(critic.truncation),
    )
