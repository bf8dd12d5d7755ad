"""Long polls, which clients request by `Prefer: wait=N` (RFC 7240).

While a client waits, the API asks the run again and again, with pauses that grow to one second.
The run answers each of these calls at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Header, Response

MAX_WAIT_S = 60
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_WAIT = re.compile(r'(?:^|[,\s])wait\s*=\s*"?(\d{1,9})"?\s*(?=[,;]|$)', re.IGNORECASE)
Answer = TypeVar("Answer")

Prefer = Annotated[
    str | None,
    Header(
        description=f"`wait=N`: answer when there is news, or after N seconds, {MAX_WAIT_S} at "
        "most; the answer's `Preference-Applied` has the number that was used",
        examples=["wait=1"],
    ),
]


def wait_of(prefer: str | None) -> int:
    """Return the seconds to wait that a `Prefer` header requests, at most MAX_WAIT_S; 0 if none.

    Example: 'respond-async, wait=100' -> 60.
    """
    found = _WAIT.search(prefer or "")
    return min(int(found[1]), MAX_WAIT_S) if found else 0


async def patiently(
    look: Callable[[], Awaitable[Answer]],
    is_enough: Callable[[Answer], bool],
    *,
    prefer: str | None,
    response: Response,
) -> Answer:
    """Call `look` until `is_enough` accepts its answer; return the last answer.

    The wait ends after the time that the header `prefer` requests, at most MAX_WAIT_S. If a time is
    requested, a header of `response` tells the client the limit that was applied.
    """
    wait_s = wait_of(prefer)
    if wait_s:
        response.headers["Preference-Applied"] = f"wait={wait_s}"
    return await look_until(look, is_enough, wait_s=wait_s)


async def look_until(
    look: Callable[[], Awaitable[Answer]],
    is_enough: Callable[[Answer], bool],
    *,
    wait_s: float,
) -> Answer:
    """Call `look` until `is_enough` accepts its answer; return the last answer.

    wait_s: seconds after which the last answer is returned in any case.
    """
    loop = asyncio.get_running_loop()
    deadline_at, pause_s = loop.time() + wait_s, FIRST_PAUSE_S
    while True:
        found = await look()
        left_s = deadline_at - loop.time()
        if is_enough(found) or left_s <= 0:
            return found
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
