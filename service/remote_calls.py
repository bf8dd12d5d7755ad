"""Call the actors of a run, with one namespace for their names and a deadline for each call."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.deadline import ActorLost, within

SUPERVISOR_DEADLINE_S = 20.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Answer = TypeVar("Answer")


NAMESPACE = "rayloom"


async def await_reply(call: Awaitable[Answer], *, name: str, deadline_s: float) -> Answer:
    """Return the answer of a Ray call; an error of the callee is raised unchanged.

    name: name of the callee in error messages.
    Raises: ActorLost if the actor has died or does not answer in time.
    """
    try:
        return await within(deadline_s, call)
    except RayTaskError as error:
        raise error.cause from error
    except TimeoutError as error:
        raise ActorLost(f"the {name} did not answer within {deadline_s:g} s") from error
    except RayError as error:
        raise ActorLost(f"the {name} died: {reason_of(error)}") from error


def reason_of(error: RayError) -> str:
    """Return the line of the error's text that names the cause.

    This is the last line if the text is a traceback, otherwise the first line.
    """
    lines = [line for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    is_traceback = isinstance(error, RayTaskError) or (
        isinstance(error, RayActorError) and error.actor_init_failed
    )
    return lines[-1 if is_traceback else 0].strip() if lines else type(error).__name__
