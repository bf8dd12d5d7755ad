"""Alerts of a real run, at a real Alertmanager's webhook: each fires by its fault, and resolves.

The rules are those of the chart with every duration a sixtieth. Those whose faults need hardware,
days or a defect are tried by promtool alone (`tests/deploy/test_rules.py`).
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
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
from worlds.servers.ports import free_port
from worlds.servers.prometheus_server import LIFE_S, Target, scraping_all

from deploy.rules.source import rules_text
from deploy.stack.__main__ import alertmanager_command, alertmanager_config

pytestmark = [pytest.mark.proof, pytest.mark.release, pytest.mark.timeout(900)]

KEY = "a key of the scenario, long enough"
ALERTMANAGER = "prometheus-alertmanager"
SCALE = 1 / 60


class Told:
    """What the webhook was told, by alert: "firing" or "resolved", in order."""

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
def alertmanager(directory: Path, told: Told) -> Iterator[str]:
    """Yields its host:port."""
    if shutil.which(ALERTMANAGER) is None:
        skip_or_fail(f"{ALERTMANAGER} is not installed (Debian: {ALERTMANAGER})")
    address = f"127.0.0.1:{free_port()}"
    with answering(told.answer) as webhook:
        (directory / "alertmanager.yml").write_text(alertmanager_config(webhook=webhook))
        command = alertmanager_command(ALERTMANAGER, directory, address=address)
        with (directory / "alertmanager.out").open("wb") as output:
            # `timeout` ends it also where this process is killed.
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
        # The deadline is a number of the run, which the rules' scale does not shorten.
        rollouts={"num_actors": 1, "frozen_after_s": 600, "episode_deadline_s": 60},
        service={"port": 0, "max_waiting_tasks": 8},
    )
    told = Told()
    with (
        running(config, tmp_path / "run", command="serve") as run,
        alertmanager(tmp_path, told) as receiver,
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
                told.wait_for("firing", "RayloomEngineMissing", limit_s=START_S)
                told.wait_for("resolved", "RayloomEngineMissing", limit_s=START_S)

                frozen = run.freeze_part("ray::EnvironmentActor")
                by_freeze = "RayloomNoRollouts", "RayloomStalled", "RayloomRequestsRefused"
                told.wait_for("firing", *by_freeze, limit_s=START_S)
                frozen.send_signal(signal.SIGCONT)
                told.wait_for("resolved", *by_freeze, limit_s=START_S)

                client.stop()
                run.process.kill()
                told.wait_for("firing", "RayloomTargetDown", limit_s=STEP_S)
                # It was seen an hour ago, which is a minute here, and is forgotten then.
                told.wait_for("resolved", "RayloomTargetDown", limit_s=START_S)
        finally:
            client.stop()
            working.join(timeout=60)
    assert "RayloomLedgerOutOfBalance" not in told.states
    assert "RayloomRunFailed" not in told.states
