"""Counts requests by route and status; a path is never a label, since clients choose it."""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.metrics import ApiMetrics
from service.api.bodies import ASKS_HEADER

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class CountedRequests:
    """ASGI middleware. A client that goes before its answer has begun counts as status gone."""

    def __init__(self, app: ASGIApp, *, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, noted)
        asked_of = Headers(scope=scope).get(ASKS_HEADER)
        if asked_of is not None and status == 204:
            # The request itself is to come.
            return
        # The router leaves here what it found.
        route = getattr(scope.get("route"), "path", "")
        method = asked_of or scope["method"]
        method = method if method in METHODS else "other"
        self._metrics.requests.labels(route=route, method=method, status=status or "gone").inc()
        self._metrics.seconds.labels(route=route).observe(time.monotonic() - began)
