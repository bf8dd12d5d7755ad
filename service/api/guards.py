"""What is checked before a route runs: the host that is asked for, the headers' size, the bearer
key with its scope and rate, the body.

An error that no route expects is answered as a problem here: Starlette's own handler raises it
again, to a server that may then spoil the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.callers import Callers, check_scope, note_caller
from service.api.problems import (
    Problem,
    RunUnavailable,
    internal_error,
    problem_response,
    shown,
    unavailable,
)

log = logging.getLogger("rayloom.api")

# What probes and people may read without a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
# Where a session's own keys are asked for, by the routes.
_SESSION_PATH = re.compile(r"(/sessions/|/v1/|/api/v1/sessions/[^/]+/(finish|reward)$)")
# Where agents send their conversations.
_TURN_PATH = re.compile(r"/sessions/|/v1/")
# Far beyond what any client sends; names and values together.
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
# Token columns: large bodies of the client's, JSON or MessagePack.
_COLUMN_PATHS = frozenset({"/api/v1/trajectories", "/api/v1/generate"})
_TYPES = ("application/json",)
_COLUMN_TYPES = (*_TYPES, "application/msgpack")
# From the first look at a body to its end.
BODY_LIMIT_S = 30.0


class Guards:
    """ASGI middleware. A body is counted as it comes: its header may be missing, or lie."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_session_body_bytes: int,
        callers: Callers,
        hosts: frozenset[str] | None = None,
        body_limit_s: float = BODY_LIMIT_S,
    ) -> None:
        """hosts: names that a request may be for; None: any."""
        self._app = app
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes
        self._max_session_body_bytes = max_session_body_bytes
        self._callers = callers
        self._body_limit_s = body_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._checked(scope, receive)
        except (Problem, RunUnavailable) as error:
            problem = error if isinstance(error, Problem) else unavailable(str(error))
            await problem_response(problem, instance=scope["path"])(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, _replay(body, receive), noted)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if has_begun:
                raise
            answer = problem_response(internal_error(), instance=scope["path"])
            await answer(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body of a request that may pass. Raises: Problem; RunUnavailable."""
        _check_headers(scope["headers"])
        headers = Headers(scope=scope)
        if self._hosts is not None and _host_of(headers) not in self._hosts:
            raise _wrong_host(headers)
        if scope["path"] not in OPEN_PATHS and not has_own_keys(scope["path"]):
            caller = await self._callers.admit(headers)
            check_scope(caller, path=scope["path"])
            note_caller(scope, caller)
        has_columns = scope["path"] in _COLUMN_PATHS
        is_large = has_columns or _TURN_PATH.match(scope["path"]) is not None
        most = self._max_session_body_bytes if is_large else self._max_body_bytes
        announced = headers.get("content-length", "0")
        # Digits beyond these make no length that could be taken.
        if announced.isdecimal() and int(announced[:20]) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(self._body_limit_s):
                body = await _read(receive, most)
        except TimeoutError:
            raise self._too_slow() from None
        if body:
            _check_format(headers, _COLUMN_TYPES if has_columns else _TYPES)
        return body

    def _too_slow(self) -> Problem:
        return Problem(
            408,
            "body-too-slow",
            f"the body had not come whole after {self._body_limit_s:g} s; send it again, in one "
            "piece or with fewer tasks",
            headers={"Connection": "close"},
        )


def has_own_keys(path: str) -> bool:
    """Whether the route asks for a session's own key by itself."""
    return _SESSION_PATH.match(path) is not None


async def _read(receive: Receive, most: int) -> bytes:
    """Raises: Problem when the body is larger than `most` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(most: int) -> Problem:
    return Problem(
        413,
        "body-too-large",
        f"the body is larger than {most} bytes; send fewer tasks a request, or raise "
        "service.max_body_kib, for sessions sessions.max_body_mib",
    )


def _check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """Raises: Problem."""
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise Problem(
            431,
            "headers-too-large",
            f"got {len(headers)} headers of {size} bytes, expected at most {MAX_HEADERS} of "
            f"{MAX_HEADER_BYTES} together; send fewer",
        )


def _check_format(headers: Headers, media_types: tuple[str, ...]) -> None:
    """Raises: Problem for a body that is not announced as one of these, and plain."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Encoding is {shown(encoding)!r}; expected none; send the body as it is",
            headers={"Accept-Encoding": "identity"},
        )
    media_type = headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() not in media_types:
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Type is {shown(media_type)!r}, expected {' or '.join(media_types)}; send one "
            f"JSON object with Content-Type: application/json",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hand the app a body that was read already, then what comes after it."""
    is_given = False

    async def replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _host_of(headers: Headers) -> str:
    """Without its port. Example: [::1]:8000 -> ::1"""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _wrong_host(headers: Headers) -> Problem:
    return Problem(
        421,
        "unknown-host",
        f"the request is for the host {shown(headers.get('host', ''))!r}; the API listens on this "
        "machine alone and answers to localhost, so that no web page reaches it under a name of "
        "its own; ask localhost, or add the name to service.allowed_hosts",
    )
