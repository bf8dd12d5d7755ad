"""A run that somebody holds is not taken away by --resume; a dead holder is no obstacle."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from sqlalchemy import update
from worlds.run_driver import SMALL

from service.cli.train import TrainRequest, run_training
from service.config.file import ConfigError, load_config
from service.launch.resume import check_lease_free
from service.launch.run_dir import RunDir
from service.launch.signals import StopSignals
from service.store import tables
from service.store.presence import live_holder, own_name, release, renew
from service.store.run_store import LeaseLost, RunStore


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(path=tmp_path / "run")


@pytest.fixture
def store(place: RunDir) -> Iterator[RunStore]:
    store = RunStore(place.database_url)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.launch.resume.LEASE_LIMIT_S", 0.0)


def hold(store: RunStore, holder: str) -> int:
    epoch = store.acquire_lease(holder=holder).epoch
    renew(store, epoch=epoch)
    return epoch


def test_a_process_of_this_machine_holds_the_run_until_it_is_killed(
    store: RunStore, place: RunDir
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        hold(store, f"{socket.gethostname()}:{other.pid}")
        with pytest.raises(ConfigError, match=f"held by .*:{other.pid}.*--take-over"):
            check_lease_free(place)
        # Even where it has been too busy to show itself.
        assert live_holder(store, now=time.time() + 3600) is not None
        other.kill()
        other.wait()
        check_lease_free(place)


def test_a_holder_that_has_died_and_was_not_reaped_is_dead(store: RunStore, place: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        hold(store, f"{socket.gethostname()}:{other.pid}")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        check_lease_free(place)


def test_another_process_under_the_holders_number_is_not_the_holder(
    store: RunStore, place: RunDir
) -> None:
    epoch = hold(store, own_name())
    with store.fenced(epoch) as connection:
        connection.execute(update(tables.leases).values(acquired_at=1e9))
    check_lease_free(place)


def test_a_holder_of_another_machine_is_alive_as_long_as_it_says_so(store: RunStore) -> None:
    epoch = hold(store, "elsewhere:7")
    holder = live_holder(store, now=time.time() + 20)
    assert holder is not None and holder.name == "elsewhere:7"
    assert live_holder(store, now=time.time() + 31) is None
    release(store, epoch=epoch)
    assert live_holder(store, now=time.time()) is None


def test_only_the_newest_holder_shows_itself(store: RunStore) -> None:
    old = hold(store, "elsewhere:7")
    new = hold(store, "elsewhere:8")
    with pytest.raises(LeaseLost):
        renew(store, epoch=old)
    with pytest.raises(LeaseLost):
        release(store, epoch=old)
    release(store, epoch=new)
    assert live_holder(store, now=time.time()) is None


def test_a_run_that_is_held_is_resumed_only_by_taking_it_over(
    store: RunStore, place: RunDir
) -> None:
    tasks = {"environment": "nowhere"}
    place.config_file.write_text(yaml.safe_dump({**SMALL, "tasks": tasks}))
    config = load_config(place.config_file)
    hold(store, own_name())
    with pytest.raises(ConfigError, match=f"held by {own_name()}"):
        run_training(TrainRequest(config=config, resume=place.path), StopSignals())
    # The next thing that is wrong.
    with pytest.raises(ConfigError, match="nowhere"):
        run_training(TrainRequest(config=config, resume=place.path, takes_over=True), StopSignals())
