"""Writing to a terminal that may be gone: losing it never ends a run.

A closed pipe, a closed terminal, a full disk behind a redirection: from the first failed write on
the stream leads to /dev/null, so that neither later writes nor the interpreter's own flush at its
end fail again. The run's log has it all. A character that the stream's encoding lacks is no such
loss: it is shown as an escape.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import typer
from rich.console import Console

from service.visible import visible_lines

# Of a stream that was closed by this process; io.UnsupportedOperation is one too.
LOST = (OSError, ValueError)
ESCAPED = "backslashreplace"


class OutletConsole(Console):
    """rich's console, but a broken pipe is an error like any other, not the end of the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the display has closed it")


def say(text: str, *, err: bool = False) -> None:
    """Print lines for the user, control characters as escapes; dropped where the stream is gone."""
    with outlet(sys.__stderr__ if err else sys.__stdout__):
        typer.echo(visible_lines(text), err=err)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    say(f"rayloom: warning: {text}", err=True)


def escape_unencodable(stream: IO[str] | None) -> None:
    """From here on, show as an escape what the stream's encoding lacks.

    Example: on a Latin-1 stdout print("…") writes \\u2026.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors != ESCAPED:
        with suppress(*LOST):
            stream.reconfigure(errors=ESCAPED)


@contextmanager
def outlet(stream: IO[str] | None) -> Iterator[None]:
    """Write to `stream` within; once that fails, whatever it still holds or is given is dropped."""
    escape_unencodable(stream)
    try:
        yield
    except UnicodeError:
        # A ValueError too, and nothing that a terminal does.
        raise
    except LOST:
        if stream is not None:
            _silence(stream)


def _silence(stream: IO[str]) -> None:
    # A stream without a file, or with a closed one, has nothing to flush.
    with suppress(*LOST):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
