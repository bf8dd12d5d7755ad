"""Tests of engines that die, freeze, are added or removed during a run, and end with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from worlds.runs.run_checks import check_audit, check_finished, check_stopped
from worlds.runs.run_driver import (
    ENGINE,
    FOUND_S,
    ROOT,
    START_S,
    STEP_S,
    Run,
    running,
    small_config,
)

from actors.weights.actor import Keeping
from actors.weights.board import BoardStatus
from service.inference.deployment import deploy_inference
from service.launch.cluster import start_ray
from service.launch.signals import EXIT_INTERRUPTED
from service.remote_calls import NAMESPACE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ORPHAN_S = 15
TOLERANCE_NATS = 1e-3
BOTH = ("WeightBoard", "Supervisor")
PARTS = r"ray::(ServeReplica:rayloom|rayloom|WeightBoard|Supervisor|Environment|Trainer|Traj)"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a Ray that outlives the run; yield its address."""
    # A runtime_env does not work here: Serve replaces the engines if a job has another one.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start_ray(
        address="local", namespace=NAMESPACE, num_cpus=12, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        serve.shutdown()
        ray.shutdown()


def processes(pattern: str) -> list[psutil.Process]:
    """Return the processes on this test's cluster whose title begins with a pattern."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # The cluster is in the session of this process; the command has its own session.
            is_ours = os.getsid(process.pid) == os.getsid(0)
            if is_ours and re.match(pattern, " ".join(process.cmdline())):
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {limit_s} s"
        time.sleep(0.2)


def pids(found: list[psutil.Process]) -> set[int]:
    """Return the ids of processes, and check that there is one."""
    assert found
    return {process.pid for process in found}


def check_weights(run: Run) -> None:
    """Check that engines and trainer agreed in every step that had time for a check."""
    found = [record.value("logprob_check_max") for record in run.history().steps]
    differences = [each for each in found if each is not None]
    assert differences and all(each < TOLERANCE_NATS for each in differences)


def stop(run: Run) -> None:
    """Press Ctrl-C once: the current step ends, and rollouts in flight are kept."""
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(limit_s=START_S) == EXIT_INTERRUPTED, run.log()
    check_stopped(run)
    check_weights(run)


def test_engines_outlive_a_killed_supervisor_and_a_killed_weight_board(
    tmp_path: Path, small_model: str
) -> None:
    """Kill the supervisor, then the board, then both, as when the head of a cluster dies."""
    steps = 24
    config = small_config(tmp_path, small_model, run={"steps": steps, "evaluate_every": 50})
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        before = run.pids(ENGINE)
        for term, killed in enumerate((["Supervisor"], ["WeightBoard"], [*BOTH]), start=2):
            for part in killed:
                run.kill_part(f"ray::{part}")
            run.wait_for_log(f"term {term} continues from step", limit_s=START_S)
            run.advance(4, limit_s=START_S)
            assert run.pids(ENGINE) == before
        assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        check_audit(run)
        check_weights(run)
        assert run.history().num_terms == 4


def test_engines_outlive_a_killed_serve_controller(tmp_path: Path, small_model: str) -> None:
    """Check that a new environment actor finds the engines through the next controller."""
    steps = 12
    config = small_config(tmp_path, small_model, run={"steps": steps, "evaluate_every": 50})
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        before = run.pids(ENGINE)
        run.kill_part("ray::ServeController")
        run.kill_part("ray::EnvironmentActor")
        run.advance(3, limit_s=START_S)
        assert run.pids(ENGINE) == before
        assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        assert run.history().num_terms == 1


@pytest.mark.parametrize(
    "with_board", [False, True], ids=["the driver", "the driver and the board"]
)
def test_killed_driver_leaves_nothing_on_the_cluster_that_it_joined(
    tmp_path: Path, small_model: str, address: str, with_board: bool
) -> None:
    """Check that an engine without a board waits for a new one, then deletes its application."""
    config = small_config(
        tmp_path, small_model, run={"steps": 400, "orphan_timeout_s": ORPHAN_S}
    )  # fmt: skip
    with running(config, tmp_path / "run", ["--address", address]) as run:
        run.wait_for_step(2, limit_s=START_S)
        engines = processes(ENGINE)
        assert engines and processes(PARTS)
        os.kill(run.process.pid, signal.SIGKILL)
        if with_board:
            ray.kill(find_board())
        seen: set[int] = set()

        def is_without_applications() -> bool:
            seen.update(each.pid for each in processes(ENGINE))
            return serve.status().applications == {}

        # Wait for the applications first: between two starts of a replica there is no process.
        wait_until(is_without_applications, limit_s=ORPHAN_S + 45)
        wait_until(lambda: not processes(PARTS), limit_s=30)
        wait_until(lambda: not any(each.is_running() for each in engines), limit_s=10)
        # A replica that was started meanwhile ended before it loaded vLLM.
        assert seen <= {each.pid for each in engines}
        left = ray.util.list_named_actors(all_namespaces=True)
        assert not [each for each in left if "rayloom" in each["name"]]


def test_run_that_is_resumed_in_time_takes_over_its_engines_and_adds_one(
    tmp_path: Path, small_model: str, address: str
) -> None:
    sections: dict[str, Any] = {"run": {"steps": 4000, "evaluate_every": 5000}}
    config = small_config(tmp_path, small_model, **sections)
    with running(config, tmp_path / "run", ["--address", address]) as run:
        run.wait_for_step(3, limit_s=START_S)
        before = pids(processes(ENGINE))
        os.kill(run.process.pid, signal.SIGKILL)
    config = small_config(tmp_path, small_model, inference={"num_replicas": 2}, **sections)
    with running(config, tmp_path / "run", ["--resume", "--address", address]) as run:
        run.advance(2, limit_s=START_S)
        # A list of processes that is read while some start and end may lack one.
        wait_until(lambda: before <= pids(processes(ENGINE)), limit_s=FOUND_S)
        wait_until(lambda: len(processes(ENGINE)) == 2, limit_s=START_S)
        run.advance(2, limit_s=START_S)
        wait_until(lambda: before <= pids(processes(ENGINE)), limit_s=FOUND_S)
        stop(run)
    wait_until(lambda: not processes(PARTS), limit_s=60)


def test_serve_scales_the_engines_up_and_down_while_a_run_trains(
    tmp_path: Path, small_model: str, address: str
) -> None:
    config = small_config(tmp_path, small_model, run={"steps": 4000, "evaluate_every": 5000})
    with running(config, tmp_path / "run", ["--address", address]) as run:
        run.wait_for_step(2, limit_s=START_S)
        first = pids(processes(ENGINE))
        board = find_board()
        for num_replicas in (2, 1):
            scale(board, num_replicas)
            wait_until(lambda n=num_replicas: num_holders(board) == n, limit_s=START_S)
            run.advance(3, limit_s=START_S)
            if num_replicas == 2:
                wait_until(lambda: first < pids(processes(ENGINE)), limit_s=FOUND_S)
        assert "was lost" not in run.place.log_file.read_text()
        stop(run)


def test_two_runs_on_one_cluster_do_not_affect_each_other(
    tmp_path: Path, small_model: str, address: str
) -> None:
    """Both have one name and one model; the second ends before the first."""
    steps, arguments = 4, ["--address", address]
    (tmp_path / "short").mkdir()
    long = small_config(tmp_path, small_model, run={"steps": 4000, "evaluate_every": 5000})
    short = small_config(tmp_path / "short", small_model, run={"steps": steps})
    with running(long, tmp_path / "run", arguments) as first:
        first.wait_for_step(2, limit_s=START_S)
        engines = pids(processes(ENGINE))
        with running(short, tmp_path / "short" / "run", arguments) as second:
            assert second.wait(limit_s=START_S + steps * STEP_S) == 0, second.log()
            check_finished(second, steps=steps)
            check_audit(second)
        first.advance(2, limit_s=START_S)
        wait_until(lambda: pids(processes(ENGINE)) == engines, limit_s=FOUND_S)
        assert first.history().num_terms == 1
        stop(first)


def find_board() -> Any:
    named = ray.util.list_named_actors(all_namespaces=True)
    [name] = [each["name"] for each in named if each["name"].endswith("-board")]
    return ray.get_actor(name, namespace=NAMESPACE)


def scale(board: Any, num_replicas: int) -> None:
    """Deploy another number of engines, as anyone with access to the cluster can."""
    status: BoardStatus = ray.get(board.status.remote(), timeout=60)
    kept: Keeping = ray.get(board.open_term.remote(status.term), timeout=60)
    inference = replace(kept.engines.inference, num_replicas=num_replicas)
    settings = replace(kept.engines, inference=inference)
    name = kept.applications[0]
    deploy_inference(settings, name=name, board=board, run_id=name.rpartition("-t")[0])


def num_holders(board: Any) -> int:
    status: BoardStatus = ray.get(board.status.remote(), timeout=60)
    return len(status.replicas) if status.is_loaded else 0


def test_run_continues_after_engines_of_a_broadcast_are_killed_and_frozen(
    tmp_path: Path, small_model: str
) -> None:
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 4000, "evaluate_every": 5000},
        inference={"num_replicas": 3, "weight_backend": "collective"},
        rollouts={"turn_deadline_s": 120},
    )
    with running(config, tmp_path / "run") as run:
        run.wait_for_step(2, limit_s=START_S)
        wait_until(lambda: len(run.processes(ENGINE)) == 3, limit_s=START_S)
        run.kill_part(ENGINE)
        run.advance(3, limit_s=START_S)
        replica = run.processes("ray::ServeReplica:rayloom")[0]
        frozen = [replica, *replica.children(recursive=True)]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        time.sleep(20)
        for process in frozen:
            process.send_signal(signal.SIGCONT)
        run.advance(3, limit_s=START_S)
        assert "going back to the newest checkpoint" not in run.log()
        stop(run)
