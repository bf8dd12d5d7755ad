"""The trackers' part of the configuration. Plain values: the configuration imports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import MinLen
from pydantic import Field

from actors.limits import STRICT

Name = Annotated[str, MinLen(1)]
# Without a password, which would otherwise be in the files of the run.
Url = Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]


class WandbMode(StrEnum):
    ONLINE = "online"
    OFFLINE = "offline"
    """Into files, which `wandb sync` uploads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """Weights & Biases. Its key is taken from WANDB_API_KEY."""

    __pydantic_config__ = STRICT

    project: Name
    """Project that the run is in."""
    entity: str | None = None
    """User or team; null: the key's own."""
    group: str | None = None
    """Runs that are shown together; null: none."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: WandbMode = WandbMode.ONLINE
    """offline: into files alone, for `wandb sync`."""
    directory: str | None = None
    """Where its files go, in a folder wandb; null: the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """An MLflow tracking server. A bearer token is taken from MLFLOW_TRACKING_TOKEN."""

    __pydantic_config__ = STRICT

    url: Url
    """The server's, such as http://mlflow:5000."""
    experiment: Name
    """Experiment that the run is in; made where it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioSettings:
    """A local database of Trackio, which `trackio show` displays and `trackio sync` uploads."""

    __pydantic_config__ = STRICT

    project: Name
    """Name of the project that the run belongs to."""
    group: str | None = None
    """Name of a group of runs that Trackio shows together; null: no group."""
    directory: str | None = None
    """Directory of the database; null: the environment's TRACKIO_DIR, or Trackio's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSettings:
    """The targets to which a run's curves are written besides its own database; off unless
    named.
    """

    __pydantic_config__ = STRICT

    jsonl: bool = False
    """Write metrics.jsonl in the run's directory."""
    tensorboard: str | None = None
    """Directory in which the run gets one of its own; empty: tensorboard, in the run's directory;
    null: no event files."""
    wandb: WandbSettings | None = None
    """A run at Weights & Biases; null: none."""
    trackio: TrackioSettings | None = None
    """Settings of a local Trackio database; null: the run is not written to one."""
    mlflow: MlflowSettings | None = None
    """A run at an MLflow server; null: none."""
