"""OpenEnv's real server in a Python environment of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from worlds.agents.agent_programs import environment_of
from worlds.runs.run_driver import ROOT
from worlds.servers.ports import free_port

START_S = 60.0


@contextmanager
def real_server(example: str) -> Iterator[str]:
    """Serve an example of docs/examples with the package's own server. Yields: the address."""
    python = environment_of("openenv") / "bin" / "python"
    port = free_port()
    line = [str(python), str(ROOT / "docs/examples" / example), "--port", str(port)]
    process = subprocess.Popen(line)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _is_healthy(address):
            assert process.poll() is None and time.monotonic() < deadline, "it did not start"
            time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait(timeout=20)


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False
