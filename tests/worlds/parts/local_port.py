"""The routes' `SessionPort` over sessions of this process, without Ray between."""

from __future__ import annotations

import asyncio

from service.access.keys import Caller
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.chat import ChatReply
from service.gateway.sessions import Sessions


class LocalPort:
    """`service.gateway.routes.SessionPort`."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.abandoned: set[asyncio.Task[None]] = set()
        """On their way to the gateway, as calls whose answers nobody awaits."""

    async def chat(self, call: ChatCall) -> ChatReply:
        return await self.sessions.chat(call)

    async def check_key(self, session_id: str, key_digest: str) -> None:
        await self.sessions.check_key(session_id, key_digest)

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        return await self.sessions.num_prompt_tokens(call)

    def abandon(self, session_id: str, request_id: str) -> None:
        task = asyncio.create_task(self.sessions.abandon(session_id, request_id))
        self.abandoned.add(task)
        task.add_done_callback(self.abandoned.discard)

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView:
        return await self.sessions.finish(session_id, key_digest, finish, client)

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView:
        return await self.sessions.give_reward(session_id, key_digest, given, client)

    async def discard(self, session_id: str, sees: str | None = None) -> SessionView | None:
        return await self.sessions.discard(session_id, sees)

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | None:
        return await self.sessions.view(session_id, sees)

    async def claim(self, submission_id: str, name: str, sees: str | None = None) -> int | None:
        return await self.sessions.claim(submission_id, name, sees)

    async def close_group(self, submission_id: str, sees: str | None = None) -> int | None:
        return await self.sessions.close_group(submission_id, sees)
