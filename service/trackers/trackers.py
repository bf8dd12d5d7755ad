"""The trackers of a run; each has a thread that writes the records that the recorder has stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from actors.environment.user_names import find
from service.config.file import dump_config
from service.config.trackers import OwnTrackerSettings
from service.config.tree import Config
from service.launch.run_dir import RunDir
from service.store.lineage import Readable
from service.trackers.completions import Completions
from service.trackers.follower import Follower, Target
from service.trackers.jsonl import JsonLines
from service.trackers.mlflow import Mlflow
from service.trackers.tensorboard import TensorBoard
from service.trackers.tracker import Tracker
from service.trackers.trackio import Trackio
from service.trackers.wandb import Wandb

log = logging.getLogger("rayloom.trackers")

CLOSE_LIMIT_S = 30.0


class Trackers:
    """The trackers of a run. Only `close` and `catch_up` wait for a tracker."""

    def __init__(self, targets: Sequence[Target], *, store: Readable, directory: Path) -> None:
        """Create the trackers. directory: directory for the files with each tracker's progress."""
        self._targets, self._store, self._directory = targets, store, directory
        self._followers: list[Follower] = []

    def begin(self, tell: Callable[[str], None]) -> None:
        """Start to write the records that are not written yet.

        tell: shows a notice to the user; called in any thread.
        """
        if not self._followers:
            self._followers = self._make(tell)
            for follower in self._followers:
                follower.start()
        self.wake()

    def catch_up(self, tell: Callable[[str], None], *, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the missing records of an ended run once.

        This blocks for at most `limit_s` seconds.
        """
        self._followers = self._make(tell)
        for follower in self._followers:
            follower.end()
            follower.start()
        self._join(limit_s)

    def _make(self, tell: Callable[[str], None]) -> list[Follower]:
        return [
            Follower(
                target,
                store=self._store,
                places_file=self._directory / f"{target.name}.json",
                tell=tell,
            )
            for target in self._targets
        ]

    def wake(self) -> None:
        """Wake the followers after a record has been stored."""
        for follower in self._followers:
            follower.wake()

    def close(self, *, writes_rest: bool = True, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the remaining records and close the trackers.

        This blocks for at most `limit_s` seconds.

        writes_rest: whether to write the remaining records; False if another process has taken over
        the run.
        """
        for follower in self._followers:
            follower.end(writes_rest=writes_rest)
        self._join(limit_s)

    def _join(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for follower in self._followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                log.warning("%s did not end in time; --resume writes the rest", follower.name)


def trackers_of(
    config: Config, run_dir: RunDir, *, run_id: str, store: Readable
) -> Trackers | None:
    """Return the trackers that the configuration names; None if it names no tracker."""
    targets = list(_targets(config, run_dir.path, run_id))
    if not targets:
        return None
    return Trackers(targets, store=store, directory=run_dir.path / "trackers")


def _targets(config: Config, run_dir: Path, run_id: str) -> Iterator[Target]:
    settings, name = config.trackers, config.run.name
    completions = Completions(run_dir, most=settings.completions) if settings.completions else None
    if settings.jsonl:
        make: Callable[[], Tracker] = partial(JsonLines, run_dir / "metrics.jsonl")
        # No address: the file moves with the run's directory.
        yield Target(name="jsonl", address="", make=make, completions=completions)
    if (chosen := settings.tensorboard) is not None:
        directory = Path(chosen).expanduser() / run_id if chosen else run_dir / "tensorboard"
        address = str(directory) if chosen else ""
        yield Target(name="tensorboard", address=address, make=partial(TensorBoard, directory))
    if (wandb := settings.wandb) is not None:
        make = partial(
            Wandb,
            wandb,
            run_id=run_id,
            name=name,
            config=_shown(config),
            directory=Path(wandb.directory or run_dir).expanduser(),
        )
        address = f"{wandb.mode} {wandb.entity or ''}/{wandb.project}/{run_id}"
        yield Target(name="wandb", address=address, make=make, completions=completions)
    if (trackio := settings.trackio) is not None:
        make = partial(Trackio, trackio, run_id=run_id, name=name, config=_shown(config))
        address = f"{trackio.directory or ''} {trackio.project}/{run_id}"
        yield Target(name="trackio", address=address, make=make, completions=completions)
    if (mlflow := settings.mlflow) is not None:
        make = partial(Mlflow, mlflow, run_id=run_id, name=name)
        address = f"{mlflow.url} {mlflow.experiment}/{run_id}"
        yield Target(name="mlflow", address=address, make=make)
    if (own := settings.own) is not None:
        make = partial(
            _own_tracker, own, run_id=run_id, name=name, config=_shown(config), directory=run_dir
        )
        yield Target(name="own", address=f"{own.use} {run_id}", make=make, completions=completions)


def _own_tracker(
    settings: OwnTrackerSettings, *, run_id: str, name: str, config: dict[str, Any], directory: Path
) -> Tracker:
    """Create and return the user's own tracker.

    Raises: BadName; anything that its constructor raises.
    """
    made: Tracker = find(settings.use, what="trackers.own.use")(
        run_id=run_id, name=name, config=config, directory=directory, **settings.options
    )
    return made


def _shown(config: Config) -> dict[str, Any]:
    shown: dict[str, Any] = yaml.safe_load(dump_config(config))
    return shown
