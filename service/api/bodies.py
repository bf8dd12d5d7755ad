"""A memory budget for the bodies of requests, and a check for JSON keys that occur twice.

`service.api.guards` uses this module in the API's replicas, and `service.api.door` uses it in the
HTTP servers of Ray Serve, which receive requests before the replicas.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import sys
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

# A body of more bytes is large: the key is then checked first, and memory is reserved for it.
LARGE_BYTES = 64 << 10
# Limit for the bytes of all large bodies in a process. A single body above the limit is read only
# while no other large body is read.
MAX_BODIES_BYTES = 256 << 20
# After a body of this size, free memory is returned to the system.
_TRIM_BYTES = 1 << 20
_TRIM_EVERY_S = 1.0
# Parse a larger body in a thread: it would delay every other request.
THREAD_BYTES = 1 << 18
# A list of numbers as the value of a key; token columns are almost all of an upload.
_NUMBERS = re.compile(rb":\s*\[[\s\d.,eE+-]*\]")
# Header with which `door` asks, by OPTIONS, whether the body of a request would be read; its value
# is that request's method. The answer, 204 or a refusal, has the header too.
ASKS_HEADER = "x-rayloom-asks"


def asked_method(scope: Scope) -> str:
    """Return the method of the request that `service.api.door` asks about; otherwise "".

    Before `door` reads a large body, it asks whether the API would accept the request. It sends
    OPTIONS with the request's headers, and appends ASKS_HEADER with the request's method.

    A client can send ASKS_HEADER too, but only learns whether a request would be accepted. If there
    are several values, the last one counts, because `door` appends its value. Without OPTIONS,
    ASKS_HEADER has no effect.
    """
    values = Headers(scope=scope).getlist(ASKS_HEADER)
    return values[-1] if values and scope["method"] == "OPTIONS" else ""


class BodyRoom:
    """A memory budget, from which each large request body reserves its size.

    If the budget is used up, later requests wait in order. An object belongs to one event loop.
    """

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.max_bytes = max_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._trimming: asyncio.TimerHandle | None = None
        self.num_bytes = 0
        """Number of reserved bytes."""

    async def take(self, num_bytes: int, *, limit_s: float) -> bool:
        """Reserve memory for a body, waiting if necessary; return False if limit_s passes first."""
        try:
            async with asyncio.timeout(limit_s), self._turn:
                while self.num_bytes and self.num_bytes + num_bytes > self.max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self.num_bytes += num_bytes
                return True
        except TimeoutError:
            return False

    def give_back(self, num_bytes: int) -> None:
        """Release the memory of a body; after a large one, return free memory to the system."""
        self.num_bytes -= num_bytes
        self._freed.set()
        if num_bytes >= _TRIM_BYTES and self._trimming is None:
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(_TRIM_EVERY_S, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._trimming = None
        # In a thread: it walks through all of the process's free memory.
        loop.run_in_executor(None, give_back_memory)


def give_back_memory() -> None:
    """Return the process's free memory to the system.

    glibc would keep free pages that are between used blocks.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def announced_bytes(headers: Headers) -> int | None:
    """Return the length of a body, as the request's headers state it; None if not stated."""
    if "transfer-encoding" in headers:
        return None
    announced = headers.get("content-length", "0")
    # A length with more digits is too large in any case.
    return int(announced[:20]) if announced.isdecimal() else None


def is_large(num_bytes: int | None) -> bool:
    """Return whether memory must be reserved for a body before the body is read.

    num_bytes: length of the body. If it is None, the length is not known, and memory must be
    reserved too.
    """
    return num_bytes is None or num_bytes > LARGE_BYTES


class _Repeated(Exception):
    """A JSON object has the same key twice; the exception's argument is the key."""


def repeated_key(body: bytes) -> str | None:
    """Return a key that a JSON object in the body has twice; None if every key is unique.

    JSON parsers take the last of two equal keys silently. Return None for a body that is not JSON.
    """
    # First without the numbers, which takes a tenth of the time. The text of a key may look like
    # numbers too, so that only the whole body decides.
    for text in (_NUMBERS.sub(b":[]", body), body):
        try:
            json.loads(text, object_pairs_hook=_check_pairs)
            return None
        except _Repeated as repeated:
            found = str(repeated)
        except (ValueError, RecursionError):
            return None
    return found


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise _Repeated(next(name for name in names if names.count(name) > 1))
