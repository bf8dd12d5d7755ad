"""A real PostgreSQL for tests: on loopback, with its own port and directory, and a bounded life."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from worlds.checks.missing_tools import skip_or_fail
from worlds.servers.ports import free_port

# Longer than all tests of a process take on a busy machine.
LIFE_S = 3600
START_S = 30.0
PASSWORD = "a password of the tests"
# The directories of Debian's programs, which are not on the path.
FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def find_program(name: str) -> str:
    """Return a program's path; skip the test if PostgreSQL is not installed, or fail it in CI."""
    for folder in FOLDERS:
        if (folder / name).exists():
            return str(folder / name)
    if found := shutil.which(name):
        return found
    skip_or_fail(f"there is no {name}: install Debian's postgresql")


@dataclass
class PostgresqlServer:
    """A cluster of databases in `directory`, whose owner `runs` needs a password."""

    directory: Path
    port: int
    life_s: float = LIFE_S
    """Seconds after which a started server ends by itself."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """The URL without the password."""
        return f"postgresql://runs@127.0.0.1:{self.port}/postgres"

    def store_url(self, schema: str) -> str:
        """Return the URL of a schema as a run's record has it."""
        return f"postgresql+psycopg://runs@127.0.0.1:{self.port}/postgres?schema={schema}"

    def start(self) -> None:
        command = [find_program("postgres"), "-D", str(self.directory), "-p", str(self.port)]
        options = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self.directory}")
        for option in options:
            command += ["-c", option]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["timeout", str(self.life_s), *command],
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, **_as_another(),
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(psycopg.OperationalError), self.connect():
                return
            assert self._process.poll() is None, (self.directory / "server.log").read_text()
            assert time.monotonic() < deadline, (self.directory / "server.log").read_text()
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server.

        number: SIGINT ends all sessions and shuts down; SIGQUIT stops at once, as in a crash.
        """
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, ValueError, OSError):
            os.kill(int((self.directory / "postmaster.pid").read_text().split()[0]), number)
        self._process.wait(timeout=START_S)
        self._process = None

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url, password=PASSWORD, autocommit=True, connect_timeout=5)


@contextlib.contextmanager
def postgresql(directory: Path, *, life_s: float = LIFE_S) -> Iterator[PostgresqlServer]:
    """Make and start a new cluster of databases; stop it at the end of the block."""
    directory.mkdir(parents=True)
    password = directory / "password"
    password.write_text(PASSWORD)
    data = directory / "data"
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root, and only root may enter pytest's directories.
        for each in (directory, *directory.parents):
            if each.owner() == "root" and each != Path("/") and each != Path("/tmp"):
                each.chmod(each.stat().st_mode | 0o011)
        for each in (directory, password):
            shutil.chown(each, "postgres", "postgres")
    command = [find_program("initdb"), "-D", str(data), "-U", "runs", "--no-sync"]
    command += ["--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--locale=C"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        **_as_another(),
    )
    assert done.returncode == 0, done.stderr
    server = PostgresqlServer(directory=data, port=free_port(), life_s=life_s)
    try:
        server.start()
        yield server
    finally:
        server.stop(signal.SIGQUIT)


def _as_another() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
