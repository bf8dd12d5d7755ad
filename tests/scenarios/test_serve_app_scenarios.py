"""Tests of runs as the chart starts them: by Ray's own `serve run`, or by a RayJob's command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve
from worlds.runs.run_checks import check_lineage
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running
from worlds.servers.helm_chart import (
    arguments_of,
    in_mode,
    pod_templates,
    rendered,
    serve_config_of,
)
from worlds.servers.nodes import network
from worlds.servers.ports import free_port
from worlds.servers.prometheus_server import scraping, series

from service.inspect.audit import audit
from service.inspect.reader import open_journal
from service.launch.cluster import start_ray
from service.launch.run_dir import RunDir
from service.remote_calls import NAMESPACE
from service.store.lineage import read_events, read_history

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

KEY = "a key of the scenario, long enough"
HEADERS = {"authorization": f"Bearer {KEY}"}
OVER = ("trained", "evicted")
SMALL = [
    "algorithm.groups_per_step=4",
    "algorithm.group_size=4",
    "inference.kv_cache_gib=0.25",
    "metrics.port=0",
    "model.tiny.warmup_steps=20",
    "run.checkpoint_every=1",
    "run.evaluate_every=1000",
    "tasks.evaluation_tasks=0",
    "trainer.num_ranks=1",
]


def charts_serve_config(
    directory: Path, *, port: int, host: str = "127.0.0.1", overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the chart's Serve configuration with this machine's paths and port and small steps."""
    config = serve_config_of(rendered())
    config["http_options"] |= {"host": host, "port": port}
    [application] = config["applications"]
    application["args"] |= {
        "run_dir": str(directory / "run"),
        "state_dir": str(directory / "state"),
        "overrides": [*SMALL, *overrides],
    }
    return config


@pytest.fixture
def gcs_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a local Ray with room for a run; yield its address."""
    # The chart gives every pod the key, because it listens beyond loopback.
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    start_ray(
        address="local", namespace=NAMESPACE, num_cpus=8, include_dashboard=False,
        log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@contextlib.contextmanager
def served(
    file: Path, *, address: str, entrance: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `serve run` until the end of the block.

    entrance: the words before the command that enter another node's namespaces.
    """
    program = str(Path(sys.executable).parent / "serve")
    command = [*entrance, program, "run", str(file), "--address", address]
    with (file.parent / "serve.out").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        # The processes that it has started end with the cluster.
        process.kill()
        process.wait(timeout=20)


def wait_for_ready(client: httpx.Client, file: Path, *, status: int, limit_s: float) -> None:
    """Wait until /readyz answers with a status; fail at once if Serve gives up the application."""
    deadline = time.monotonic() + limit_s
    while True:
        assert "failed with exception" not in (said := (file.parent / "serve.out").read_text()), (
            said
        )
        try:
            answer = client.get("/readyz")
            if answer.status_code == status:
                return
            last = answer.text
        except httpx.TransportError as error:
            last = str(error)
        assert time.monotonic() < deadline, last
        time.sleep(0.3)


def rayloom(*arguments: str, entrance: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command `rayloom`; entrance: see `served`."""
    command = [*entrance, str(Path(sys.executable).parent / "rayloom"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def submit(client: httpx.Client, *ids: str, environment: str = "guessing") -> int:
    body = {"environment": environment, "tasks": [{"id": each} for each in ids]}
    answer = client.post("/api/v1/rollouts", json=body)
    assert answer.status_code == 202, answer.text
    accepted: int = answer.json()["accepted"]
    return accepted


def wait_until_over(
    client: httpx.Client, *ids: str, limit_s: float, states: Sequence[str] = OVER
) -> None:
    deadline = time.monotonic() + limit_s
    for each in ids:
        while (view := client.get(f"/api/v1/rollouts/{each}").json()).get("status") not in states:
            assert time.monotonic() < deadline, view
            time.sleep(0.3)


def test_chart_serve_configuration_serves_rollouts_and_outlives_its_host(
    tmp_path: Path, gcs_address: str
) -> None:
    port = free_port()
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(charts_serve_config(tmp_path, port=port)))
    stop = ("stop", "--address", gcs_address)
    with (
        served(file, address=gcs_address),
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=START_S, headers=HEADERS
        ) as client,
    ):
        wait_for_ready(client, file, status=200, limit_s=START_S)
        first = [f"first-{number}" for number in range(4)]
        assert submit(client, *first) == 4
        wait_until_over(client, *first, limit_s=START_S)
        kill_host()
        wait_for_ready(client, file, status=503, limit_s=60)
        wait_for_ready(client, file, status=200, limit_s=START_S)
        later = [f"later-{number}" for number in range(4)]
        assert submit(client, *first, *later) == 4
        wait_until_over(client, *later, limit_s=START_S)
        # The head's pod does this before it ends: the run ends in order, and says so.
        submit(client, *(f"last-{number}" for number in range(20)))
        done = rayloom(*stop, "--run", "guessing-cpu", "--grace", "30")
        assert done.returncode == 0 and done.stdout.endswith(": has ended\n"), done
        wait_for_words(client, "stopped after step", limit_s=STEP_S)
        with RunDir(path=tmp_path / "run").looked_into() as store:
            assert store.live_owner() is None
        nobody = rayloom(*stop, "--run", "x")
        assert nobody.returncode == 0 and "there is no run to stop with the name x" in nobody.stdout


def test_host_whose_run_was_taken_over_waits_until_the_run_is_free(
    tmp_path: Path, gcs_address: str
) -> None:
    port = free_port()
    file = tmp_path / "serve.yaml"
    serve_config = charts_serve_config(tmp_path, port=port)
    file.write_text(yaml.safe_dump(serve_config))
    tree = tmp_path / "config.yaml"
    tree.write_text(yaml.safe_dump(serve_config["applications"][0]["args"]["config"]))
    run_dir = RunDir(path=tmp_path / "run")
    overrides = [*SMALL, "service.host=127.0.0.1", "service.port=0"]
    take = ["--resume", "--take-over", *(part for each in overrides for part in ("--set", each))]
    with (
        served(file, address=gcs_address),
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=START_S, headers=HEADERS
        ) as client,
    ):
        wait_for_ready(client, file, status=200, limit_s=START_S)
        submit(client, *(f"first-{number}" for number in range(4)))
        # Another cluster, unknown to this one, takes the run over.
        with running(tree, run_dir.path, take, command="serve") as other:
            other.wait_for_output("the API listens on ", limit_s=START_S)
            wait_for_words(client, "taken over by ", limit_s=START_S)
            with run_dir.looked_into() as store:
                taken = store.newest_term()
                for _ in range(20):
                    time.sleep(1.0)
                    answer = client.get("/api/v1/rollouts/first-0")
                    assert answer.status_code == 503 and "taken over by" in answer.json()["detail"]
                assert store.newest_term() == taken
                # Serve starts the replica again, which finds a live owner and waits.
                kill_host()
                wait_for_words(client, "waiting: the run is held by ", limit_s=START_S)
                assert store.newest_term() == taken
                other.interrupt()
                assert other.wait(limit_s=START_S) == 130
                wait_for_ready(client, file, status=200, limit_s=START_S)
                assert store.newest_term() == taken + 1
        wait_until_over(client, *(f"first-{number}" for number in range(4)), limit_s=START_S)


# A game whose reset takes as long as a file says; a step is about as long as its slowest game.
PAUSED_GAME = """
import asyncio, os, pathlib
from actors.environment.builtin.guessing import GuessingEnvironment

class PausedGuessing(GuessingEnvironment):
    async def reset(self, task):
        await asyncio.sleep(float(pathlib.Path(os.environ["PAUSE_FILE"]).read_text()))
        return await super().reset(task)
"""
GAME = "paused_game:PausedGuessing"
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.mark.proof
@pytest.mark.nodes
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("pause_s", [1.0, 600.0], ids=["steps of 2 s", "steps of 600 s"])
def test_terminated_head_loses_no_step_and_no_rollout(tmp_path: Path, pause_s: float) -> None:
    """End the head's pod as Kubernetes does: run the chart's hook, then send SIGTERM."""
    [container] = pod_templates(rendered())["head"]["spec"]["containers"]
    _, *hook = container["lifecycle"]["preStop"]["exec"]["command"]
    pause = tmp_path / "pause"
    pause.write_text("0")
    (tmp_path / "paused_game.py").write_text(PAUSED_GAME)
    port, file = free_port(), tmp_path / "serve.yaml"
    # Steps are committed only at the end.
    overrides = [
        f"tasks.environment={GAME}", "run.checkpoint_every=1000",
        "rollouts.turn_deadline_s=900", "rollouts.episode_deadline_s=1800",
    ]  # fmt: skip
    config = charts_serve_config(tmp_path, port=port, host="0.0.0.0", overrides=overrides)
    file.write_text(yaml.safe_dump(config))
    [drain_s] = [int(each["value"]) for each in container["env"] if each["name"] == DRAIN]
    environ = {
        DRAIN: str(drain_s), "RAYLOOM_API_KEY": KEY, "PAUSE_FILE": str(pause),
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }  # fmt: skip
    run_dir = RunDir(path=tmp_path / "run")
    first, later = ([f"{name}-{number}" for number in range(8)] for name in ("first", "later"))
    with network(tmp_path) as net:
        head = net.add(cpus=8, environ=environ, options=["--block"])
        url = f"http://{head.address}:{port}"
        with httpx.Client(base_url=url, timeout=START_S, headers=HEADERS) as client:
            head.start()
            with served(file, address="auto", entrance=head.entrance):
                wait_for_ready(client, file, status=200, limit_s=START_S)
                submit(client, *first, environment=GAME)
                wait_until_over(client, *first, limit_s=START_S)
                pause.write_text(str(pause_s))
                submit(client, *later, environment=GAME)
                wait_until_over(client, later[0], limit_s=START_S, states=("running", *OVER))
                done = rayloom(*hook, entrance=head.entrance)
                assert done.returncode == 0 and ": has ended\n" in done.stdout, done
                with run_dir.looked_into() as store:
                    before = read_history(store).steps
                    assert store.checkpoints()[0].step == before[-1].step
                    assert store.live_owner() is None
                assert len(before) >= 2
                if pause_s > 100:
                    assert len(before) == 2
                head.end_by_sigterm(limit_s=drain_s + 30)
            pause.write_text("0")
            head.start()
            with served(file, address="auto", entrance=head.entrance):
                wait_for_ready(client, file, status=200, limit_s=START_S)
                wait_until_over(client, *first, *later, limit_s=START_S)
                done = rayloom(*hook, entrance=head.entrance)
                assert done.returncode == 0, done
    with run_dir.looked_into() as store:
        after, events = read_history(store).steps, read_events(store)
    assert after[: len(before)] == before
    check_lineage(events)
    trained = [event for event in events if event.kind == "trained"]
    assert len(trained) == 4 * len(first + later)
    assert audit(open_journal(run_dir.path)).is_clean


@contextlib.contextmanager
def job(arguments: dict[str, Any], *, steps: int, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run the RayJob's command as Ray does, until the end of the block."""
    text = json.dumps({**arguments, "overrides": [*arguments["overrides"], f"run.steps={steps}"]})
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.train_job", text],
        cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=20)


def output_of(job: subprocess.Popen[str]) -> str:
    """Wait for the end of a job; return its output."""
    said, _ = job.communicate(timeout=START_S + 200)
    assert job.returncode == 0, said
    return said


def test_chart_job_reports_its_end_and_continues_when_started_again(
    tmp_path: Path, gcs_address: str
) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    own = [
        "service.host=127.0.0.1",
        f"service.port={free_port()}",
        f"metrics.port={metrics.rpartition(':')[2]}",
    ]
    arguments = arguments_of(rendered(in_mode("job"))) | {
        "run_dir": str(tmp_path / "run"),
        "state_dir": str(tmp_path / "state"),
        "overrides": [*SMALL, *own],
    }
    with (
        scraping(metrics, tmp_path / "prometheus", run="guessing-cpu") as prometheus,
        job(arguments, steps=2, address=gcs_address) as first,
    ):
        has_ended = series("rayloom_run_phase", phase="finished")
        prometheus.wait_for(has_ended, at_least=1, limit_s=START_S)
        assert prometheus.newest()[series("rayloom_train_steps_total")] == 2
        assert first.poll() is None
        # A pod that gets SIGTERM now has no work left.
        first.terminate()
        assert "report: " in output_of(first)
    arguments["overrides"].append("metrics.stays_s=0.1")
    with job(arguments, steps=3, address=gcs_address) as second:
        output_of(second)
    with job(arguments, steps=3, address=gcs_address) as third:
        assert "all 3 steps are done already" in output_of(third)
    assert (tmp_path / "state" / "rayloom.db").is_file()


# Takes 85 s, and an upgrade under another name is rare.
@pytest.mark.proof
def test_new_run_name_ends_the_old_run_and_leaves_one_application_of_engines(
    tmp_path: Path, gcs_address: str
) -> None:
    """Replace the running Serve configuration with a changed one, as the operator does."""
    port, files = free_port(), []
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        config = charts_serve_config(
            tmp_path / name, port=port, overrides=[f"run.name={name}", "run.checkpoint_every=1000"]
        )
        files.append(tmp_path / name / "serve.yaml")
        files[-1].write_text(yaml.safe_dump(config))
    with (
        served(files[0], address=gcs_address),
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=START_S, headers=HEADERS
        ) as client,
    ):
        wait_for_ready(client, files[0], status=200, limit_s=START_S)
        tasks = [f"task-{number}" for number in range(4)]
        submit(client, *tasks)
        wait_until_over(client, *tasks, limit_s=START_S)
        with served(files[1], address=gcs_address):
            deadline = time.monotonic() + START_S
            while not RunDir(path=tmp_path / "after" / "run").has_run():
                assert time.monotonic() < deadline, client.get("/readyz").text
                time.sleep(0.3)
            wait_for_ready(client, files[1], status=200, limit_s=START_S)
            # The new run does not know the old run's tasks, and plays them.
            assert submit(client, *tasks) == 4
            wait_until_over(client, *tasks, limit_s=START_S)
            applications = serve.status().applications
            [of_engines] = [each for each in applications if each != "rayloom"]
            assert of_engines.startswith("rayloom-after-")
    # The step without a checkpoint was committed before the host ended.
    with RunDir(path=tmp_path / "before" / "run").looked_into() as store:
        assert store.live_owner() is None
        assert store.checkpoints()[0].step == read_history(store).steps[-1].step == 1


def wait_for_words(client: httpx.Client, words: str, *, limit_s: float) -> None:
    """Wait until the answer of /readyz has these words."""
    deadline = time.monotonic() + limit_s
    while words not in (said := client.get("/readyz").text):
        assert time.monotonic() < deadline, said
        time.sleep(0.3)


def kill_host() -> None:
    """Kill the replica that owns the run's supervisor."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(child.cmdline()).startswith("ray::ServeReplica:rayloom:run"):
                child.kill()
                return
    raise AssertionError("there is no replica ray::ServeReplica:rayloom:run")
