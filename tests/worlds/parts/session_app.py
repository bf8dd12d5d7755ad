"""The API's application over a gateway in this process: routes, dialects, sessions and store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from service.access.keys import NO_LIMITS, KeyLimits, NamedKey
from service.api.app import create_app
from service.api.schemas import ReadyAnswer
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings
from service.gateway.chat import ChatCall, ChatReply
from service.gateway.routes import add_sessions
from service.intake.listing import (
    FeedPage,
    SessionFilter,
    SessionPage,
    SessionPlace,
    TaskFilter,
    TaskPage,
)
from service.intake.session import session_id
from service.intake.submission import (
    Backlog,
    PlaceAnswer,
    RolloutRequest,
    Status,
    SubmissionView,
    SubmitReply,
)
from service.store.submissions import SubmissionStore, packed
from worlds.parts.gateway_world import Gateway
from worlds.parts.local_port import LocalPort


class _Port(LocalPort):
    async def chat(self, call: ChatCall) -> ChatReply:
        try:
            return await self.sessions.chat(call)
        except asyncio.CancelledError:
            await self.abandon(call.session_id, call.request_id)
            raise


@dataclass
class SessionRun:
    """A run and its sessions; submitted tasks are admitted at once."""

    gateway: Gateway
    submitted: dict[str, RolloutRequest] = field(default_factory=dict)
    session_secret: str = ""
    """The secret from which the sessions' keys are derived."""

    def __post_init__(self) -> None:
        self.port = _Port(self.gateway.sessions)

    def app(self) -> FastAPI:
        settings = HttpSettings(
            rollouts=RolloutSettings(),
            service=ServiceSettings(max_body_kib=64),
            algorithm=AlgorithmSettings(group_size=2),
            sessions=self.gateway.settings,
            environments=("guessing",),
            session_secret=self.session_secret,
        )
        app = create_app(self, settings)
        add_sessions(app, self, self.port, settings)
        return app

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        key: str = "",
        limits: KeyLimits = NO_LIMITS,
    ) -> SubmitReply:
        backlog = Backlog(waiting=0, capacity=8)
        for wanted in requests:
            if (known := self.submitted.get(wanted.id)) is not None:
                is_same = known.digest == wanted.digest
                return SubmitReply(backlog=backlog, conflicts=() if is_same else (wanted.id,))
            self.submitted[wanted.id] = wanted
            SubmissionStore(self.gateway.store).add([packed(wanted)], term=self.gateway.term)
            for member in range(wanted.num_samples):
                self.gateway.admit(session_id(wanted.id, member))
        places = [
            PlaceAnswer(
                id=each.id,
                place=len(self.submitted),
                status=Status.QUEUED,
                ahead=0,
                num_samples=each.num_samples,
                is_new=True,
            )
            for each in requests
        ]
        return SubmitReply(backlog=backlog, places=tuple(places))

    async def submission(
        self, submission_id: str, *, sees: str | None = None
    ) -> SubmissionView | None:
        return None

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        raise NotImplementedError

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        return self.gateway.sessions_store.page(wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        raise NotImplementedError

    async def cancel(self, submission_id: str, *, sees: str | None = None) -> SubmissionView | None:
        return None

    async def keys(self) -> Sequence[NamedKey]:
        return ()

    async def add_key(self, key: NamedKey) -> bool:
        raise NotImplementedError

    async def revoke_key(self, name: str) -> NamedKey | None:
        raise NotImplementedError

    async def stop(self, grace_s: float | None) -> None:
        """Do nothing: there is no run to stop."""

    async def readiness(self) -> ReadyAnswer:
        raise NotImplementedError


@dataclass
class Reader:
    """A client at the application's ASGI interface, which a test can pause or disconnect."""

    app: FastAPI
    parts: list[bytes] = field(default_factory=list)
    status: int | None = None
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, messages to the client wait."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Once it is set, the client has disconnected."""
    _has_sent: bool = False

    def __post_init__(self) -> None:
        self.may_read.set()

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        given = {"host": "localhost", "content-type": "application/json", **headers}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }

        async def receive() -> Message:
            if not self._has_sent:
                self._has_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self.left.wait()
            return {"type": "http.disconnect"}

        await self.app(scope, receive, self._send)
        return b"".join(self.parts)

    async def _send(self, message: Message) -> None:
        # As servers do, drop messages at once if the client has disconnected.
        waiting = [asyncio.create_task(event.wait()) for event in (self.may_read, self.left)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if self.left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
