"""A display whose reader is gone: the run goes on, and nothing is said of it at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
from run_driver import ROOT
from test_progress import status_of

from service.display.outlet import OutletConsole
from service.display.progress import LineDisplay, LiveDisplay

# As `rayloom train` writes: a display, then a sentence, then the interpreter's own flush.
TALKATIVE = """
import os, sys
sys.path.insert(0, "tests")
from test_progress import status_of
from service.display.outlet import say
from service.display.progress import open_display
display = open_display(environ={})
for step in range(1, 5):
    display.update(status_of(step))
    sys.stdin.readline()
display.close()
say("all steps are done")
say("and something went wrong", err=True)
sys.exit(3)
"""


@pytest.fixture
def closed_pipe() -> Iterator[IO[str]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        os.close(reading)
        yield file


def leads_nowhere(stream: IO[str]) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "lines"])
def test_a_display_survives_the_loss_of_its_reader(closed_pipe: IO[str], is_live: bool) -> None:
    console = OutletConsole(file=closed_pipe, force_terminal=is_live, width=80, height=24)
    display = LiveDisplay(console) if is_live else LineDisplay(console)
    for step in range(1, 4):
        display.update(status_of(step, notices=("a part was lost",)))
    display.close()
    assert leads_nowhere(closed_pipe)


def test_a_display_survives_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        display = LineDisplay(OutletConsole(file=full))
        for step in range(1, 4):
            display.update(status_of(step))
        display.close()
        assert leads_nowhere(full)


@pytest.mark.parametrize("is_stderr_lost", [False, True], ids=["stdout", "both"])
def test_a_command_whose_output_is_cut_off_ends_as_if_it_were_not(is_stderr_lost: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKATIVE],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "training\n"
        process.stdout.close()
        if is_stderr_lost:
            process.stderr.close()
        process.stdin.close()
        told = "" if is_stderr_lost else process.stderr.read()
        assert process.wait(timeout=60) == 3
    assert told == ("" if is_stderr_lost else "and something went wrong\n")
