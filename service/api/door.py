"""Checks that Ray Serve's HTTP servers make before every route.

Without these checks, Serve would read bodies of any size from anybody, and show all applications'
names to everybody. A client that never completes its headers could keep a connection open forever.

Each process in which Serve opens an HTTP server first calls `middlewares`: Serve's proxy, or each
replica if HAProxy replaces the proxy. `service.launch.cluster` names the function to Serve by
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.bodies import ASKS_HEADER, BodyRoom, announced_bytes, is_large

ROUTES_PATH = "/-/routes"
# Most seconds from the opening of a connection, or from the first byte of a later request, to the
# end of the request's head.
HEAD_LIMIT_S = 20.0
# Bytes counted for a body that does not announce its length.
UNKNOWN_BYTES = 48 << 20
# Seconds for which a refused client's further bytes are discarded before the connection is closed.
LINGER_S = 2.0
# Most seconds that a large body waits until others have been read.
ROOM_LIMIT_S = 30.0


def middlewares() -> list[Middleware]:
    """Return the middlewares for Ray Serve, which calls this before it opens a server."""
    limit_heads()
    return [Middleware(Door)]


class Door:
    """ASGI middleware that limits how Ray Serve's HTTP servers read large bodies.

    It reads a large body only after the API has accepted the request's headers, and bounds the
    total size of the bodies that are being read at once.
    """

    def __init__(self, app: ASGIApp, *, room: BodyRoom | None = None) -> None:
        self._app = app
        self._room = room or BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].rstrip("/").lower() == ROUTES_PATH:
            # Serve's own route would list every run and its address to anybody.
            await PlainTextResponse("not found\n", status_code=404)(scope, receive, send)
            return
        num_bytes = announced_bytes(Headers(scope=scope))
        if not is_large(num_bytes):
            await self._app(scope, receive, send)
            return
        refusal = await self._ask(scope)
        if refusal:
            await _refuse(refusal, receive, send)
            return
        counted = UNKNOWN_BYTES if num_bytes is None else num_bytes
        if not await self._room.take(counted, limit_s=ROOM_LIMIT_S):
            answer = PlainTextResponse(
                "too many large bodies are being read at once; send it again in a moment\n",
                status_code=503,
                headers={"retry-after": "2", "connection": "close"},
            )
            await answer(scope, receive, send)
            return
        body = _Counted(receive, self._room, counted)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.give_back()

    async def _ask(self, scope: Scope) -> list[Message]:
        """Return the API's refusal of a request's headers, as ASGI messages; [] if accepted."""
        asking = {
            **scope,
            "method": "OPTIONS",
            "headers": [*scope["headers"], (ASKS_HEADER.encode(), scope["method"].encode())],
            "state": dict(scope.get("state", {})),
        }
        answer: list[Message] = []
        is_given = False

        async def nothing() -> Message:
            nonlocal is_given
            if is_given:
                # To the application, the client is still connected.
                await asyncio.Event().wait()
            is_given = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def keep(message: Message) -> None:
            answer.append(message)

        await self._app(asking, nothing, keep)
        if not answer or answer[0]["status"] == 204:
            return []
        # Other Serve applications do not answer the question: their requests count as accepted.
        return answer if ASKS_HEADER in Headers(raw=answer[0]["headers"]) else []


async def _refuse(refusal: list[Message], receive: Receive, send: Send) -> None:
    """Send a refusal at once, then discard the client's further bytes for up to LINGER_S."""
    for message in refusal:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)
    # If the connection were closed while bytes arrive, the client could not read the refusal.
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Counted:
    """Passes a body to the application, and releases its reserved memory after the last byte."""

    def __init__(self, receive: Receive, room: BodyRoom, num_bytes: int) -> None:
        self._receive, self._room, self._num_bytes = receive, room, num_bytes

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self.give_back()
        return message

    def give_back(self) -> None:
        """Release the memory that is still reserved for the body."""
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0


def limit_heads(limit_s: float = HEAD_LIMIT_S) -> None:
    """Make uvicorn close connections on which a request's headers are not complete in time.

    uvicorn has no such limit and Serve has no option for it, so this replaces the protocol class in
    uvicorn's module, in this process.
    """
    from uvicorn.protocols.http import auto

    base: Any = auto.AutoHTTPProtocol
    if not hasattr(base, "head_limit_s"):
        auto.AutoHTTPProtocol = type("PatientProtocol", (_HeadLimit, base), {})
    auto.AutoHTTPProtocol.head_limit_s = limit_s  # type: ignore[attr-defined]


class _HeadLimit:
    """A mixin for uvicorn's HTTP protocols that limits the time for a request's headers."""

    head_limit_s: float
    transport: Any
    cycle: Any
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        is_upgraded = self.transport.get_protocol() is not self
        if not is_upgraded and (self.cycle is None or self.cycle.response_complete):
            # The rest of an unread body counts as a head, so the limit then closes the connection.
            self._wait()
        else:
            self._stop()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        super().connection_lost(error)  # type: ignore[misc]

    def _wait(self) -> None:
        if self._waiting is None:
            loop = asyncio.get_running_loop()
            self._waiting = loop.call_later(self.head_limit_s, self.transport.close)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
