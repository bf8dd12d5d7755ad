"""The client through which the API's replicas call the gateway, found through the supervisor.

If the gateway dies, a request for a turn is sent to its successor, with the same id, until the
request's time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from actors.deadline import ActorLost, TaskSet, retry
from actors.environment.policy import GenerateReply, GenerateRequest
from service.access.keys import Caller
from service.api.problems import RunUnavailable
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.chat import ChatReply, Refused, unavailable
from service.intake.uploads import (
    GroupPolicy,
    PolicyFacts,
    Upload,
    UploadGroup,
    UploadReply,
    UploadView,
)
from service.remote_calls import SUPERVISOR_DEADLINE_S, await_reply
from service.store.errors import LeaseLost, StoreError

# The gateway itself ends a request when its time is up; the client waits this much longer.
ANSWER_MARGIN_S = 2.0
AGAIN_S = 0.5
# How long to look for a gateway, to report that a client has gone.
ABANDON_S = 300.0
Answer = TypeVar("Answer")


class GatewayClient:
    """The gateway's calls, from any process; they raise Refused and RunUnavailable.

    Implements `service.gateway.routes.SessionPort` and `service.gateway.upload_routes.UploadPort`.
    """

    def __init__(self, find_gateway: Callable[[], Awaitable[Any]]) -> None:
        """Call the gateway whose handle `find_gateway` returns. It raises RunUnavailable."""
        self._find_gateway = find_gateway
        self._actor: Any = None
        self._abandoning = TaskSet()

    async def chat(self, call: ChatCall) -> ChatReply:
        """Return the turn that answers a request. Raises: Refused."""
        was_asked = False

        async def ask(actor: Any, left_s: float) -> ChatReply:
            nonlocal was_asked
            was_asked = True
            reply = actor.chat.remote(replace(call, deadline_s=left_s))
            return _raised(await self._reply(reply, left_s + ANSWER_MARGIN_S))

        is_answered = False
        try:
            answer = await self._until_answered(ask, deadline_s=call.deadline_s)
            is_answered = True
            return answer
        finally:
            # Also if a gateway died meanwhile: it may have stored the turn as seen.
            if was_asked and not is_answered:
                self.abandon(call.session_id, call.request_id)

    async def check_key(self, session_id: str, key_digest: str) -> None:
        """Check a session's key. Raises: Refused if it is neither of its keys; RunUnavailable."""

        async def ask(actor: Any, left_s: float) -> None:
            _raised(await self._reply(actor.check_key.remote(session_id, key_digest), left_s))

        await self._until_answered(ask, deadline_s=SUPERVISOR_DEADLINE_S)

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        """Return the prompt's length for a request. Raises: Refused."""

        async def ask(actor: Any, left_s: float) -> int:
            reply = actor.num_prompt_tokens.remote(call)
            return _raised(await self._reply(reply, left_s + ANSWER_MARGIN_S))

        return await self._until_answered(ask, deadline_s=call.deadline_s)

    async def generate(self, request: GenerateRequest, key_name: str) -> GenerateReply:
        """Sample the tokens that follow a prompt of token ids. Raises: Refused."""

        async def ask(actor: Any, left_s: float) -> GenerateReply:
            wanted = replace(request, deadline_s=max(left_s, 0.001))
            reply = actor.generate.remote(wanted, key_name)
            return _raised(await self._reply(reply, left_s + ANSWER_MARGIN_S))

        return await self._until_answered(ask, deadline_s=request.deadline_s)

    async def _until_answered(
        self, ask: Callable[[Any, float], Awaitable[Answer]], *, deadline_s: float
    ) -> Answer:
        """Send a request to the current gateway until one answers. Raises: Refused."""
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + deadline_s
        while True:
            try:
                actor = await self._find()
                return await ask(actor, max(deadline_at - loop.time(), 0.0))
            except RunUnavailable as error:
                if loop.time() + AGAIN_S >= deadline_at:
                    raise unavailable(f"{error}; send the request again") from error
                await asyncio.sleep(AGAIN_S)

    def abandon(self, session_id: str, request_id: str) -> None:
        """Report to the gateway, or its successor, that a client may not have got its answer."""
        self._abandoning.begin(self._abandon(session_id, request_id))

    async def _abandon(self, session_id: str, request_id: str) -> None:
        # If no gateway appears in this time, the turn stays as it is stored.
        with suppress(RunUnavailable):
            await retry(
                lambda: self._ask("abandon", session_id, request_id),
                on=RunUnavailable,
                limit_s=ABANDON_S,
            )

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView:
        """End a session. Raises: Refused; RunUnavailable."""
        client = _without_secret(client)
        found: SessionView = await self._ask("finish", session_id, key_digest, finish, client)
        return found

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView:
        """Give a finished session its reward. Raises: Refused; RunUnavailable."""
        client = _without_secret(client)
        found: SessionView = await self._ask("give_reward", session_id, key_digest, given, client)
        return found

    async def discard(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """End a session untrained; return None if unknown. Raises: Refused; RunUnavailable."""
        found: SessionView | None = await self._ask("discard", session_id, sees)
        return found

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        """Claim a group's session; None if there is no group. Raises: Refused; RunUnavailable."""
        found: int | None = await self._ask("claim", submission_id, name, sees)
        return found

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        """Close a group; return None if unknown. Raises: Refused; RunUnavailable."""
        found: int | None = await self._ask("close_group", submission_id, sees)
        return found

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | None:
        """Return a session, or None if unknown. Raises: Refused; RunUnavailable."""
        found: SessionView | None = await self._ask("view", session_id, sees)
        return found

    async def policy_facts(self) -> PolicyFacts:
        """Return the policy's facts, by which uploads are checked. Raises: RunUnavailable."""
        found: PolicyFacts = await self._ask("policy_facts")
        return found

    async def upload(
        self, uploads: Sequence[Upload], policies: Sequence[GroupPolicy], **limits: int
    ) -> UploadReply:
        """Add uploads. limits: as in `Uploads.add`. Raises: Refused; RunUnavailable."""
        found: UploadReply = await self._ask("upload", uploads, policies, **limits)
        return found

    async def uploaded(self, name: str) -> UploadView | None:
        """Return an upload, or None if unknown. Raises: Refused; RunUnavailable."""
        found: UploadView | None = await self._ask("uploaded", name)
        return found

    async def drop_group(self, group: str) -> UploadGroup | None:
        """Drop a group of uploads; return None if unknown. Raises: Refused; RunUnavailable."""
        found: UploadGroup | None = await self._ask("drop_group", group)
        return found

    async def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        call = getattr(await self._find(), method).remote(*arguments, **named)
        return _raised(await self._reply(call, SUPERVISOR_DEADLINE_S))

    async def _reply(self, call: Awaitable[Answer], deadline_s: float) -> Answer:
        try:
            return await await_reply(call, name="gateway", deadline_s=deadline_s)
        except (ActorLost, LeaseLost, StoreError) as error:
            # The gateway is gone, or can store nothing any more and will end.
            self._actor = None
            raise RunUnavailable(str(error)) from error

    async def _find(self) -> Any:
        if self._actor is None:
            self._actor = await self._find_gateway()
        return self._actor


def _without_secret(client: Caller | None) -> Caller | None:
    """Remove the raw key, which must not leave the replica that received it."""
    return None if client is None else replace(client, secret="")


def _raised(answer: Answer | Refused) -> Answer:
    if isinstance(answer, Refused):
        raise answer
    return answer
