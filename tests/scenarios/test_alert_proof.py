"""Tests that faults of a real run fire alerts, which resolve later and reach a real webhook.

The rules are those of the chart with each duration divided by 60. Rules whose faults need special
hardware, days or a defect are tested only with promtool (`tests/deploy/test_rules.py`).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from worlds.agents.submitting_client import SubmittingClient
from worlds.checks.missing_tools import skip_or_fail
from worlds.runs.run_driver import ENGINE, START_S, STEP_S, running, small_config
from worlds.servers.json_server import answering
from worlds.servers.nodes import Node, network, require_nodes
from worlds.servers.ports import free_port
from worlds.servers.prometheus_server import LIFE_S, Target, scraping_all

from deploy.rules.__main__ import rules_text
from deploy.stack.__main__ import alertmanager_command, alertmanager_config

pytestmark = [pytest.mark.proof, pytest.mark.release, pytest.mark.timeout(900)]

KEY = "a key of the scenario, long enough"
ALERTMANAGER = "prometheus-alertmanager"
SCALE = 1 / 60


class Webhook:
    """A webhook that keeps the states of each alert in order: "firing" or "resolved"."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        for alert in body["alerts"]:
            assert alert["labels"]["run"] == "small" and alert["annotations"]["summary"]
            self.states.setdefault(alert["labels"]["alertname"], []).append(alert["status"])
        return 200, {}

    def wait_for(self, state: str, *alerts: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while any(self.states.get(alert, [""])[-1] != state for alert in alerts):
            assert time.monotonic() < deadline, self.states
            time.sleep(0.5)


@contextmanager
def alertmanager(directory: Path, received: Webhook) -> Iterator[str]:
    """Run Alertmanager until the end of the block; yield its host:port."""
    if shutil.which(ALERTMANAGER) is None:
        skip_or_fail(f"{ALERTMANAGER} is not installed (Debian: {ALERTMANAGER})")
    address = f"127.0.0.1:{free_port()}"
    with answering(received.answer) as webhook:
        (directory / "alertmanager.yml").write_text(alertmanager_config(webhook=webhook))
        command = alertmanager_command(ALERTMANAGER, directory, address=address)
        with (directory / "alertmanager.out").open("wb") as output:
            # `timeout` ends it also if this process is killed.
            process = subprocess.Popen(
                ["timeout", "--kill-after=5", str(LIFE_S), *command],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield address
        finally:
            process.terminate()
            process.wait(timeout=20)


def test_alerts_reach_a_webhook_when_their_faults_begin_and_when_they_end(
    tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    config = small_config(
        tmp_path,
        small_model,
        run={"steps": 100_000, "evaluate_every": 100_000},
        trainer={"num_ranks": 1},
        # The rules' scale does not shorten the deadlines that come from the run's configuration.
        rollouts={"num_actors": 1, "frozen_after_s": 600, "episode_deadline_s": 60},
        service={"port": 0, "max_waiting_tasks": 8},
    )
    received = Webhook()
    with (
        running(config, tmp_path / "run", command="serve") as run,
        alertmanager(tmp_path, received) as receiver,
    ):
        url = run.api_address(limit_s=START_S)
        target = Target(address=run.metrics_address(limit_s=START_S), labels={})
        client = SubmittingClient(
            base_url=url, key=KEY, environment="guessing", rng=random.Random(0)
        )
        working = threading.Thread(target=client.work)
        working.start()
        try:
            with scraping_all(
                [target], tmp_path / "prometheus", run="small",
                rules=rules_text(scale=SCALE), alertmanager=receiver,
            ):  # fmt: skip
                run.wait_for_step(3, limit_s=START_S)
                run.kill_part(ENGINE)
                received.wait_for("firing", "RayloomEngineMissing", limit_s=START_S)
                received.wait_for("resolved", "RayloomEngineMissing", limit_s=START_S)

                frozen = run.freeze_part("ray::EnvironmentActor")
                by_freeze = "RayloomNoRollouts", "RayloomStalled", "RayloomRequestsRefused"
                received.wait_for("firing", *by_freeze, limit_s=START_S)
                frozen.send_signal(signal.SIGCONT)
                received.wait_for("resolved", *by_freeze, limit_s=START_S)

                client.stop()
                run.process.kill()
                received.wait_for("firing", "RayloomTargetDown", limit_s=STEP_S)
                # The alert ends an hour after the last scrape of the target: a minute here.
                received.wait_for("resolved", "RayloomTargetDown", limit_s=START_S)
        finally:
            client.stop()
            working.join(timeout=60)
    assert "RayloomLedgerOutOfBalance" not in received.states
    assert "RayloomRunFailed" not in received.states


# A driver that keeps its fault until its standard input ends.
FAULT = """
import sys
import numpy
import ray
from ray import serve
ray.init(address="auto", log_to_driver=False, logging_level="error")
{begin}
print("begun", flush=True)
sys.stdin.read()
{end}
"""
# Three times what a node's object store holds.
SPILL = FAULT.format(begin="kept = [ray.put(numpy.ones(2**21)) for _ in range(24)]", end="")
FAIL_TO_DEPLOY = FAULT.format(
    begin="""
@serve.deployment(ray_actor_options={"num_cpus": 0}, max_constructor_retry_count=1)
class Broken:
    def __init__(self):
        raise ValueError("it never starts")
try:
    serve.run(Broken.bind(), name="broken", route_prefix="/broken")
except RuntimeError as error:
    print(error, file=sys.stderr)
else:
    raise AssertionError("it started")
""",
    end='serve.delete("broken")',
)
RUN_OUT_OF_MEMORY = FAULT.format(
    begin="""
@ray.remote(num_cpus=0, resources={"short": 1}, max_retries=0)
def wait():
    import time
    time.sleep(600)
try:
    ray.get(wait.remote())
except ray.exceptions.OutOfMemoryError as error:
    print(error, file=sys.stderr)
""",
    end="",
)


@contextmanager
def fault(node: Node, script: str) -> Iterator[None]:
    """Run a script with a fault in a driver on the node until the end of the block."""
    process = subprocess.Popen(
        [*node.entrance, "timeout", str(LIFE_S), sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        # Ray Serve prints lines before it.
        assert "begun\n" in process.stdout, f"the driver ended with {process.wait()}"
        yield
        process.stdin.close()
        assert process.wait(timeout=START_S) == 0
    finally:
        process.kill()
        process.wait(timeout=20)
        process.stdin.close()
        process.stdout.close()


@contextmanager
def small_volume(directory: Path) -> Iterator[None]:
    """Mount a small file system at a new directory until the end of the block."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def filled(volume: Path, *, left_bytes: int) -> Iterator[None]:
    """Fill a volume except for `left_bytes` until the end of the block."""
    ballast = volume / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(volume).free - left_bytes)
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.nodes
def test_alerts_on_ray_nodes_and_volumes_reach_a_webhook(tmp_path: Path, small_model: str) -> None:
    """Alerts fire for spilled objects, a Ray Serve application that fails to deploy, a node that is
    short of memory, a full volume of checkpoints, and a lost node."""
    require_nodes()
    volume, received = tmp_path / "volume", Webhook()
    # With the first worker, Ray's memory monitor finds the node short of memory.
    is_short = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    with (
        small_volume(volume),
        network(tmp_path) as net,
        alertmanager(tmp_path, received) as receiver,
    ):
        roles = {f"rayloom_{role}": 1.0 for role in ("control", "inference", "trainer")}
        port = "--metrics-export-port=8080"
        head = net.add(cpus=3, resources=roles, options=[port])
        _, second = (
            net.add(cpus=1, resources={"rayloom_environments": 1}, options=[port]) for _ in range(2)
        )
        net.add(cpus=0, resources={"short": 1}, environ=is_short, options=[port])
        net.start()
        config = small_config(
            tmp_path,
            small_model,
            run={"steps": 100_000, "evaluate_every": 100_000, "journal_steps": 10},
            trainer={"num_ranks": 1},
            rollouts={"num_actors": 2, "turn_deadline_s": 60, "frozen_after_s": 20},
            metrics={"host": head.address},
        )
        targets = [Target(address=f"{each.address}:8080", labels={}) for each in net.nodes]
        line = ["--address", f"{head.address}:6379"]
        with running(config, volume / "run", line, entrance=head.entrance) as run:
            targets.append(Target(address=run.metrics_address(limit_s=START_S), labels={}))
            with scraping_all(
                targets, tmp_path / "prometheus", run="small",
                rules=rules_text(scale=SCALE), alertmanager=receiver,
            ):  # fmt: skip
                run.wait_for_step(5, limit_s=START_S)
                with fault(head, SPILL):
                    received.wait_for("firing", "RayloomObjectStoreSpilling", limit_s=START_S)
                with fault(head, FAIL_TO_DEPLOY):
                    received.wait_for("firing", "RayloomServeUnhealthy", limit_s=START_S)
                with fault(head, RUN_OUT_OF_MEMORY):
                    received.wait_for("firing", "RayloomOutOfMemory", limit_s=START_S)
                one = max((volume / "run" / "checkpoints").glob("step-*"))
                size = sum(each.stat().st_size for each in one.rglob("*"))
                # There is room for the next checkpoint; after it, for less than one and a half.
                with filled(volume, left_bytes=2 * size):
                    received.wait_for("firing", "RayloomCheckpointVolumeFull", limit_s=START_S)
                second.kill()
                received.wait_for("firing", "RayloomNodesMissing", limit_s=START_S)
                second.start()
                received.wait_for(
                    "resolved", "RayloomObjectStoreSpilling", "RayloomServeUnhealthy",
                    "RayloomOutOfMemory", "RayloomCheckpointVolumeFull", "RayloomNodesMissing",
                    limit_s=START_S,
                )  # fmt: skip
