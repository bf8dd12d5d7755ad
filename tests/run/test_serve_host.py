"""Tests that the host on Ray Serve outlives a failed start of the run and gives the reason."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from worlds.runs.run_driver import small_config

from service.config.file import load_config
from service.launch.run_dir import RunDir
from service.serve import serve_host
from service.serve.serve_host import RunHost
from service.store.place import StoreOptions

pytestmark = pytest.mark.usefixtures("cluster")

LIMIT_S = 60.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_host, "PAUSES_S", (0.2,))


@pytest.fixture
def host(tmp_path: Path, quick: None) -> Iterator[RunHost]:
    """Return the host of a run whose directory is a file, so that it cannot start."""
    (tmp_path / "run").write_text("a file")
    config = load_config(small_config(tmp_path))
    host = RunHost(config, RunDir(path=tmp_path / "run"), StoreOptions())
    yield host
    host.__del__()
    ray.kill(host._endpoint)


def wait_for(host: RunHost, words: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while words not in host.why_down():
        assert time.monotonic() < deadline, host.why_down()
        time.sleep(0.05)


def test_a_refused_start_is_reported_and_tried_again(host: RunHost, tmp_path: Path) -> None:
    wait_for(host, "the start is refused: run directory ")
    host.check_health()
    address = ray.get(host._endpoint.address.remote(), timeout=LIMIT_S)
    with urllib.request.urlopen(address, timeout=LIMIT_S) as reply:
        assert 'rayloom_run_phase{phase="refused",run="small"} 1.0' in reply.read().decode()
    # Another cause shows that the start has been tried again.
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of a stranger").touch()
    wait_for(host, "of a stranger")


def test_a_metrics_port_in_use_is_reported_and_tried_again(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_host, "PORT_LIMIT_S", 0.2)
    (tmp_path / "run").write_text("a file")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load_config(small_config(tmp_path, metrics={"port": port}))
        host = RunHost(config, RunDir(path=tmp_path / "run"), StoreOptions())
        wait_for(host, f"the start is refused: metrics.port: 127.0.0.1:{port} cannot be opened")
    # After that its own endpoint has the port, which is not an error.
    wait_for(host, "the start is refused: run directory ")
    host.__del__()
    ray.kill(host._endpoint)
