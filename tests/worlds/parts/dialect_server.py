"""The dialects' routes on loopback for real SDKs; a script answers instead of a session."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from service.gateway.chat import ChatReply, ChatRequest, Refused
from service.gateway.dialects import DIALECTS
from service.gateway.dialects.dialect import (
    Dialect,
    error_headers,
    model_answer,
    models_answer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A refusal that is sent after the stream has begun."""

    refused: Refused


@dataclass(kw_only=True)
class DialectServer:
    """A server with scripted answers, which keeps the requests that it gets."""

    url: str = ""
    script: list[ChatReply | Refused | Late] = field(default_factory=list)
    """The answers in order; the last one is repeated."""
    bodies: list[Any] = field(default_factory=list)
    requests: list[ChatRequest] = field(default_factory=list)

    def begin(self, *script: ChatReply | Refused | Late) -> None:
        self.script[:] = script
        self.bodies.clear()
        self.requests.clear()

    def answer(self) -> ChatReply | Refused | Late:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@contextmanager
def speaking() -> Iterator[DialectServer]:
    """Serve all dialects until the end of the block."""
    served = DialectServer()
    routes = [Route(each.path, _route(each, served), methods=["POST"]) for each in DIALECTS]
    routes += [
        Route("/v1/models", lambda _: JSONResponse(models_answer("tiny", created_at=7))),
        Route("/v1/models/tiny", lambda _: JSONResponse(model_answer("tiny", created_at=7))),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="error", ws="none", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served.url = f"http://127.0.0.1:{port}"
        yield served
    finally:
        server.should_exit = True
        thread.join(30)


def _route(dialect: Dialect, served: DialectServer) -> Callable[[Request], Any]:
    async def route(request: Request) -> Response:
        body = json.loads(await request.body())
        served.bodies.append(body)
        try:
            asked, style = dialect.read(body, request.headers)
            served.requests.append(asked)
            said = served.answer()
            if isinstance(said, Refused):
                raise said
        except Refused as refused:
            return JSONResponse(
                dialect.error(refused), refused.code.status, headers=error_headers(refused)
            )

        def events() -> Iterator[bytes]:
            yield dialect.heartbeat
            yield dialect.heartbeat
            if isinstance(said, Late):
                yield dialect.error_event(said.refused)
            else:
                yield from dialect.events(said, style)

        if style.streams:
            return StreamingResponse(events(), media_type="text/event-stream")
        assert isinstance(said, ChatReply)
        return JSONResponse(dialect.answer(said, style))

    return route
