"""Tests of `rayloom nodes`: its commands start a cluster on new machines and on used ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds.servers.ports import free_port

NUM_NODES = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print("nodes", sum(node["Alive"] for node in ray.nodes()))
"""


def printed(home: Path, *arguments: str) -> list[str]:
    """Return the blocks of commands that `rayloom nodes` prints for a home directory."""
    start = "from service.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "nodes", *arguments],
        env={**os.environ, "HOME": str(home)}, text=True, capture_output=True, timeout=60,
        check=True,
    )  # fmt: skip
    return done.stdout.strip().split("\n\n")


@pytest.mark.proof
@pytest.mark.slow
def test_the_token_is_made_once_and_printed_for_the_other_machines(tmp_path: Path) -> None:
    head, other, train, _ = printed(tmp_path, "10.0.0.2")
    token = (tmp_path / ".ray" / "auth_token").read_text().strip()
    assert f"printf %s {token} > ~/.ray/auth_token" in other and token not in head + train
    assert "--node-ip-address=10.0.0.2 --port=6379" in head
    assert "--address=10.0.0.2:6379" in other and "--address 10.0.0.2:6379" in train
    assert printed(tmp_path, "10.0.0.2")[1] == other
    assert "--address=[fd00::2]:6380" in printed(tmp_path, "fd00::2", "--port=6380")[1]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_machine_with_another_token_joins_by_the_printed_commands(tmp_path: Path) -> None:
    homes = {name: tmp_path / name for name in ("head", "other")}
    for home in homes.values():
        (home / ".ray").mkdir(parents=True)
    # A local run left a token on the other machine.
    (homes["other"] / ".ray" / "auth_token").write_text("f" * 64)
    port = str(free_port())
    blocks = printed(homes["head"], "127.0.0.1", f"--port={port}")
    started: list[subprocess.Popen[bytes]] = []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        for name, block in zip(homes, blocks, strict=False):
            script = re.sub(r"^(ray start .*)$", r"exec \1 --num-cpus=1 --block", block, flags=re.M)
            with (tmp_path / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    ["bash", "-c", script],
                    env={**clean, "HOME": str(homes[name])},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            started.append(process)
        deadline = time.monotonic() + 150
        said = ""
        while said.strip() != "nodes 2":
            logs = "".join((tmp_path / f"{name}.log").read_text() for name in homes)
            assert time.monotonic() < deadline, said + logs
            assert "InvalidAuthToken" not in logs, logs
            time.sleep(2)
            found = subprocess.run(
                [sys.executable, "-c", NUM_NODES, f"127.0.0.1:{port}"],
                env={**clean, "HOME": str(homes["head"]), "RAY_AUTH_MODE": "token"},
                text=True, capture_output=True, timeout=120, check=False,
            )  # fmt: skip
            said = found.stdout
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(timeout=60)
