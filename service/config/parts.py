"""Derive the settings of the trainer's ranks and of the merge actor from the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actors.expert_records import ModelShape
from actors.merge.settings import StepSettings
from actors.trainer.settings import RankSettings
from service.config.tree import Config


def step_settings(config: Config, *, shape: ModelShape | None = None) -> StepSettings:
    """Return the settings of the merge actor.

    shape: shape of the trained model; if None, samples are not checked against a shape.
    """
    return StepSettings(
        algorithm=config.algorithm,
        trainer=config.trainer,
        max_context_tokens=config.model.max_context_tokens,
        seed=config.run.seed,
        policies=config.policies,
        temperatures=config.temperatures,
        shape=shape,
    )


def rank_settings(config: Config, *, model: str, checkpoint_dir: Path) -> RankSettings:
    """Return the settings of a run's trainer ranks, with each schedule's `updates` filled in."""
    critic = replace(config.algorithm.critic, schedule=config.critic_schedule)
    return RankSettings(
        trainer=replace(config.trainer, schedule=config.policy_schedule),
        algorithm=replace(config.algorithm, critic=critic),
        model=model,
        chat_template=config.model.chat_template,
        checkpoint_dir=checkpoint_dir,
        weight_backend=config.inference.weight_backend,
        max_context_tokens=config.model.max_context_tokens,
        seed=config.run.seed,
    )
