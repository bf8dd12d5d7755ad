"""The engine as the gateway asks it: one reply that fits its request, or why there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyClient,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
    UnusableReply,
    check_reply,
)
from actors.types import FinishReason, Turn
from service.gateway.chat import RefusalCode, Refused, unavailable

log = logging.getLogger("rayloom.gateway")


class Engine:
    """Belongs to one event loop."""

    def __init__(self, make_policy: Callable[[], PolicyClient]) -> None:
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None

    async def sample(self, request: GenerateRequest, *, param: str) -> tuple[Turn, GenerateReply]:
        """Sample; while no engine is there, wait until the request's deadline.

        param: the part of the client's body that the prompt is made of. Raises: Refused.
        """
        try:
            # Made within the event loop that uses it.
            self._policy = self._policy or self._make_policy()
            reply = await self._policy.generate(request)
            turn = check_reply(request, reply)
        except ValueError as error:
            raise Refused(RefusalCode.INVALID_REQUEST, str(error), param=param) from error
        except UnusableReply as error:
            log.warning("a reply of the engine cannot be used: %s", error)
            raise unavailable(
                f"the engine's reply cannot be used ({error}); send the request again"
            ) from error
        except (PolicyUnavailable, PolicyDeadlineExceeded) as error:
            raise unavailable(
                f"no engine answered in time ({error}); send the request again"
            ) from error
        if turn.finish_reason is FinishReason.ABORT:
            raise unavailable("the engine gave the turn up; send the request again")
        return turn, reply
