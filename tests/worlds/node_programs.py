"""Agents' command lines from npm, in their pinned versions, and how each is told of its model."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worlds.agent_programs import ENVIRONMENTS, EXAMPLES, HERE, INSTALL_S
from worlds.missing_tools import skip_or_fail

PLAY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program that is asked for one task, and works on it in its directory."""

    name: str
    arguments: tuple[str, ...]
    """Before the task; $OPENAI_BASE_URL stands for its value, as in a shell."""
    config: tuple[str, str]
    """A file of docs/examples/agents, and where the program looks for it in its home."""
    env: Mapping[str, str]
    """Settings of its own."""


CODEX = CommandLine(
    name="codex",
    arguments=(
        "exec",
        "--skip-git-repo-check",
        "--sandbox",
        "danger-full-access",
        "-c",
        "model_providers.session.base_url=$OPENAI_BASE_URL",
    ),
    config=("codex.toml", ".codex/config.toml"),
    env={},
)
OPENCODE = CommandLine(
    name="opencode",
    arguments=("run",),
    config=("opencode.json", ".config/opencode/opencode.json"),
    # It would ask a server for what other models there are.
    env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
)


def programs() -> Path:
    """The directory of the installed programs; skips where npm is missing."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        skip_or_fail("node and npm are missing: agents' command lines cannot be installed")
    wanted = HERE / "command_lines" / "package.json"
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    directory = ENVIRONMENTS / "command_lines"
    stamp = directory / ".installed"
    if not stamp.exists() or stamp.read_text() != digest:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        shutil.copy(wanted, directory)
        line = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--no-package-lock"]
        done = subprocess.run(
            line, cwd=directory, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        stamp.write_text(digest)
    return directory / "node_modules" / ".bin"


async def work(program: CommandLine, task: str, *, home: Path, env: Mapping[str, str]) -> str:
    """Start it in an empty directory in its home, and wait. Returns: what it said at its end.

    env: the session's variables: all that it is told beside its own configuration.
    """
    place = home / "work"
    place.mkdir(parents=True)
    file, where = program.config
    (home / where).parent.mkdir(parents=True)
    shutil.copy(EXAMPLES / file, home / where)
    started = await asyncio.create_subprocess_exec(
        str(programs() / program.name),
        *(string.Template(each).substitute(env) for each in program.arguments),
        task,
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **program.env, **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PLAY_S):
            said, told = await started.communicate()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert started.returncode == 0, told.decode()[-3000:]
    return said.decode()
