"""Write to a terminal so that the loss of the terminal never ends a run.

A write fails if the terminal or pipe is closed, or if the disk of the output's file is full. Then
the stream is redirected to /dev/null, and only the run's log gets the rest. Standard error reports
a failure of standard output, except a closed pipe. A character that the encoding lacks is written
as an escape. This module imports no large package, so that the first line is printed early.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn, TypeGuard

import typer
from rich.console import Console

from service.units import visible_lines

# ValueError: the stream was closed by this process; io.UnsupportedOperation is one too.
LOST = (OSError, ValueError)
ESCAPED = "backslashreplace"
ENDING_LIMIT_S = 2.0
EXIT_CUT_OFF = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE = "; expected a disk with free space; free space, or choose another file"
# Errors of failed writes to standard output: at most one, because later writes do not fail.
_failures: list[Exception] = []


class OutletConsole(Console):
    """A rich console for which a broken pipe raises an error instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the display has closed it")


def say(text: str, *, err: bool = False) -> None:
    """Print lines, with control characters escaped. Print nothing if the stream is gone."""
    with outlet(sys.__stderr__ if err else sys.__stdout__):
        typer.echo(visible_lines(text), err=err)


def put(text: str) -> None:
    """Print a command's result to standard output without escapes."""
    with outlet(sys.__stdout__):
        typer.echo(text)


def is_output_lost() -> bool:
    """Return whether any text for standard output was lost, for example in a closed pipe."""
    return sys.__stdout__ is None or bool(_failures)


def code_after(code: int) -> int:
    """Return the exit code of a command that prints its result: 1 instead of 0 if printing failed.

    Any other `code` is returned unchanged. Printing fails if, for example, the output goes to a
    file on a full disk. A closed pipe is not a failure: the pipe's reader, such as `head`, wants no
    more lines.
    """
    return code or (EXIT_CUT_OFF if any(map(_is_cut_off, _failures)) else 0)


def _is_cut_off(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and not isinstance(error, BrokenPipeError | ValueError)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    say(f"rayloom: warning: {text}", err=True)


def escape_unencodable(stream: IO[str] | None) -> None:
    """Make a stream write an escape for each character that its encoding lacks.

    Example: on a Latin-1 stdout, an ellipsis becomes a backslash and u2026.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors != ESCAPED:
        with suppress(*LOST):
            stream.reconfigure(errors=ESCAPED)


@contextmanager
def outlet(stream: IO[str] | None) -> Iterator[None]:
    """Guard a block that writes to `stream`.

    If a write fails because the stream is lost, leave the block without an error. Drop the output
    that is still buffered, and all later output to the stream.
    """
    escape_unencodable(stream)
    try:
        yield
    except UnicodeError:
        # A UnicodeError is a ValueError, but not a failure of the stream.
        raise
    except LOST as error:
        if stream is not None:
            _silence(stream)
        if stream is sys.__stdout__:
            _failures.append(error)
            if _is_cut_off(error):
                say(
                    f"rayloom: standard output cannot be written ({error.strerror or error}), so "
                    f"that it is not complete{_NO_SPACE if error.errno in _FULL else ''}",
                    err=True,
                )


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for threads that the user's code has started."""
    for stream in (sys.stdout, sys.stderr):
        with outlet(stream):
            stream.flush()
    os._exit(code)


def bound_ending(code: int) -> None:
    """End the process with `code` after ENDING_LIMIT_S if a thread still keeps it alive.

    Python waits at its end for every thread that is not a daemon. The user's code may have started
    a thread that never ends.
    """
    threading.Thread(target=_end_late, args=(code,), name="ending", daemon=True).start()


def _end_late(code: int) -> None:
    time.sleep(ENDING_LIMIT_S)
    main = threading.main_thread()
    if left := [each for each in threading.enumerate() if not each.daemon and each is not main]:
        names = ", ".join(sorted({each.name for each in left}))
        warn(
            f"the threads {names} are still running and end with this command; start your "
            "threads with daemon=True"
        )
        leave(code)


def _silence(stream: IO[str]) -> None:
    # A stream without a file, or with a closed one, has nothing to flush.
    with suppress(*LOST):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


# These are plain lines, so that terminals, notebooks and CI logs show the same text.
class Stages:
    """Prints the stages of a start one after another.

    Example: Stages("reading CONFIG") prints "rayloom: reading CONFIG", then `next("loading")`
    prints "reading CONFIG: 0.3 s; next: loading".
    """

    def __init__(
        self,
        first: str,
        *,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._clock = tell, clock
        self._name, self._since = first, clock()
        tell(f"rayloom: {first}")

    def next(self, name: str) -> None:
        """Print the current stage's duration, and begin the stage `name`."""
        self._tell(f"{self._ended()}; next: {name}")
        self._name, self._since = name, self._clock()

    def ended(self, name: str, seconds: float) -> None:
        """Print the duration of a stage that ran concurrently with the current stage."""
        self._tell(f"{name}: {seconds:.1f} s")

    def end(self) -> None:
        """Print the duration of the last stage."""
        self._tell(self._ended())

    def _ended(self) -> str:
        return f"{self._name}: {self._clock() - self._since:.1f} s"
