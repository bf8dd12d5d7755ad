"""The sessions that the routes call, in this process and without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from service.gateway.sessions import Sessions


class LocalPort:
    """`Sessions` with the interface of `service.gateway.client`."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.abandoned: set[asyncio.Task[None]] = set()
        """Calls on their way to the gateway whose answers nobody awaits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sessions, name)

    async def abandon(self, session_id: str, request_id: str) -> None:
        task = asyncio.create_task(self.sessions.abandon(session_id, request_id))
        self.abandoned.add(task)
        task.add_done_callback(self.abandoned.discard)
