"""Settings of the trackers. The configuration imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import Field

from actors.limits import STRICT

Name = Annotated[str, MinLen(1)]
# A URL without a user and a password, which would otherwise be in the files of the run.
Url = Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """A run at Weights & Biases; the API key is read from WANDB_API_KEY."""

    __pydantic_config__ = STRICT

    project: Name
    """Name of the project that the run belongs to."""
    entity: str | None = None
    """User or team that the run belongs to; null: the owner of the API key."""
    group: str | None = None
    """Name of a group of runs that W&B shows together; null: no group."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] = "online"
    """online: send to the server; offline: only write files for `wandb sync`."""
    directory: str | None = None
    """Directory in which wandb creates its folder wandb; null: the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """An MLflow tracking server; the bearer token is read from MLFLOW_TRACKING_TOKEN."""

    __pydantic_config__ = STRICT

    url: Url
    """URL of the server, such as http://mlflow:5000."""
    experiment: Name
    """Name of the experiment that the run belongs to; it is created if it is missing."""


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
class OwnTrackerSettings:
    """A tracker of your own, which is a class with the methods write, flush and close."""

    __pydantic_config__ = STRICT

    use: Name
    """The class, as FILE.py:CLASS below the directory that the command is started in, or as
    package.module:CLASS.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class's constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSettings:
    """Trackers that get a run's curves in addition to its own database; none by default."""

    __pydantic_config__ = STRICT

    jsonl: bool = False
    """Write metrics.jsonl in the run's directory."""
    tensorboard: str | None = None
    """Directory for event files, in which the run gets its own directory; empty: the folder
    tensorboard in the run's directory; null: no event files.
    """
    wandb: WandbSettings | None = None
    """Settings of a run at Weights & Biases; null: the run is not written to it."""
    trackio: TrackioSettings | None = None
    """Settings of a local Trackio database; null: the run is not written to one."""
    mlflow: MlflowSettings | None = None
    """Settings of a run at an MLflow server; null: the run is not written to one."""
    own: OwnTrackerSettings | None = None
    """Settings of a tracker of your own; null: none."""
    completions: Annotated[int, Ge(0), Le(256)] = 0
    """Number of completions of each step that W&B, Trackio, JSONL and your own tracker get as a
    table, read from the journal; 0: none.
    """
