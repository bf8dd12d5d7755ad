"""Tests of output whose reader is gone: the run continues, and the command ends as usual."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.record_builders import status_of
from worlds.runs.run_driver import ROOT

from service.cli.display import LineDisplay, LiveDisplay, open_display
from service.cli.outlet import OutletConsole, outlet, say
from service.store.run_store import RunStore

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


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "; expected a disk with free space; free space, or choose another file"),
        (errno.EDQUOT, "; expected a disk with free space; free space, or choose another file"),
        (errno.EIO, ""),
    ],
)
def test_only_a_full_disk_is_said_to_need_space(
    closed_pipe: IO[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    advice: str,
) -> None:
    monkeypatch.setattr(sys, "__stdout__", closed_pipe)
    monkeypatch.setattr("service.cli.outlet._failures", [])
    with outlet(closed_pipe):
        raise OSError(code, os.strerror(code))
    words = f"standard output cannot be written ({os.strerror(code)}), so that it is not complete"
    assert capsys.readouterr().err == f"rayloom: {words}{advice}\n"


@pytest.mark.parametrize("line", [("--help",), ("train", "--help")], ids=" ".join)
def test_a_help_page_ends_as_usual_without_its_reader(
    closed_pipe: IO[str], line: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *line],
        cwd=ROOT, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_of_a_run_s_command_fails_on_a_full_disk() -> None:
    done = with_full_disk("-m", "service.cli.main", "train", "--help")
    assert done.returncode == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr


# A command that ends well after a line.
ENDS_WELL = """
import sys
from service.cli import main, outlet
sys.argv = ["rayloom", sys.argv[1]]
main.app = lambda: (outlet.say("done"), sys.exit(0))
main.main()
"""


def with_full_disk(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with standard output on a full disk."""
    with open("/dev/full", "w") as full:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.mark.proof
@pytest.mark.slow
def test_a_full_disk_is_an_error_of_each_command_but_not_of_a_run(tmp_path: Path) -> None:
    run = written(tmp_path / "run", step_of([group_of(0, [1, 0])]))
    example = "docs/examples/numbers"
    rewards = ("--dataset", f"{example}/after.jsonl", "--reward", f"{example}/my.py:score")
    lines = {
        ("keys", "--help"): 1,
        ("stop", "--help"): 1,
        ("inspect", str(run)): 1,
        ("inspect", str(run), "g000000.0-0.a0"): 1,
        ("try", *rewards, "--answer", "answer"): 1,
        ("train", "nofile.yaml"): 2,
    }
    program = ("-m", "service.cli.main")
    done = {line: (code, with_full_disk(*program, *line)) for line, code in lines.items()}
    done[("a run",)] = 0, with_full_disk("-c", ENDS_WELL, "train")
    warning = "rayloom: standard output cannot be written (No space left on device), so that it"
    for line, (code, answer) in done.items():
        assert answer.returncode == code, (line, answer.stderr)
        assert answer.stderr.count(warning) == 1, (line, answer.stderr)
        assert len(answer.stderr.splitlines()) == max(code, 1), (line, answer.stderr)


@pytest.mark.parametrize("is_closed", [False, True], ids=["full-disk", "closed-pipe"])
def test_a_key_that_cannot_be_printed_is_named(
    tmp_path: Path, closed_pipe: IO[str], is_closed: bool
) -> None:
    RunStore(f"sqlite:///{tmp_path / 'rayloom.db'}").close()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "service.cli.main",
             "keys", "create", str(tmp_path), "ci", "--tenant", "a"],
            cwd=ROOT, stdout=closed_pipe if is_closed else full, stderr=subprocess.PIPE, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the key 'ci' was created, but could not be printed; revoke it with" in done.stderr
    assert f"`rayloom keys revoke {tmp_path} ci`" in done.stderr
