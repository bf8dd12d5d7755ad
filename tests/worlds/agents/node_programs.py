"""Programs of agents from npm and PyPI, in pinned versions, and how each learns of its model."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from worlds.agents.agent_programs import ENVIRONMENTS, EXAMPLES, HERE, INSTALL_S, environment_of
from worlds.checks.missing_tools import skip_or_fail

PLAY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program that takes one task on its command line and works on it in its directory."""

    name: str
    """Name of the command of an npm package, or of a script that uses a framework of npm (.mjs) or
    of PyPI (.py)."""
    arguments: tuple[str, ...]
    """Arguments before the task; $OPENAI_BASE_URL is replaced by its value, as in a shell."""
    config: tuple[str, str] | None = None
    """A file of docs/examples/agents, and the path in the home directory at which the program reads
    it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The program's own settings, as environment variables."""
    environment: str = "frameworks"
    """Name of the virtual environment of a script that uses a framework of PyPI."""


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
)
OPENCODE = CommandLine(
    name="opencode",
    arguments=("run",),
    config=("opencode.json", ".config/opencode/opencode.json"),
    # Otherwise it would ask a server for a list of models.
    env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
CLAUDE_CODE = CommandLine(
    name="claude",
    arguments=("--model", "policy", "--dangerously-skip-permissions", "-p"),
    # Without IS_SANDBOX, Claude Code refuses to skip permissions as root.
    env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
)
QWEN_CODE = CommandLine(
    name="qwen",
    arguments=("--auth-type", "openai", "--model", "policy", "--yolo", "-p"),
)
# LiteLLM would download prices.
_NO_PRICES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
FRAMEWORKS = (
    *(
        CommandLine(name=name, arguments=())
        for name in (
            "ai_sdk.mjs",
            "langgraph_react.py",
            "openai_agents.mjs",
            "openai_agents_typed.py",
            "pydantic_ai_chat.py",
            "pydantic_ai_tools.py",
            "smolagents_code.py",
            "smolagents_tools.py",
        )
    ),
    # Each of these has an environment of its own: some need versions that others exclude.
    *(
        CommandLine(name=name, arguments=(), env=env, environment=environment)
        for name, environment, env in (
            ("agno_tools.py", "agno", {"AGNO_TELEMETRY": "false"}),
            ("crewai_text.py", "crewai", {"CREWAI_DISABLE_TELEMETRY": "true", **_NO_PRICES}),
            ("crewai_tools.py", "crewai", {"CREWAI_DISABLE_TELEMETRY": "true"}),
            ("dspy_react.py", "dspy", _NO_PRICES),
            ("google_adk_handoff.py", "google_adk", _NO_PRICES),
            ("haystack_tools.py", "haystack", {"HAYSTACK_TELEMETRY_ENABLED": "False"}),
            ("llama_index_function.py", "llama_index", {}),
            ("semantic_kernel_named.py", "semantic_kernel", {}),
            ("strands_tools.py", "strands", {}),
        )
    ),
)


def line_of(program: CommandLine) -> tuple[str, ...]:
    """Install a program and return the command that starts it; skip the test if npm is missing."""
    if program.name.endswith(".py"):
        python = environment_of(program.environment) / "bin" / "python"
        return str(python), str(HERE / "frameworks" / program.name)
    directory = programs()
    if program.name.endswith(".mjs"):
        # Node looks for imported packages in the directory of the script.
        script = shutil.copy(HERE / "command_lines" / program.name, directory)
        return "node", str(script)
    return (str(directory / "node_modules" / ".bin" / program.name),)


def programs() -> Path:
    """Return the directory with the installed npm packages; skip the test if npm is missing."""
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
    return directory


async def work(program: CommandLine, task: str, *, home: Path, env: Mapping[str, str]) -> str:
    """Start a program in an empty directory in its home, and wait. Return what it printed.

    env: the variables of the session, all that the program gets beside its own configuration.
    """
    place = home / "work"
    place.mkdir(parents=True)
    if program.config is not None:
        file, where = program.config
        (home / where).parent.mkdir(parents=True)
        shutil.copy(EXAMPLES / file, home / where)
    started = await asyncio.create_subprocess_exec(
        *line_of(program),
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
            output, errors = await started.communicate()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert started.returncode == 0, errors.decode()[-3000:]
    return output.decode()
