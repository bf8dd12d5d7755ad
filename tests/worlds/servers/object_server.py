"""A real S3 server on loopback, with its objects in memory: moto's server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from worlds.checks.missing_tools import need_package
from worlds.servers.ports import free_port

LIFE_S = 1800
START_S = 60.0
BUCKET = "runs"


@contextlib.contextmanager
def object_server(directory: Path) -> Iterator[dict[str, str]]:
    """Start a server with the bucket BUCKET; it ends by itself after LIFE_S.

    Yields: the variables by which s3fs finds the server.
    """
    need_package("s3fs", "s3")
    need_package("moto", "dev")
    port = free_port()
    line = ["timeout", str(LIFE_S), sys.executable, "-m", "moto.server", "-H", "127.0.0.1"]
    log = directory / "objects.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*line, "-p", str(port)],
            cwd=directory,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _is_made(f"{url}/{BUCKET}"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        # `timeout` passes the signal on.
        process.terminate()
        process.wait(timeout=20)


def _is_made(bucket: str) -> bool:
    with contextlib.suppress(OSError):
        request = urllib.request.Request(bucket, method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=key/x/us-east-1/s3/x")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    return False
