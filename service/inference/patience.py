"""A request that no engine could answer is asked again, a little later, within its own deadline.

Safe to ask again: of what an engine sampled before it died nothing was returned, and the request is
the same token ids. Without the wait an engine's absence would end attempts as fast as they can be
made. Pure but for the clock; used by the client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.policy import PolicyDeadlineExceeded, PolicyUnavailable

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0

Answered = TypeVar("Answered")


async def until_available(
    attempt: Callable[[], Awaitable[Answered]], *, deadline_s: float, margin_s: float = 0.0
) -> Answered:
    """Attempt until an engine answers, with doubling pauses; for deadline_s and no longer.

    margin_s: how much longer an attempt may take to say that the deadline has passed.
    Raises: PolicyUnavailable when no engine was there until the deadline, or when one was lost on
        the way and the rest of the time was not enough; PolicyDeadlineExceeded when an engine was
        there all the time; what else an attempt raises, at once.
    """
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + deadline_s
    delay_s = FIRST_DELAY_S
    lost: PolicyUnavailable | None = None
    try:
        async with asyncio.timeout(deadline_s + margin_s):
            while True:
                try:
                    return await attempt()
                except PolicyUnavailable as error:
                    lost = error
                # All that were waiting for one engine would come back in the same moment.
                pause_s = random.uniform(0.5, 1.0) * delay_s
                if loop.time() + pause_s >= deadline_at:
                    await asyncio.sleep(max(deadline_at - loop.time(), 0.0))
                    raise TimeoutError
                await asyncio.sleep(pause_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
    except (TimeoutError, PolicyDeadlineExceeded) as error:
        if lost is not None:
            raise PolicyUnavailable(
                f"inference: no engine answered within {deadline_s:.3g} s; at last: {lost}"
            ) from error
        if isinstance(error, PolicyDeadlineExceeded):
            raise
        raise PolicyDeadlineExceeded(f"inference: no answer within {deadline_s:.3g} s") from error
