"""Test of an actor that Ray's memory monitor kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]
# With these settings Ray finds any use of memory too high.
ENVIRONMENT = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
SCRIPT = """
import asyncio, sys
import ray
from actors.deadline import ActorLost
from actors.deaths import ACTOR_DEATHS
from service.remote_calls import await_reply

class Sleeper:
    async def sleep(self):
        await asyncio.sleep(60)

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
actor = ray.remote(num_cpus=0)(Sleeper).remote()
for _ in range(2):
    try:
        asyncio.run(await_reply(actor.sleep.remote(), name="sleeper", deadline_s=90))
    except ActorLost as loss:
        print(isinstance(loss.__cause__, ACTOR_DEATHS), type(loss.__cause__).__name__, loss)
"""


def test_actor_that_the_memory_monitor_killed_counts_as_dead(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **ENVIRONMENT}, cwd=tmp_path,
        text=True, timeout=200, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line in lines:
        assert line.startswith("True OutOfMemoryError the sleeper died: "), line
        assert "killed due to the node running low on memory" in line
