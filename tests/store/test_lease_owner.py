"""Tests of the owner of a lease: --resume is refused while the owner is alive."""

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
from sqlalchemy import select, update
from worlds.builders.store_builders import write_under_way
from worlds.runs.run_driver import SMALL

from service.cli.outlet import Stages
from service.cli.train import run_training
from service.config.file import ConfigError, load_config
from service.config.trial import Trial
from service.launch.resume import check_lease_free
from service.launch.run_dir import RunDir
from service.launch.signals import StopSignals
from service.store import tables
from service.store.errors import LeaseLost
from service.store.leases import own_name
from service.store.place import StoreOptions
from service.store.run_store import RunStore


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


def silent(store: RunStore, term: int, *, seconds: float) -> None:
    """Move the last renewal of the lease into the past by a number of seconds."""
    leases = tables.leases
    with write_under_way(store) as connection:
        connection.execute(update(leases).values(renewed_at=time.time() - seconds))


def take_lease(store: RunStore, owner: str) -> int:
    term = store.acquire_lease(owner=owner).term
    store.renew(term)
    return term


def test_a_process_of_this_machine_owns_the_lease_until_it_is_killed(
    store: RunStore, place: RunDir
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        take_lease(store, f"{socket.gethostname()}:{other.pid}")
        with pytest.raises(ConfigError, match=f"held by .*:{other.pid}.*--take-over"):
            check_lease_free(place)
        other.kill()
        other.wait()
        check_lease_free(place)


def test_an_owner_that_is_a_zombie_process_is_dead(store: RunStore, place: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        take_lease(store, f"{socket.gethostname()}:{other.pid}")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        check_lease_free(place)


def test_another_process_with_the_owners_pid_is_not_the_owner(
    store: RunStore, place: RunDir
) -> None:
    take_lease(store, own_name())
    with write_under_way(store) as connection:
        [mark] = connection.scalars(select(tables.leases.c.process))
        machine, _, started = mark.rpartition(" ")
        other = f"{machine} {int(started) - 1}"
        connection.execute(update(tables.leases).values(process=other))
    check_lease_free(place)


def test_an_owner_on_another_machine_is_alive_while_it_renews(store: RunStore) -> None:
    term = take_lease(store, "elsewhere:7")
    silent(store, term, seconds=20)
    owner = store.live_owner()
    assert owner is not None and owner.name == "elsewhere:7"
    silent(store, term, seconds=31)
    assert store.live_owner() is None
    store.renew(term)
    assert store.live_owner() is not None
    store.release(term)
    store.renew(term)
    assert store.live_owner() is None


def test_only_the_newest_owner_can_renew_or_release(store: RunStore) -> None:
    old = take_lease(store, "elsewhere:7")
    new = take_lease(store, "elsewhere:8")
    with pytest.raises(LeaseLost):
        store.renew(old)
    with pytest.raises(LeaseLost):
        store.release(old)
    store.release(new)
    assert store.live_owner() is None


def test_a_run_with_a_live_owner_is_resumed_only_with_take_over(
    store: RunStore, place: RunDir
) -> None:
    tasks = {"environment": "nowhere"}
    place.config_file.write_text(yaml.safe_dump({**SMALL, "tasks": tasks}))
    config = load_config(place.config_file)
    take_lease(store, own_name())
    with pytest.raises(ConfigError, match=f"held by {own_name()}"):
        run_training(
            config,
            StopSignals(),
            Stages("testing"),
            resume=place.path,
            store=StoreOptions(),
            trial=Trial(),
        )
    # With takes_over, only the next error is raised.
    with pytest.raises(ConfigError, match="nowhere"):
        run_training(
            config,
            StopSignals(),
            Stages("testing"),
            resume=place.path,
            takes_over=True,
            store=StoreOptions(),
            trial=Trial(),
        )
