"""What a server over stdio writes to its standard error: shown at first, and its end kept.

The end is told where the server is lost, because the protocol says no more than that a connection
was closed. Showing has a limit for the process, because a server may log every call of every
episode into the log of the worker. Used by `mcp_servers`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

SHOWN_BYTES = 1 << 20
"""Of all servers of this process together."""
_KEPT_BYTES = 2048
_CHUNK_BYTES = 1 << 16
# Of a server that writes faster than it is read; the rest waits for the loop's next turn.
_CHUNKS_AT_ONCE = 16
_TOLD_CHARS = 120
_num_shown = 0


class ServerStderr:
    """Of one server, which may be opened several times."""

    def __init__(self) -> None:
        self._end = b""

    @contextmanager
    def opened(self) -> Iterator[TextIO]:
        """The file for a server to write to, read by the event loop until the context ends."""
        self._end = b""
        loop, (reading, writing) = asyncio.get_running_loop(), os.pipe()
        os.set_blocking(reading, False)
        loop.add_reader(reading, self._read, reading)
        try:
            with open(writing, "w") as file:
                yield file
        finally:
            loop.remove_reader(reading)
            self._read(reading)
            os.close(reading)

    def told(self) -> str:
        """Its last lines, for the end of an error's text; empty where it wrote nothing.

        Without the indented ones: a traceback's calls would leave no place for what it says.
        """
        lines = self._end.decode(errors="replace").splitlines()
        words = " | ".join(line for line in lines if line.strip() and not line[0].isspace())
        return f"; the end of its standard error: {words[-_TOLD_CHARS:]}" if words else ""

    def _read(self, reading: int) -> None:
        """What is there."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(reading, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._end = (self._end + chunk)[-_KEPT_BYTES:]
            _show(chunk)


def _show(chunk: bytes) -> None:
    global _num_shown
    if _num_shown >= SHOWN_BYTES:
        return
    _num_shown += len(chunk)
    sys.stderr.write(chunk.decode(errors="replace"))
    if _num_shown >= SHOWN_BYTES:
        print(
            f"\nno more is shown of what MCP servers write to their standard error, after "
            f"{SHOWN_BYTES} bytes; where a server is lost, the end of it is told",
            file=sys.stderr,
        )
    sys.stderr.flush()
