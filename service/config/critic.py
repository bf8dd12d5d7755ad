"""The part of the configuration tree that trains a critic (PPO), and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from actors.merge.gae import CriticSettings, Truncation
from actors.trainer.critic_settings import CriticTraining
from service.config.fields import Fraction, Natural, NotNegative, Rate, Section

if TYPE_CHECKING:
    from service.config.tree import Config


class CriticConfig(Section):
    model: str | None = Field(
        None, description="what it begins as; null: the model that training starts from"
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


def critic_training(config: Config) -> CriticTraining:
    """How it learns; what is not its own it has in common with the policy."""
    critic, trainer = config.algorithm.critic, config.trainer
    return CriticTraining(
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_updates,
        betas=trainer.betas,
        eps=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        value_clip=critic.value_clip,
        gradient_checkpointing=trainer.gradient_checkpointing,
    )


def critic_disagreements(config: Config) -> list[str]:
    """Critics and references that could never be of use: each with got, expected and remedy."""
    return [*_of_critic(config), *_of_reference(config)]


def _of_critic(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    critic = algorithm.critic
    if not algorithm.has_critic:
        if critic != CriticConfig():
            yield (
                f"algorithm.critic is set with algorithm.baseline {algorithm.baseline}: no critic "
                "would be trained; set algorithm.baseline to critic, or leave algorithm.critic out"
            )
        return
    if algorithm.turn_discount is not None:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with algorithm.baseline "
            "critic, which gives credit by token; leave turn_discount out, or choose a group "
            "baseline"
        )
    if algorithm.group_size < 2 and algorithm.scale == "std":
        yield (
            f"algorithm.group_size is {algorithm.group_size} with algorithm.scale std, the "
            "deviation of one return: every advantage would be 0; expected scale none; set it"
        )


def _of_reference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    is_asked = algorithm.reward.kl is not None or algorithm.loss.kl.coefficient > 0
    if algorithm.reference is not None and not is_asked:
        yield (
            f"algorithm.reference is {algorithm.reference}, but nothing is compared with it; set "
            "algorithm.loss.kl.coefficient above 0 or algorithm.reward.kl, or leave it out"
        )
