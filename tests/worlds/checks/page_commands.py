"""The commands on a page of the documentation, run as a user would type them in a terminal.

They run in a directory that has the paths to which the pages refer: `.venv`, `deploy/configs` and
`docs/examples`. Ctrl-C interrupts a training after a few steps, and a service at the end of the
page, so that every command runs with exactly the settings that the page prints.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from worlds.runs.run_driver import ROOT, START_S

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A block that names such a path begins in the project's directory. Any other block begins in the
# directory in which the previous one ended.
FROM_PROJECT = re.compile(r"(?<![./])\.venv/|cd docs/|deploy/configs/")
# Commands that are not run, with the reason, and with the test that runs the command, if any.
NOT_RUN = {
    r"^make demo": "trains SmolLM2 for minutes: `make proof PART=demo`",
    r"^make test": "the tests themselves",
    r"smollm2": "93 MB from the package index: `make proof PART=demo`",
    r"Qwen/|trl-lib/": "a hub's model or data set, which are downloaded",
}
# Limit from Ctrl-C to the end, in which a checkpoint is written, and Ray and the engines end.
END_S = 180.0
# Limit of the page's client, which submits the tasks of 20 steps.
CLIENT_S = 1800.0


def pages_of_start() -> list[Path]:
    """Return the pages in the first section of the documentation."""
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    names = [name for entry in sections[0]["Start"] for name in entry.values()]
    found = [ROOT / "README.md" if name == "index.md" else ROOT / "docs" / name for name in names]
    return [page for page in found if page.exists()]


def reason_not_to_run(command: str) -> str | None:
    return next((why for words, why in NOT_RUN.items() if re.search(words, command)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The commands of a block, or a file that the page shows."""

    commands: tuple[str, ...] = ()
    begins_in_project: bool = False
    file: str = ""
    content: str = ""


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of commands and the files of a page; a file begins with `# NAME.py`."""
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "console":
            lines = text.replace("\\\n", " ").splitlines()
            commands = tuple(line[2:].strip() for line in lines if line.startswith("$ "))
            yield Block(commands=commands, begins_in_project=bool(FROM_PROJECT.search(text)))
        elif named := re.match(r"# (\S+\.py)\n", text):
            yield Block(file=named[1], content=text)


@contextmanager
def project(directory: Path) -> Iterator[Path]:
    """Fill a directory with the files to which the commands refer, and enter with it."""
    shutil.copytree(ROOT / "docs" / "examples", directory / "docs" / "examples")
    shutil.copytree(ROOT / "deploy" / "configs", directory / "deploy" / "configs")
    (directory / ".venv").symlink_to(sys.prefix)
    yield directory


@dataclass
class Terminal:
    """A shell that keeps its directory and its environment from one command to the next."""

    root: Path
    num_steps: int
    """Steps after which a training is interrupted."""
    directory: Path
    is_activated: bool = False
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    answer: str = ""
    """The output of the last command."""

    def start_block(self, block: Block) -> None:
        """Begin in the project's directory if the block says so; write the file that it shows."""
        if block.begins_in_project:
            self.directory = self.root
        if block.file and not (self.directory / block.file).exists():
            (self.directory / Path(block.file).name).write_text(block.content)

    def type(self, command: str) -> None:
        """Run a command to its end.

        A training is interrupted after some steps. A service is left running once it listens.
        """
        shown = self._filled(command)
        if re.search(r"rayloom (train|serve)\b", shown):
            process, output = self._started(shown)
            is_service = "rayloom serve" in shown
            step = r"\d+" if "--resume" in shown else self.num_steps
            words = r"the API listens on " if is_service else rf"^step +{step}/"
            self._wait(process, output, words)
            if is_service:
                return
            assert self.interrupt(process) == 130, output.read_text()
        else:
            process, output = self._started(shown)
            assert process.wait(timeout=CLIENT_S) == 0, f"{shown}\n{output.read_text()}"
        self.answer = output.read_text()
        # curl also ends with 0 if the service refused the request.
        assert not re.search(r'"status": ?[45]\d\d\b', self.answer), self.answer
        self.directory = Path((self.root / "directory").read_text().strip() or self.directory)

    def interrupt(self, process: subprocess.Popen[bytes]) -> int:
        """Press Ctrl-C. Return the exit code."""
        os.killpg(process.pid, signal.SIGINT)
        return process.wait(timeout=END_S)

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            if process.poll() is None:
                self.interrupt(process)

    def _filled(self, command: str) -> str:
        """Replace the placeholders of a run and of a key by the newest run and the last key."""
        if key := re.findall(r'"reward_key": ?"([^"]+)"', self.answer):
            command = command.replace("rl.reward.…", key[0])
        runs = sorted(self.root.rglob("runs/*/config.yaml"), key=lambda each: each.stat().st_mtime)
        if runs:
            run = str(runs[-1].parent)
            command = re.sub(r"(?<=\s)(runs/(\S*…|NAME)|RUN)(?=\s|$)", run, command)
        return command

    def _started(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command in a shell. Return its process, and the file of its output."""
        activate = f"source {self.root}/.venv/bin/activate; " if self.is_activated else ""
        self.is_activated = self.is_activated or "/activate" in command
        output = self.root / f"output-{time.monotonic_ns()}"
        # A trap stores the directory, so that the exit code is that of the page's command.
        script = f"{activate}trap 'pwd > {self.root}/directory' EXIT\n{command}\n"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=self.directory, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process, output

    def _wait(self, process: subprocess.Popen[bytes], output: Path, words: str) -> None:
        deadline = time.monotonic() + START_S * 3
        while not re.search(words, output.read_text(), re.MULTILINE):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)


def num_steps_of(page: Path) -> int:
    """Return the number of steps that later commands on a page need, at least 2."""
    named = re.findall(r"^\$ .*--step (\d+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return max([2, *map(int, named)])
