"""Words to the terminal that may be gone: losing it never ends a run.

A closed pipe, a terminal that was hung up, a full disk behind a redirection: from the first failed
write on the stream leads nowhere, so that neither later words nor the interpreter's own flush at
its end fail again. What a run has to say is in its log too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import typer
from rich.console import Console

# Of a stream that was closed by this process; io.UnsupportedOperation is one too.
LOST = (OSError, ValueError)


class OutletConsole(Console):
    """rich's console, but a broken pipe is an error like any other, not the end of the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the display has closed it")


def say(text: str, *, err: bool = False) -> None:
    """Print a line for the user; what cannot be printed is dropped."""
    with outlet(sys.__stderr__ if err else sys.__stdout__):
        typer.echo(text, err=err)


@contextmanager
def outlet(stream: IO[str] | None) -> Iterator[None]:
    """Write to `stream` within; once that fails, whatever it still holds or is given is dropped."""
    try:
        yield
    except LOST:
        if stream is not None:
            _silence(stream)


def _silence(stream: IO[str]) -> None:
    # No file behind it, or none any more: then there is nothing to flush either.
    with suppress(*LOST):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
