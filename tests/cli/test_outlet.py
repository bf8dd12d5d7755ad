"""Tests of output whose reader is gone: the run continues, and the command ends as usual."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
from worlds.builders.record_builders import status_of
from worlds.runs.run_driver import ROOT

from service.cli.display import LineDisplay, LiveDisplay, open_display
from service.cli.outlet import OutletConsole, outlet, say

# Write as `rayloom train` does: a display, then a sentence, then the interpreter's flush.
TALKATIVE = """
import os, sys
sys.path[:0] = ["tests"]
from worlds.builders.record_builders import status_of
from service.cli.display import open_display
from service.cli.outlet import say
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


def test_a_display_survives_the_loss_of_its_reader(closed_pipe: IO[str]) -> None:
    console = OutletConsole(file=closed_pipe, force_terminal=True, width=80, height=24)
    display = LiveDisplay(console)
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
def test_a_command_with_a_closed_output_ends_as_usual(is_stderr_lost: bool) -> None:
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


def latin_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)


def bytes_of(stream: io.TextIOWrapper) -> bytes:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def test_characters_that_an_encoding_lacks_are_shown_as_escapes() -> None:
    stream = latin_stream()
    for words in ("größer …", "and on"):
        with outlet(stream):
            print(words, file=stream)
    assert bytes_of(stream).decode("latin-1") == "größer \\u2026\nand on\n"


def test_lines_reach_a_terminal_that_lacks_their_characters() -> None:
    stream = latin_stream()
    display = LineDisplay(OutletConsole(file=stream))
    display.update(status_of(1, notices=("part … was lost",)))
    display.update(status_of(2, notices=("once more",)))
    written = bytes_of(stream).decode("latin-1")
    assert "warning: part \\u2026 was lost" in written and "warning: once more" in written


def test_a_text_that_cannot_be_encoded_is_not_taken_for_a_closed_terminal() -> None:
    with pytest.raises(UnicodeEncodeError), outlet(None):
        "…".encode("latin-1")


@pytest.mark.parametrize(("encoding", "kind"), [("latin-1", LineDisplay), ("utf-8", LiveDisplay)])
def test_the_live_display_needs_an_encoding_that_has_its_bars(encoding: str, kind: type) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = OutletConsole(file=stream, force_terminal=True, width=80, height=24)
    display = open_display(environ={}, console=console)
    display.close()
    assert type(display) is kind


def test_escape_codes_in_foreign_text_are_not_sent_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("the first line\nsays \x1b[2J", err=True)
    assert capsys.readouterr().err == "the first line\nsays \\x1b[2J\n"
    file = io.StringIO()
    LineDisplay(OutletConsole(file=file)).update(status_of(1, notices=("task \x1b[2J\x07",)))
    assert "warning: task \\x1b[2J\\x07\n" in file.getvalue()
