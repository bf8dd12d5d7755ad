"""The HTTP API of one run: FastAPI routes over a `RunPort`. Nothing here depends on Ray."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.metrics import ApiMetrics
from service.access.secret_files import SecretFile
from service.api import openapi, problems
from service.api.bodies import ASKS_HEADER
from service.api.callers import Callers
from service.api.environments import add_environments
from service.api.feed import STREAM_S, add_feed
from service.api.guards import Guards
from service.api.named_keys import add_keys
from service.api.ports import PREFIX, RunPort
from service.api.rollouts import add_rollouts
from service.api.schemas import ReadyAnswer
from service.api.settings import HttpSettings, digest_of_long


def create_app(
    run: RunPort,
    settings: HttpSettings,
    *,
    metrics: ApiMetrics | None = None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    stream_s: float = STREAM_S,
) -> FastAPI:
    """Create and return the application.

    Args: metrics: counts every request. lifespan: context that is open while the application
    serves. stream_s: seconds after which a stream of the feed's events ends.
    """
    app = FastAPI(
        title="Rayloom",
        description="Rollouts for a training run, over HTTP.",
        lifespan=lifespan,
        dependencies=[Depends(check_query)],
    )
    metrics = metrics or ApiMetrics()
    # Used by the guards, and by the routes that check keys themselves.
    app.state.callers = Callers(
        run, first_digest=_first_digest(settings, metrics), defaults=settings.service.key_limits
    )
    app.add_middleware(
        Guards,
        max_body_bytes=settings.service.max_body_kib << 10,
        max_session_body_bytes=settings.sessions.max_body_mib << 20,
        callers=app.state.callers,
        hosts=settings.hosts,
    )
    # This middleware is outside the guards, so that requests which they refuse count too.
    app.add_middleware(CountedRequests, metrics=metrics)
    problems.install(app)
    openapi.install(app)
    # Add these routes first: routes are tried in order, and most requests are for these.
    add_rollouts(app, run, settings)
    _add_health(app, run)
    add_environments(app, settings)
    add_feed(app, run, stream_s=stream_s)
    add_keys(app, run)
    return app


async def check_query(request: Request) -> None:
    """Refuse query parameters that the API's own routes do not have, or that are given twice.

    The routes of agents accept any: some clients add their own, such as Anthropic's `beta`.
    Raises: Problem.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    if not given or not request.url.path.startswith(f"{PREFIX}/"):
        return
    route = request.scope["route"]
    known = [each.alias for each in get_flat_dependant(route.dependant).query_params]
    for name in given:
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no query parameters"
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise problems.Problem(
                422,
                "invalid-request",
                f"query.{problems.shown(name)}: this route has no such parameter, expected "
                f"{expected}; {hint}",
            )
        if given.count(name) > 1:
            raise problems.Problem(
                422,
                "invalid-request",
                f"query.{name}: got it {given.count(name)} times, expected it once; leave the "
                "others out",
            )


def _first_digest(settings: HttpSettings, metrics: ApiMetrics) -> str | SecretFile[str] | None:
    """Return the SHA-256 of the first admin key, or its file if the key may change there."""
    if settings.key_file is None or settings.key_digest is None:
        return settings.key_digest
    return SecretFile(
        settings.key_file,
        digest_of_long,
        value=settings.key_digest,
        count_failure=metrics.key_failures.inc,
    )


def _add_health(app: FastAPI, run: RunPort) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Report that this process answers."""
        return {"status": "ok"}

    @app.get(
        "/readyz",
        tags=["health"],
        response_model=ReadyAnswer,
        responses={503: {"model": ReadyAnswer, "description": "not ready, with the reasons"}},
    )
    async def readyz() -> JSONResponse:
        """Answer 200 if rollouts are played and trained on now, otherwise 503 with the reasons."""
        found = await run.readiness()
        return JSONResponse(found.model_dump(), status_code=200 if found.ready else 503)


METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class CountedRequests:
    """ASGI middleware that counts requests by status, which is `gone` if no answer was begun."""

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
            # Only `door` asks; the request itself comes later.
            return
        # The router stores the route that it found here.
        route = getattr(scope.get("route"), "path", "")
        method = asked_of or scope["method"]
        method = method if method in METHODS else "other"
        self._metrics.requests.labels(route=route, method=method, status=status or "gone").inc()
        self._metrics.seconds.labels(route=route).observe(time.monotonic() - began)
