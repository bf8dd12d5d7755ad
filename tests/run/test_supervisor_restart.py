"""Tests that the command restarts a supervisor that dies, up to the limit of recoveries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import ray
from ray.exceptions import ActorDiedError
from worlds.faults.mortal_supervisor import Mortal
from worlds.runs.run_driver import small_config

from actors.deadline import poll
from service.config.file import load_config
from service.launch.run_dir import RunDir
from service.remote_calls import NAMESPACE
from service.report.document import Phase
from service.run.health import RunStatus
from service.run.start import SupervisorWatcher, phase_values, start_endpoint, start_supervisor
from service.store.errors import LeaseLost
from service.store.leases import own_name
from service.store.run_store import RunStore
from service.telemetry.endpoint import SUPERVISOR, Push

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    RunStore(f"sqlite:///{tmp_path / 'run' / 'rayloom.db'}").close()
    return RunDir(path=tmp_path / "run")


def watcher(
    *, num_deaths: int, max_restarts: int, name: str = "", commits: bool = False
) -> tuple[SupervisorWatcher, list[Any]]:
    """Return a watcher whose first `num_deaths` supervisors die, and the list of lost ones.

    name: the name of the first. commits: each commits a later checkpoint than the one before.
    """
    lost_ones: list[Any] = []

    def restart(*, lost: Any, lost_name: str) -> Any:
        lost_ones.append(lost)
        step = len(lost_ones) + 1 if commits else 0
        return Mortal.remote(dies=len(lost_ones) < num_deaths, checkpoint_step=step)

    first = Mortal.remote(dies=num_deaths > 0, name=name, checkpoint_step=int(commits))
    shown: list[RunStatus] = []
    watching = SupervisorWatcher(
        first,
        restart=restart,
        max_restarts=max_restarts,
        show=shown.append,
        is_stop_asked=lambda: False,
    )
    return watching, lost_ones


def test_a_run_whose_supervisor_dies_continues_to_its_end(place: RunDir) -> None:
    watching, lost = watcher(num_deaths=2, max_restarts=2)
    assert watching.run(place).reason == "all 4 steps are done"
    assert len(lost) == 2


def test_a_supervisor_that_keeps_dying_is_restarted_up_to_the_limit(place: RunDir) -> None:
    watching, lost = watcher(num_deaths=9, max_restarts=2)
    with pytest.raises(ActorDiedError):
        watching.run(place)
    assert len(lost) == 2


def test_deaths_with_a_later_checkpoint_between_them_are_not_added_up(place: RunDir) -> None:
    watching, lost = watcher(num_deaths=3, max_restarts=1, commits=True)
    assert watching.run(place).reason == "all 4 steps are done"
    assert len(lost) == 3


def test_a_run_that_another_process_has_taken_over_is_not_taken_back(place: RunDir) -> None:
    store = RunStore(place.database_url)
    store.renew(store.acquire_lease(owner=own_name()).term)
    store.close()
    watching, lost = watcher(num_deaths=1, max_restarts=2)
    with pytest.raises(LeaseLost, match="has taken the run over"):
        watching.run(place)
    assert lost == []


def test_a_lease_of_the_lost_supervisor_itself_is_not_a_takeover(
    place: RunDir,
) -> None:
    store = RunStore(place.database_url)
    store.renew(store.acquire_lease(owner=own_name()).term)
    store.close()
    watching, lost = watcher(num_deaths=1, max_restarts=2, name=own_name())
    assert watching.run(place).reason == "all 4 steps are done"
    assert len(lost) == 1


def test_a_supervisor_started_by_another_process_is_not_replaced(
    place: RunDir, tiny_models: dict[bool, str]
) -> None:
    lost = Mortal.remote(dies=False)
    other = Mortal.options(name="rayloom-small", namespace=NAMESPACE).remote(dies=False)
    config = load_config(small_config(place.path.parent))
    with pytest.raises(LeaseLost, match="another process has started a supervisor"):
        start_supervisor(
            config,
            place,
            model=tiny_models[True],
            run_id="rayloom-small",
            endpoint=None,
            lost=lost,
        )
    assert ray.get(other.run.remote(), timeout=60.0).reason == "all 4 steps are done"


def test_a_run_whose_supervisor_was_lost_is_shown_as_recovering(
    place: RunDir, tiny_models: dict[bool, str]
) -> None:
    config = load_config(small_config(place.path.parent))
    endpoint = start_endpoint(config, run_id="rayloom-lost", place={})
    training = Push(
        role=SUPERVISOR, epoch=time.time_ns(), number=1, values=phase_values("training")
    )
    url = ray.get(endpoint.push.remote(training), timeout=60.0)

    def is_shown(phase: Phase) -> bool:
        with urlopen(url, timeout=10.0) as reply:
            text = reply.read().decode()
        return f'rayloom_run_phase{{phase="{phase}",run="small"}} 1.0' in text

    assert is_shown("training")
    # The new supervisor pushes no metrics before its `run` is called.
    started = start_supervisor(
        config,
        place,
        model=tiny_models[True],
        run_id="rayloom-lost",
        endpoint=endpoint,
        lost=Mortal.remote(dies=False),
    )
    assert poll(lambda: is_shown("recovering") or None, limit_s=30.0)
    assert not is_shown("training")
    for actor in (started, endpoint):
        ray.kill(actor)
