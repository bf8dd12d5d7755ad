"""A run whose recorder feeds real trackers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.metrics import Metrics
from service.config.file import parse_config
from service.config.tree import Config
from service.launch.run_dir import RunDir
from service.run.recorder import RunRecorder
from service.store.run_store import RunStore
from service.trackers.trackers import Trackers, trackers_of
from service.worker_thread import WorkerThread

RUN_ID = "rayloom-small-0123abcd"
ALL = {
    "jsonl": True,
    "tensorboard": "",
    "wandb": {"project": "games", "mode": "offline", "tags": ["small"]},
}


def config_with(trackers: dict[str, Any], *, mlflow: str = "") -> Config:
    if mlflow:
        trackers = {**trackers, "mlflow": {"url": mlflow, "experiment": "games"}}
    tree = {
        "run": {"name": "small"},
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "trackers": trackers,
    }
    return parse_config(tree, source="test")


@contextmanager
def store_in(directory: Path) -> Iterator[RunStore]:
    store = RunStore(f"sqlite:///{directory / 'run.db'}")
    try:
        yield store
    finally:
        store.close()


async def begin(
    store: RunStore, config: Config, directory: Path
) -> tuple[RunRecorder, Trackers | None]:
    """Make the recorder and the trackers of a process that continues the run."""
    trackers = trackers_of(config, RunDir(path=directory), run_id=RUN_ID, store=store)
    recorder = RunRecorder(
        store, Metrics(), thread=WorkerThread("store"), num_steps=10, trackers=trackers
    )
    await recorder.begin_term(store.acquire_lease(owner="test"))
    return recorder, trackers
