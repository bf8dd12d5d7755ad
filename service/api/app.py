"""The HTTP API of one run: FastAPI routes over a `RunPort`. Nothing here depends on Ray.

This module also makes the OpenAPI document (`docs/openapi.json`). It adds to FastAPI's document
what all routes have in common: keys, the refusals of the guards, and internal errors. Each route
declares its own statuses, but `service.gateway.description` declares them for agents' routes.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.metrics import ApiMetrics
from service.access.secret_files import SecretFile
from service.api import problems
from service.api.bodies import asked_method
from service.api.callers import Callers, is_for_clients
from service.api.control_routes import add_keys
from service.api.environments import add_environments
from service.api.feed import STREAM_S, add_feed
from service.api.guards import OPEN_PATHS, Guards, has_own_keys
from service.api.ports import PREFIX, RunPort
from service.api.problems import MEDIA_TYPE
from service.api.rollouts import add_rollouts
from service.api.schemas import ReadyAnswer, StrictBody
from service.api.settings import HttpSettings, digest_of_long


def create_app(
    run: RunPort,
    settings: HttpSettings,
    *,
    metrics: ApiMetrics | None = None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    stream_s: float = STREAM_S,
) -> FastAPI:
    """Create the FastAPI application of a run's API, with its guards and its common routes.

    The caller adds the routes of sessions, uploads, operators and the page.
    Args: metrics: counts every request. lifespan: context that is open while the application
    serves. stream_s: seconds after which a stream of the feed's events ends.
    """
    app = FastAPI(
        title="Rayloom",
        description="Rollouts for a training run, over HTTP.",
        lifespan=lifespan,
        dependencies=[Depends(check_query), Depends(check_no_body)],
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
    _install_document(app)
    # Add these routes first: routes are tried in order, and most requests are for these.
    add_rollouts(app, run, settings)
    _add_health(app, run)
    add_environments(app, settings)
    add_feed(app, run, stream_s=stream_s)
    add_keys(app, run)
    return app


async def check_query(request: Request) -> None:
    """Refuse a request with a query parameter that is unknown or given twice. Raises: Problem.

    Agents' routes accept any parameter: some clients add their own, such as Anthropic's `beta`.
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
            hint = f"did you mean {near[0]}?" if near else "remove it"
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
                f"query.{name}: got it {given.count(name)} times, expected it once; remove the "
                "others",
            )


async def check_no_body(request: Request) -> None:
    """Refuse a request that has fields in its body although its route takes no body.

    FastAPI would ignore the body without an error. Raises: Problem.
    """
    route = request.scope["route"]
    # A route that parses its body itself declares the body in `openapi_extra`.
    has_fields = route.body_field is not None or "requestBody" in (route.openapi_extra or {})
    if has_fields or not request.url.path.startswith(f"{PREFIX}/"):
        return
    whole = await request.body()
    try:
        found = json.loads(whole) if whole.strip() else None
    except (ValueError, RecursionError) as error:
        raise problems.malformed(problems.shown(str(error))) from None
    if found not in (None, {}):
        is_object = isinstance(found, dict)
        where = f"body.{problems.shown(next(iter(found)))}" if is_object else "body"
        got = "this route has no such field" if is_object else "got something else than an object"
        raise problems.Problem(
            422,
            "invalid-request",
            f"{where}: {got}, expected no body or {{}}; remove it; see /docs",
            errors=[{"loc": where.split(".", 1), "message": got}],
        )


def _first_digest(settings: HttpSettings, metrics: ApiMetrics) -> str | SecretFile[str] | None:
    """Return the SHA-256 of the first admin key, which the operator sets; None if it is not set.

    Without the first admin key, the API requires a key only if the run has named keys.
    """
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
    """ASGI middleware that counts and times requests, by route, method and status.

    If the application sent no answer to a request, the request counts under the status `gone`.
    """

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
        asked_of = asked_method(scope)
        if asked_of and status == 204:
            # Only `door` asks; the request itself comes later.
            return
        # The router stores the route that it found in the scope.
        route = getattr(scope.get("route"), "path", "")
        method = asked_of or scope["method"]
        method = method if method in METHODS else "other"
        self._metrics.requests.labels(route=route, method=method, status=status or "gone").inc()
        self._metrics.seconds.labels(route=route).observe(time.monotonic() - began)


VERSION = "1"
_PROBLEM = {"$ref": "#/components/schemas/ProblemBody"}
_OF_EVERY = {
    408: "the body was not complete in time",
    413: "the body is too large",
    415: "the body's Content-Type or Content-Encoding is not accepted",
    431: "the headers are too many, or too large",
    421: "the request is for a host name that the API does not accept",
    500: "an internal error; see the service's log",
    503: "the run does not answer, or accepts nothing now; Retry-After says when to try again",
}
_KEYED = {
    401: "no valid key",
    429: "too many requests with this key; Retry-After says when to try again",
}
_OF_ADMINS = {403: "this needs a key with scope admin"}
_READ = {422: "a value is invalid; `errors` says where"}
_WITH_BODY = {400: "the body is not JSON, or is refused"}
# Schemas that FastAPI adds to its own document; they are removed.
_REPLACED = ("HTTPValidationError", "ValidationError")


class ProblemBody(StrictBody):
    """An error, as RFC 9457 defines it."""

    type: str
    title: str
    status: int
    detail: str = Field(description="what was got, what was expected, and what to do")
    instance: str
    code: str = Field(description="identifies the kind of error; stable, for programs")
    errors: list[dict[str, Any]] | None = Field(
        None, description="the faults, each with its position `loc` and mostly a `message`"
    )


def _install_document(app: FastAPI) -> None:
    """Serve the OpenAPI document at /openapi.json; it includes routes that are added later."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=VERSION, description=app.description, routes=app.routes
    )
    schemas = found["components"]["schemas"]
    for name in _REPLACED:
        schemas.pop(name, None)
    schemas["ProblemBody"] = ProblemBody.model_json_schema()
    found["components"]["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "the API's key (RAYLOOM_API_KEY), or a named one; for a session's own "
            "routes, the session's. On loopback the API may require none",
        }
    }
    for path, operation in _operations(found):
        _complete(path, operation)
    # Sorted, so that equal documents are equal texts.
    whole: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True))
    return whole


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add to a route's entry in the OpenAPI document whether it needs a key, and common errors.

    What the route itself declares has precedence over the common errors.
    """
    is_open = path in OPEN_PATHS
    operation.setdefault("security", [] if is_open else [{"key": []}])
    for parameter in operation.get("parameters", ()):
        _leave_null_out(parameter["schema"])
    answers = operation["responses"]
    if answers.get("422", {}).get("description") == "Validation Error":
        del answers["422"]
    common = dict(_OF_EVERY)
    if operation["security"]:
        common |= _KEYED
        if path.startswith(PREFIX) and not (is_for_clients(path) or has_own_keys(path)):
            common |= _OF_ADMINS
    if "requestBody" in operation or path.startswith(f"{PREFIX}/"):
        # Also for a route without a body: see `check_no_body`.
        common |= _READ | _WITH_BODY
    if operation.get("parameters"):
        common |= _READ
    for status, description in common.items():
        answers.setdefault(str(status), {"description": description})
    for status, answer in answers.items():
        if int(status) >= 400:
            answer.setdefault("content", {}).setdefault(MEDIA_TYPE, {"schema": _PROBLEM})
    operation["responses"] = dict(sorted(answers.items()))


def _leave_null_out(schema: dict[str, Any]) -> None:
    """Remove null from the schema of an optional parameter: a client leaves the parameter out."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema |= kinds[0]
