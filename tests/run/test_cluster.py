"""Tests of starting a local Ray, of its sockets and log files, and of connecting to a cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from worlds.runs.run_driver import ROOT

from service.config.file import ConfigError
from service.launch import cluster
from service.launch.cluster import _check_answers


def test_with_a_short_temporary_directory_ray_chooses_its_own() -> None:
    assert cluster.short_temp_dir("/tmp") is None
    assert cluster.short_temp_dir("/home/somebody/tmp") is None


def test_a_temporary_directory_too_long_for_a_socket_is_replaced() -> None:
    assert cluster.short_temp_dir("/home/" + "x" * 100) == "/tmp/ray"
    # The limit is in bytes, not in characters.
    assert cluster.short_temp_dir("/home/" + "ü" * 25) == "/tmp/ray"


def test_a_failed_start_of_ray_is_reported_in_one_sentence() -> None:
    # In a separate process: the tests of this one share a Ray, which `joined` would shut down.
    program = """
from service.config.file import ConfigError, parse_config
from service.config.file import ConfigError
from service.launch import cluster
from service.launch.cluster import _check_answers
tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
try:
    with cluster.joined(parse_config(tree, source="test"), address=None):
        print("it came up")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120,
        # Ray cannot create its session directory below a file.
        env={**os.environ, "RAY_TMPDIR": "/dev/null"},
    )  # fmt: skip
    assert re.search(r"a local Ray did not start \(.*expected it to start", done.stdout), done


# It starts Ray, and a worker writes more than its files may hold: 15 s.
@pytest.mark.proof
@pytest.mark.slow
def test_ray_bounds_the_files_of_its_workers_and_not_the_runs_log(
    tmp_path: Path,
) -> None:
    """Start Ray in a separate process, where a worker prints eight times the limit of a file."""
    program = f"""
import sys
import ray
from service.config.file import parse_config
from service.launch import cluster
from service.launch.run_dir import configure_logging
tree = {{"model": {{"tiny": {{}}}}, "tasks": {{"environment": "guessing"}}}}
with cluster.joined(parse_config(tree, source="test"), address=None):
    @ray.remote
    def talk():
        import logging
        configure_logging({str(tmp_path / "run.log")!r})
        logging.getLogger("rayloom.run").info("step 1")
        for _ in range(8 * 64):
            print("x" * 1023)
            print("y" * 1023, file=sys.stderr)
    ray.get(talk.remote())
    print(ray._private.worker._global_node.get_logs_dir_path())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "RAY_ROTATION_MAX_BYTES": str(64 * 1024)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = Path(done.stdout.splitlines()[-1])
    for kind in ("out", "err"):
        sizes = [file.stat().st_size for file in logs.glob(f"worker-*.{kind}*")]
        full = [size for size in sizes if size > 32 * 1024]
        assert 1 <= len(full) <= 3 and max(full) <= 80 * 1024, (kind, sizes)
    assert not [file for file in logs.glob("worker-*") if "step 1" in file.read_text()]
    [line] = (tmp_path / "run.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO    rayloom.run step 1", line)


def refuse_starts(
    monkeypatch: pytest.MonkeyPatch,
    *reasons: str,
    leaves: list[subprocess.Popen[bytes]] | None = None,
) -> list[str]:
    """Make Ray's start fail once for each reason and then succeed; return the reasons left.

    leaves: receives a process for each failed start, like those that Ray leaves running.
    """
    left = list(reasons)

    def init(**options: object) -> None:
        if left:
            if leaves is not None:
                leaves.append(subprocess.Popen(["sleep", "60"]))
            raise Exception(left.pop(0))

    monkeypatch.setattr(ray, "init", init)
    # The tests of this process share one Ray, which must keep running.
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return left


LATE = "The current node timed out during startup."


def test_after_a_timeout_ray_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    own, left_behind = subprocess.Popen(["sleep", "60"]), []
    left = refuse_starts(monkeypatch, LATE, leaves=left_behind)
    try:
        cluster.start_ray()
        assert left == []
        # The processes of the first attempt are ended, and no others.
        assert [each.poll() is None for each in left_behind] == [False]
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


@pytest.mark.parametrize("reasons", [(LATE, LATE), ("no space left on device", LATE)])
def test_a_second_timeout_or_another_error_of_rays_start_is_final(
    monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, str]
) -> None:
    left = refuse_starts(monkeypatch, *reasons, "not asked a third time")
    with pytest.raises(Exception, match=r"timed out|no space"):
        cluster.start_ray()
    assert "not asked a third time" in left


def test_a_sigterm_while_ray_starts_raises_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a SIGTERM interrupts even if Ray's handler drops the exception."""

    def init(**_options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", init)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.start_ray()
    finally:
        signal.signal(signal.SIGTERM, before)


def answer_one(server: socket.socket, answer: bytes) -> None:
    with server.accept()[0] as connection:
        connection.recv(100)
        connection.sendall(answer)


@pytest.mark.parametrize(
    ("listens", "answer", "words"),
    [
        (False, b"", "Connection refused"),
        (True, b"", "timed out"),
        (
            True,
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "listens there is not a head node",
        ),
    ],
    ids=["nothing", "silence", "another server"],
)
def test_an_address_without_a_ray_head_is_refused_within_seconds(
    monkeypatch: pytest.MonkeyPatch, listens: bool, answer: bytes, words: str
) -> None:
    monkeypatch.setattr(cluster, "HEAD_LIMIT_S", 0.0)
    monkeypatch.setattr(cluster, "HEAD_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.2", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        elif answer:
            pool.submit(answer_one, server, answer)
        # `attached` would end the Ray that the tests of this process share.
        with pytest.raises(ConfigError, match=rf":{port}: no Ray cluster answers .*{words}.*:6379"):
            cluster._connect(f"127.0.0.2:{port}")
        if not listens:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{port}")
            with pytest.raises(ConfigError, match=r"auto \(127.0.0.2:\d+\): no Ray cluster "):
                cluster._connect("auto")


def test_a_ray_head_is_accepted_by_each_form_of_its_address(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", head)
    here = f"127.0.0.1:{head.rpartition(':')[2]}"
    for address in (head, here, "auto", f"ray://{head}"):
        _check_answers(address)
