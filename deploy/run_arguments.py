"""The arguments of `serve_app` and `train_job`, which the chart passes to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.config.file import load_config, parse_config
from service.config.tree import Config


class RunArguments(BaseModel):
    """The configuration of a run, and its directories."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] | Path = Field(
        description="the configuration, or a YAML file on each node that imports the application"
    )
    run_dir: Path = Field(description="on storage that every node sees; a run in it is resumed")
    state_dir: Path | None = Field(
        None, description="directory for rayloom.db, on a local disk of the head node"
    )
    overrides: tuple[str, ...] = Field((), description="such as run.steps=1000")

    def read_config(self) -> Config:
        """Return the configuration. Raises: ConfigError."""
        if isinstance(self.config, Path):
            return load_config(self.config, self.overrides)
        return parse_config(self.config, source="of the arguments", overrides=self.overrides)
