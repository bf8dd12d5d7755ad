"""Check the key of a session's request by the headers, before the body is read.

A key that names another session, or no session, is refused at once. Before a large body is read,
the gateway also checks that the key belongs to the session. What the key permits is checked later,
when the gateway answers the request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response

from service.access.keys import (
    MAX_KEY_CHARACTERS,
    Caller,
    Scope,
    digest_of,
    session_of_key,
    tenant_of,
)
from service.api.bodies import announced_bytes, is_large
from service.api.callers import Callers
from service.api.problems import Problem, problem_response
from service.api.settings import bearer_of
from service.gateway.chat import RefusalCode, Refused
from service.gateway.dialects import dialect_at
from service.gateway.dialects.dialect import error_headers

SESSION_HEADER = "x-rayloom-session"
_BOUND = re.compile(r"/sessions/([^/]+)/")
_ENDING = re.compile(r"/api/v1/sessions/([^/]+)/(?:finish|reward)$")


class SessionKeyCheck:
    """The check of the session key in a request; `service.api.guards.CheckSessionKey` calls it."""

    def __init__(self, check_key: Callable[[str, str], Awaitable[None]], callers: Callers) -> None:
        self._check_key, self._callers = check_key, callers

    async def __call__(self, path: str, headers: Headers) -> Response | None:
        """Return a request's refusal, or None if the body may be read. Raises: RunUnavailable."""
        try:
            await self._check(path, headers)
        except Refused as refused:
            return _answer(path, headers, refused)
        return None

    async def _check(self, path: str, headers: Headers) -> None:
        key = sent_key(headers)
        if not key:
            raise Refused(
                RefusalCode.INVALID_KEY,
                "no key was sent, expected a key of the session; send it as Authorization: Bearer "
                "KEY",
            )
        named = _name_in(path) or headers.get(SESSION_HEADER) or session_of_key(key)
        whole = holder_of(key).whole(named)
        of_key = session_of_key(key)
        if len(key) > MAX_KEY_CHARACTERS or not of_key or of_key != whole:
            # A client's own key may reward and end sessions.
            is_client = (
                _ENDING.match(path) is not None
                and not of_key
                and await self._callers.find(key) is not None
            )
            if not is_client:
                raise unknown_session(named)
        elif is_large(announced_bytes(headers)):
            await self._check_key(whole, digest_of(key))


def sent_key(headers: Mapping[str, str]) -> str:
    """Return the key in a request's headers: a bearer token or `x-api-key`; empty if none."""
    return bearer_of(headers) or headers.get("x-api-key", "")


def holder_of(key: str) -> Caller:
    """Return the `Caller` for a session's key: a client of the tenant that owns the session."""
    return Caller(scope=Scope.CLIENT, tenant=tenant_of(session_of_key(key)))


def unknown_session(name: str) -> Refused:
    """Return the error for an unknown session or a wrong key; the text is the same for both."""
    return Refused(
        RefusalCode.UNKNOWN_SESSION,
        f"this run has no session {name!r} with this key; use the key that the session's creation "
        "returned, or create the session with POST /api/v1/sessions",
    )


def _name_in(path: str) -> str:
    found = _BOUND.match(path) or _ENDING.match(path)
    return found[1] if found else ""


def _answer(path: str, headers: Headers, refused: Refused) -> Response:
    if path.startswith("/api/") or "/v1/" not in path:
        return problem_response(as_problem(refused), instance=path)
    return JSONResponse(
        dialect_at(path, headers).error(refused),
        status_code=refused.code.status,
        headers=error_headers(refused),
    )


def as_problem(refused: Refused) -> Problem:
    """Return a refusal as a problem document, the form of the errors of Rayloom's own routes
    (/api).
    """
    return Problem(
        refused.code.status,
        refused.code.value.replace("_", "-"),
        refused.message,
        errors=[{"loc": ["body", refused.param]}] if refused.param else (),
        headers=error_headers(refused),
    )
