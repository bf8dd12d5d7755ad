"""The client with which the API's replicas call the methods of the gateway actor.

The replicas get the gateway's handle from the supervisor. The calls are the methods of `Sessions`
and `Uploads`; each may also raise RunUnavailable. If the gateway dies, a request for a turn is sent
to the next gateway, with the same id, until the request's time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from actors.deadline import ActorLost, TaskSet, retry
from actors.environment.policy import GenerateReply, GenerateRequest
from service.api.problems import RunUnavailable
from service.gateway.chat import ChatCall, ChatReply, Refused, unavailable
from service.remote_calls import SUPERVISOR_DEADLINE_S, await_reply
from service.store.errors import LeaseLost, StoreError

if TYPE_CHECKING:
    # Their modules need a tokenizer, which a replica of the API does not load.
    from service.gateway.sessions import Sessions
    from service.gateway.uploads import Uploads

# The gateway ends a request at its deadline; the client waits this many seconds longer.
ANSWER_MARGIN_S = 2.0
AGAIN_S = 0.5
# Seconds in which to find a gateway and report to it that a client has gone.
ABANDON_S = 300.0
Answer = TypeVar("Answer")


class GatewayClient:
    """A client of the run's gateway, for any process.

    `sessions` and `uploads` have the methods of `Sessions` and `Uploads`.
    """

    def __init__(self, find_gateway: Callable[[], Awaitable[Any]]) -> None:
        """Make a client. `find_gateway` returns the gateway's handle, or raises RunUnavailable."""
        self._find_gateway = find_gateway
        self._actor: Any = None
        self.sessions = cast("Sessions", _RemoteSessions(self))
        self.uploads = cast("Uploads", _RemoteUploads(self))

    async def ask(
        self,
        part: str,
        method: str,
        *arguments: Any,
        deadline_s: float = SUPERVISOR_DEADLINE_S,
        **named: Any,
    ) -> Any:
        """Call a method of the gateway once. part: "sessions" or "uploads".

        Raises: Refused, if the method raised it; RunUnavailable if the gateway does not answer.
        """
        call = (await self._find()).ask.remote(part, method, *arguments, **named)
        try:
            answer = await await_reply(call, name="gateway", deadline_s=deadline_s)
        except (ActorLost, LeaseLost, StoreError) as error:
            # The gateway is gone, or can store nothing any more and will end.
            self._actor = None
            raise RunUnavailable(str(error)) from error
        if isinstance(answer, Refused):
            raise answer
        return answer

    async def until_answered(
        self, ask: Callable[[float], Awaitable[Answer]], *, deadline_s: float
    ) -> Answer:
        """Send a request, and return the answer. Raises: Refused.

        If the gateway dies, send the request again to the next gateway, until the deadline.

        Args: ask: sends the request once; its argument is the number of seconds that remain.
        """
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + deadline_s
        while True:
            try:
                await self._find()
                return await ask(max(deadline_at - loop.time(), 0.0))
            except RunUnavailable as error:
                if loop.time() + AGAIN_S >= deadline_at:
                    raise unavailable(f"{error}; send the request again") from error
                await asyncio.sleep(AGAIN_S)

    async def _find(self) -> Any:
        if self._actor is None:
            self._actor = await self._find_gateway()
        return self._actor


class _RemoteSessions:
    """The gateway's `Sessions`, called remotely under the same method names.

    A method that is defined here is tried again if the gateway dies; any other is tried once.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._abandoning = TaskSet()

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._gateway.ask, "sessions", method)

    async def chat(self, call: ChatCall) -> ChatReply:
        was_asked = is_answered = False

        async def ask(left_s: float) -> ChatReply:
            nonlocal was_asked
            was_asked = True
            given, limit_s = replace(call, deadline_s=left_s), left_s + ANSWER_MARGIN_S
            reply: ChatReply = await self._gateway.ask(
                "sessions", "chat", given, deadline_s=limit_s
            )
            return reply

        try:
            answer = await self._gateway.until_answered(ask, deadline_s=call.deadline_s)
            is_answered = True
            return answer
        finally:
            # Do this even if a gateway died meanwhile, because it may have stored the turn as seen.
            if was_asked and not is_answered:
                await self.abandon(call.session_id, call.request_id)

    async def check_key(self, session_id: str, key_digest: str) -> None:
        await self._gateway.until_answered(
            lambda left_s: self._gateway.ask(
                "sessions", "check_key", session_id, key_digest, deadline_s=left_s
            ),
            deadline_s=SUPERVISOR_DEADLINE_S,
        )

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        def ask(left_s: float) -> Awaitable[int]:
            limit_s = left_s + ANSWER_MARGIN_S
            return self._gateway.ask("sessions", "num_prompt_tokens", call, deadline_s=limit_s)

        return await self._gateway.until_answered(ask, deadline_s=call.deadline_s)

    async def abandon(self, session_id: str, request_id: str) -> None:
        """Tell the gateway, in the background, that the client of a request is gone.

        `Sessions.abandon` is called until a gateway answers, for at most ABANDON_S.
        """
        self._abandoning.begin(self._abandon(session_id, request_id))

    async def _abandon(self, session_id: str, request_id: str) -> None:
        # If no gateway appears in this time, the turn stays as it is stored.
        with suppress(RunUnavailable):
            await retry(
                lambda: self._gateway.ask("sessions", "abandon", session_id, request_id),
                on=RunUnavailable,
                limit_s=ABANDON_S,
            )


class _RemoteUploads:
    """The gateway's `Uploads`, called remotely; `generate` is tried again if the gateway dies."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._gateway.ask, "uploads", method)

    async def generate(self, request: GenerateRequest, key_name: str) -> GenerateReply:
        def ask(left_s: float) -> Awaitable[GenerateReply]:
            given = replace(request, deadline_s=max(left_s, 0.001))
            limit_s = left_s + ANSWER_MARGIN_S
            return self._gateway.ask("uploads", "generate", given, key_name, deadline_s=limit_s)

        return await self._gateway.until_answered(ask, deadline_s=request.deadline_s)
