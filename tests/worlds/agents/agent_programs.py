"""Agents of real frameworks, each installed in its own virtual environment, and how to start them.

An agent is a program of docs/examples/agents, unchanged. It is started with the environment
variables of a session, with arguments and in a directory. Its reward is computed from its output
and from the files that it wrote.
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
# Tests and benchmarks make other environments in the same directory. An environment is kept until
# its pinned versions change.
ENVIRONMENTS = ROOT / "build" / "agents"
INSTALL_S = 900.0
PLAY_S = 300.0
SECRET = 5
HIGHEST = 8
# Variables that agents must not inherit: only the session says which model an agent uses.
_OURS = re.compile(r"OPENAI|ANTHROPIC|RAYLOOM|PYTHON|VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """The command-line arguments and the directory with which an agent gets one task."""

    arguments: tuple[str, ...]
    directory: Path
    """The agent's working directory, which no other agent uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKind:
    """A framework's agent, the game that it plays, and the reward of a game."""

    name: str
    """Name of its file of pinned versions, NAME.txt, in the directory of this module."""
    program: Callable[[Path], Path]
    """Returns the file of the program, given the directory of its virtual environment."""
    modules: tuple[str, ...]
    """Modules that the launcher imports once, so that not each process of the program does; those
    that the program imports late are among them."""
    begin: Callable[[Path, int], Game]
    """Prepares the game with a number in a directory."""
    judge: Callable[[str, Game], float]
    """Returns the reward, given what the agent printed, and its game."""
    learning_rate: float
    """A learning rate so low that the first steps still have the reward of the untrained policy."""


def _ask(directory: Path, number: int) -> Game:
    first, second = number % 9 + 1, number // 9 % 9 + 1
    return Game(arguments=(f"What is {first}+{second}?",), directory=directory)


def _has_calculated(printed: str, game: Game) -> float:
    """Return 1 if the agent calculated something with its tool and then said one number, else 0."""
    *before, last = printed.strip().splitlines() or [""]
    calculated = any(re.fullmatch(r"\d+[-+*]\d+ = -?\d+", line) for line in before)
    return float(calculated and re.fullmatch(r"-?\d+", last) is not None)


def _lay_out(directory: Path, number: int) -> Game:
    """Prepare a directory in which each guess is a command."""
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
    """Return 1 if the agent submitted the right number, else 0."""
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
    """Return the directory of the virtual environment with the versions of NAME.txt.

    The environment is made if it does not exist yet, or if the versions have changed.
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
    """A client of the launcher, which starts agents of one kind; many threads may use it."""

    address: tuple[str, int]

    def play(self, game: Game, env: Mapping[str, str]) -> tuple[str, int]:
        """Start an agent and wait until it ends. Return what it printed, and its exit status."""
        asked = {"env": dict(env), "arguments": game.arguments, "directory": str(game.directory)}
        with socket.create_connection(self.address, timeout=PLAY_S) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            printed = connection.makefile(encoding="utf-8", errors="replace").read()
        text, _, code = printed.rpartition("ended ")
        assert code.strip().isdigit(), f"an agent was killed: {printed[-3000:]}"
        return text, int(code)


@contextmanager
def launching(kind: AgentKind, directory: Path) -> Iterator[Agents]:
    """Run the launcher of a kind of agent, and kill it with all its agents at the end.

    directory: gets the launcher's output and the agents' settings.
    """
    environment = environment_of(kind.name)
    env = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    env.update(
        OMP_NUM_THREADS="1",
        # Without these, mini-swe-agent asks for its first settings, and litellm downloads prices.
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
            # This also ends every agent that still plays.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
