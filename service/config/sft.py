"""The configuration of `rayloom sft`: supervised training on a data set of chats.

It has the sections `model` and `trainer` of a run's configuration, and its own section `sft`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from actors.environment.settings import RolloutSettings
from actors.limits import STRICT, Positive, Seed
from actors.trainer.settings import TrainerSettings
from service.config.sections import ModelSettings, RunSettings
from service.config.tree import Config
from service.inference.settings import InferenceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """The chats of `rayloom sft`, and how they are trained; other commands ignore this section."""

    __pydantic_config__ = STRICT

    dataset: Annotated[str, Field(min_length=1)]
    """Data set of chats, one in each row: a JSONL, JSON or Parquet file, a directory, or a name on
    the Hugging Face hub. The column messages has the chat in OpenAI's form; tools is optional.
    """
    subset: str | None = None
    """Name of one of several configurations of a data set."""
    split: str = "train"
    """Split of a data set's directory or of a hub's data set; a single file has only train."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Names of the data set's columns for messages and tools, by `messages` and `tools`, if the
    columns have other names.
    """
    template_options: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking: false; use the same values in
    rollouts.template_options of a later run.
    """
    long_chats: Literal["refuse", "leave_out"] = "refuse"
    """Chats that are longer than model.max_context_tokens: refuse the data set, or leave them out.
    They are never cut.
    """
    epochs: Positive = 1
    """Number of passes over the chats, each in another order."""
    chats_per_step: Positive = 32
    """Number of chats in an optimiser step; the last step of an epoch may have fewer."""
    seed: Seed = 0
    """Seed of the order of the chats."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: Positive = 2
    """Number of the newest checkpoints to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """The configuration of `rayloom sft`."""

    __pydantic_config__ = STRICT

    model: ModelSettings
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sft: SftSettings

    def as_run(self, *, num_steps: int) -> Config:
        """Convert to the configuration of a run that has this trainer, but no engines or actors.

        The functions that check models, machines and schedules can then be called with it.
        """
        return Config(
            run=RunSettings(name="sft", seed=self.sft.seed, steps=num_steps),
            model=self.model,
            trainer=self.trainer,
            inference=InferenceSettings(num_replicas=0),
            rollouts=RolloutSettings(num_actors=0),
        )
