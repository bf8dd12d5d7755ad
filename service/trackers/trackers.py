"""All trackers of a run: one thread each, which follows what the recorder stores."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import yaml

from service.config.file import dump_config
from service.config.tree import Config
from service.launch.run_dir import RunDir
from service.store.lineage import Readable
from service.trackers.follower import Follower
from service.trackers.jsonl import JsonLines
from service.trackers.mlflow import Mlflow
from service.trackers.tensorboard import TensorBoard
from service.trackers.tracker import Tracker
from service.trackers.wandb import Wandb

log = logging.getLogger("rayloom.trackers")

CLOSE_LIMIT_S = 30.0

Makers = Mapping[str, Callable[[], Tracker]]


class Trackers:
    """Belongs to the event loop that calls `begin`; none of its calls waits for a tracker, but for
    `close`."""

    def __init__(self, makers: Makers, *, store: Readable, directory: Path) -> None:
        """makers: by setting. directory: where each keeps how far it has written."""
        self._makers, self._store, self._directory = makers, store, directory
        self._followers: list[Follower] = []

    def begin(self, tell: Callable[[str], None]) -> None:
        """Write what is stored and not written yet. tell: called in this event loop."""
        if not self._followers:
            loop = asyncio.get_running_loop()

            def tell_in_loop(text: str) -> None:
                try:
                    loop.call_soon_threadsafe(tell, text)
                except RuntimeError:
                    # The loop has ended, and shows no notice.
                    log.warning("%s", text)

            self._followers = [
                Follower(
                    name,
                    make,
                    store=self._store,
                    places_file=self._directory / f"{name}.json",
                    tell=tell_in_loop,
                )
                for name, make in self._makers.items()
            ]
            for follower in self._followers:
                follower.start()
        self.wake()

    def wake(self) -> None:
        """A record has been stored."""
        for follower in self._followers:
            follower.wake()

    def close(self, *, writes_rest: bool = True, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write what is left and close. Blocks, limit_s at most.

        writes_rest: False where another process has the run.
        """
        until = time.monotonic() + limit_s
        for follower in self._followers:
            follower.end(writes_rest=writes_rest)
        for follower in self._followers:
            _join(follower, until=until)


def _join(thread: threading.Thread, *, until: float) -> None:
    thread.join(max(0.0, until - time.monotonic()))
    if thread.is_alive():
        log.warning("%s did not end in time; --resume writes what it lacks", thread.name)


def trackers_of(
    config: Config, run_dir: RunDir, *, run_id: str, store: Readable
) -> Trackers | None:
    """Those that the configuration names; None: it names none."""
    settings, path = config.trackers, run_dir.path
    makers: dict[str, Callable[[], Tracker]] = {}
    if settings.jsonl:
        makers["jsonl"] = partial(JsonLines, path / "metrics.jsonl")
    if settings.tensorboard is not None:
        chosen = Path(settings.tensorboard).expanduser() / run_id
        directory = chosen if settings.tensorboard else path / "tensorboard"
        makers["tensorboard"] = partial(TensorBoard, directory)
    if settings.wandb is not None:
        makers["wandb"] = partial(
            Wandb,
            settings.wandb,
            run_id=run_id,
            name=config.run.name,
            config=yaml.safe_load(dump_config(config)),
            directory=Path(settings.wandb.directory or path).expanduser(),
        )
    if settings.mlflow is not None:
        makers["mlflow"] = partial(Mlflow, settings.mlflow, run_id=run_id, name=config.run.name)
    if not makers:
        return None
    return Trackers(makers, store=store, directory=path / "trackers")
