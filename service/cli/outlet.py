"""Write to a terminal so that the loss of the terminal never ends a run.

The terminal or pipe may be closed, or the disk of a redirection full. After the first failed write
the stream is redirected to /dev/null, so that neither later writes nor the interpreter's flush at
exit fail again. The run's log keeps everything. A character that the stream's encoding
lacks is written as an escape, which is not a failure.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn

import typer
from rich.console import Console

from service.visible import visible_lines

# ValueError: the stream was closed by this process; io.UnsupportedOperation is one too.
LOST = (OSError, ValueError)
ESCAPED = "backslashreplace"
ENDING_LIMIT_S = 2.0


class OutletConsole(Console):
    """A rich console for which a broken pipe raises an error instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the display has closed it")


def say(text: str, *, err: bool = False) -> None:
    """Print lines for the user with control characters escaped; drop them if the stream is gone."""
    with outlet(sys.__stderr__ if err else sys.__stdout__):
        typer.echo(visible_lines(text), err=err)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    say(f"rayloom: warning: {text}", err=True)


def escape_unencodable(stream: IO[str] | None) -> None:
    """Make a stream write characters that its encoding lacks as escapes.

    Example: on a Latin-1 stdout print("…") writes \u2026.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors != ESCAPED:
        with suppress(*LOST):
            stream.reconfigure(errors=ESCAPED)


@contextmanager
def outlet(stream: IO[str] | None) -> Iterator[None]:
    """Guard writes to `stream` in the block; after a failure, drop buffered and later output."""
    escape_unencodable(stream)
    try:
        yield
    except UnicodeError:
        # A UnicodeError is a ValueError, but not a failure of the stream.
        raise
    except LOST:
        if stream is not None:
            _silence(stream)


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for threads that the user's code has started."""
    for stream in (sys.stdout, sys.stderr):
        with outlet(stream):
            stream.flush()
    os._exit(code)


def bound_ending(code: int) -> None:
    """End the process with `code` if its threads have not ended ENDING_LIMIT_S after this call.

    The interpreter waits for every thread that is not a daemon, and a module of the user may have
    started a thread that never ends.
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
