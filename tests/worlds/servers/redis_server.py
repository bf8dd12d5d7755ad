"""A real Redis for tests, in which a head keeps its cluster's state so that it can be restarted."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from worlds.checks.missing_tools import skip_or_fail

LIFE_S = 1800
START_S = 30.0
PORT = 6380


@contextlib.contextmanager
def redis_server(directory: Path, *, host: str) -> Iterator[str]:
    """Start a server that listens on `host` and keeps its data only in memory.

    It ends by itself after LIFE_S. Yields: HOST:PORT.
    """
    program = shutil.which("redis-server")
    if program is None:
        skip_or_fail("there is no redis-server: install Debian's package of this name")
    line = ["timeout", str(LIFE_S), program, "--bind", host, "--port", str(PORT)]
    line += ["--protected-mode", "no", "--save", "", "--appendonly", "no"]
    log = directory / "redis.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            line, cwd=directory, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(host):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"{host}:{PORT}"
    finally:
        # `timeout` passes the signal on.
        process.terminate()
        process.wait(timeout=20)


def _answers(host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, PORT), timeout=1) as client:
        client.sendall(b"PING\r\n")
        return client.recv(7) == b"+PONG\r\n"
    return False
