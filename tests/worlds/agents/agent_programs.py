"""Real frameworks' agents, each in an environment of its own, and who plays sessions with them.

An agent is a program of docs/examples/agents, unchanged. It is started with a session's variables,
its arguments and a directory; its reward is computed from what it printed and wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from worlds.runs.run_driver import ROOT

EXAMPLES = ROOT / "docs" / "examples" / "agents"
HERE = Path(__file__).parent
# Beside other environments that tests and benchmarks make; kept as long as the versions are.
ENVIRONMENTS = ROOT / "build" / "agents"
INSTALL_S = 900.0
PLAY_S = 300.0
SECRET = 5
HIGHEST = 8
# What no program of ours may find in its environment: its model is named by the session alone.
_OURS = re.compile(r"OPENAI|ANTHROPIC|RAYLOOM|PYTHON|VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One task, as it is given to an agent."""

    arguments: tuple[str, ...]
    directory: Path
    """Where the agent is started; its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKind:
    """A framework's agent, and what it plays."""

    name: str
    """Of its file of pinned versions, beside the launcher."""
    program: Callable[[Path], Path]
    """In the environment with this directory."""
    modules: tuple[str, ...]
    """What the program imports, also late, for the launcher: else each process does."""
    begin: Callable[[Path, int], Game]
    """Lay out the game with a number in a directory."""
    judge: Callable[[str, Game], float]
    """The reward, from what the agent printed and wrote."""
    learning_rate: float
    """With which the first steps still show where it began."""


def _ask(directory: Path, number: int) -> Game:
    first, second = number % 9 + 1, number // 9 % 9 + 1
    return Game(arguments=(f"What is {first}+{second}?",), directory=directory)


def _has_calculated(printed: str, game: Game) -> float:
    """1 for an agent that calculated something with its tool, and then said one number."""
    *before, last = printed.strip().splitlines() or [""]
    calculated = any(re.fullmatch(r"\d+[-+*]\d+ = -?\d+", line) for line in before)
    return float(calculated and re.fullmatch(r"-?\d+", last) is not None)


def _lay_out(directory: Path, number: int) -> Game:
    """A directory whose commands are the guesses."""
    commands = directory / "commands"
    commands.mkdir()
    guess = EXAMPLES / "guess.sh"
    for each in range(1, HIGHEST + 1):
        (commands / str(each)).symlink_to(guess)
    (directory / "number").write_text(str(SECRET))
    task = f"Guess my number from 1 to {HIGHEST}. You have 2 guesses."
    config = str(EXAMPLES / "mini_swe_agent_guessing.yaml")
    return Game(arguments=("-c", config, "-t", task, "-o", "played.json"), directory=directory)


def _has_submitted(printed: str, game: Game) -> float:
    """1 for the number."""
    played = json.loads((game.directory / "played.json").read_text())
    return float(played["info"]["submission"].strip() == str(SECRET))


KINDS = {
    kind.name: kind
    for kind in (
        AgentKind(
            name="langgraph",
            program=lambda _: EXAMPLES / "langgraph_calculator.py",
            modules=(
                "langchain_core.tools",
                "langchain_openai",
                "langgraph.prebuilt",
                "openai.resources",
                "httpcore2",
                "truststore",
            ),
            begin=_ask,
            judge=_has_calculated,
            learning_rate=1.5e-4,
        ),
        AgentKind(
            name="openai_agents",
            program=lambda _: EXAMPLES / "openai_agents_calculator.py",
            modules=(
                "agents",
                "openai.resources.responses",
                "anyio._backends._asyncio",
                "httpcore2",
                "truststore",
            ),
            begin=_ask,
            judge=_has_calculated,
            learning_rate=1.5e-4,
        ),
        AgentKind(
            name="mini_swe_agent",
            program=lambda environment: environment / "bin" / "mini",
            modules=(
                "minisweagent.run.mini",
                "minisweagent.models.litellm_textbased_model",
                "minisweagent.environments.local",
                "litellm._service_logger",
                "litellm.proxy.openai_files_endpoints.common_utils",
                "httpcore",
                "h2.connection",
            ),
            begin=_lay_out,
            judge=_has_submitted,
            learning_rate=6e-5,
        ),
    )
}


def environment_of(name: str) -> Path:
    """The environment with the versions of NAME.txt, made where it is not there yet.

    Returns: its directory.
    """
    requirements = HERE / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    directory = ENVIRONMENTS / name
    stamp = directory / ".installed"
    if stamp.exists() and stamp.read_text() == digest:
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements))
    for line in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(directory / "bin" / "python"), *install],
    ):
        done = subprocess.run(line, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    stamp.write_text(digest)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Starts agents of one kind; may be used by many threads."""

    address: tuple[str, int]

    def play(self, game: Game, env: Mapping[str, str]) -> tuple[str, int]:
        """Start an agent and wait for its end. Returns: what it printed, and its exit status."""
        asked = {"env": dict(env), "arguments": game.arguments, "directory": str(game.directory)}
        with socket.create_connection(self.address, timeout=PLAY_S) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            printed = connection.makefile(encoding="utf-8", errors="replace").read()
        text, _, code = printed.rpartition("ended ")
        assert code.strip().isdigit(), f"an agent was killed: {printed[-3000:]}"
        return text, int(code)


@contextmanager
def launching(kind: AgentKind, directory: Path) -> Iterator[Agents]:
    """directory: where the launcher's own output goes, and the agents' settings."""
    environment = environment_of(kind.name)
    env = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    env.update(
        OMP_NUM_THREADS="1",
        # Of mini-swe-agent: it asks for its first settings, and litellm for prices.
        MSWEA_CONFIGURED="true",
        MSWEA_GLOBAL_CONFIG_DIR=str(directory),
        MSWEA_SILENT_STARTUP="1",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        number = server.fileno()
        program = str(kind.program(environment))
        python = str(environment / "bin" / "python")
        line: Sequence[str] = [
            python, str(HERE / "launcher.py"), str(number), program, *kind.modules
        ]  # fmt: skip
        with (directory / "launcher.out").open("w") as output:
            process = subprocess.Popen(
                line, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=directory,
                pass_fds=[number], start_new_session=True,
            )  # fmt: skip
        try:
            yield Agents(address=server.getsockname())
        finally:
            # With every agent that still plays.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
