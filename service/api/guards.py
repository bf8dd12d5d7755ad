"""Check a request's host, headers' size, key and body before its route runs.

The check of the key includes its permissions and its rate limit. A body is read only after the
headers and the key were accepted; a refusal closes the connection. Large bodies share a memory
budget (`BodyRoom`), until their routes have read them. Unexpected errors become problem documents.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.bodies import (
    ASKS_HEADER,
    THREAD_BYTES,
    BodyRoom,
    announced_bytes,
    asked_method,
    is_large,
    repeated_key,
)
from service.api.callers import Callers, check_scope, note_caller
from service.api.problems import (
    Problem,
    RunUnavailable,
    internal_error,
    problem_response,
    repeated_text,
    shown,
    unavailable,
)

log = logging.getLogger("rayloom.api")

# Paths that probes and people may read without a key.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
# The paths whose routes check a session's own keys.
_SESSION_PATH = re.compile(r"(/sessions/|/v1/|/api/v1/sessions/[^/]+/(finish|reward)$)")
# Paths to which agents send their conversations.
_TURN_PATH = re.compile(r"/sessions/|/v1/")
# Far more than any client sends; names and values together.
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
# Paths to which clients send columns of tokens: large bodies, in JSON or MessagePack.
_COLUMN_PATHS = frozenset({"/api/v1/trajectories", "/api/v1/generate"})
_TYPES = ("application/json",)
_COLUMN_TYPES = (*_TYPES, "application/msgpack")
# Most seconds from the first byte of a body to its end.
BODY_LIMIT_S = 30.0
# Most bytes of a body of a request that needs no key; such a request should have none.
OPEN_BODY_BYTES = 4 << 10
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})

CheckSessionKey = Callable[[str, Headers], Awaitable[Response | None]]
"""Maps a session request's path and headers to a refusal, or None if the key is accepted."""


class Guards:
    """ASGI middleware that checks each request's host, headers, key and body.

    The guards count the bytes of each body, because Content-Length may be missing or wrong.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_session_body_bytes: int,
        callers: Callers,
        hosts: frozenset[str] | None = None,
        body_limit_s: float = BODY_LIMIT_S,
        room: BodyRoom | None = None,
    ) -> None:
        """Create the guards.

        hosts: accepted host names; None accepts any. room: memory budget for bodies; None creates
        one.
        """
        self._app = app
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes
        self._max_session_body_bytes = max_session_body_bytes
        self._callers = callers
        self._body_limit_s = body_limit_s
        self._room = room or BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked_of = asked_method(scope)
        try:
            refusal = await self._refusal(scope, headers, asked_of or scope["method"])
            if refusal is None and asked_of:
                refusal = Response(status_code=204)
        except (Problem, RunUnavailable) as error:
            refusal = _answer_to(error, scope)
        if refusal is not None:
            if asked_of:
                refusal.headers[ASKS_HEADER] = "answered"
            await _close_unread(refusal, headers)(scope, receive, send)
            return
        try:
            body = await self._read(scope, headers, receive)
        except Problem as error:
            await _close_unread(_answer_to(error, scope), headers)(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, body.replay, noted)
        except Exception:
            # Starlette's own handler would raise the error again after its answer, and the server
            # might then damage the answer.
            log.exception("%s %s", scope["method"], scope["path"])
            if has_begun:
                raise
            answer = problem_response(internal_error(), instance=scope["path"])
            await answer(scope, receive, send)
        finally:
            body.drop()

    async def _refusal(self, scope: Scope, headers: Headers, method: str) -> Response | None:
        """Check a request's headers, host and key; return None if all are accepted.

        The refusal of a session's key is returned as a response; every other refusal is raised.
        method: the client's method; `scope` has OPTIONS if `door` checks the request in advance.
        Raises: Problem; RunUnavailable if the keys cannot be read.
        """
        path = scope["path"]
        _check_headers(scope["headers"])
        if self._hosts is not None and _host_of(headers) not in self._hosts:
            raise _wrong_host(headers)
        if path in OPEN_PATHS:
            return None
        if has_own_keys(path):
            # Models are listed without a key.
            check = None if method in _BODILESS else _session_check(scope)
            return None if check is None else await check(path, headers)
        caller = await self._callers.known(headers)
        if not asked_method(scope):
            # A check by `door` is not counted: the request itself follows.
            self._callers.count(caller)
        check_scope(caller, path=path)
        note_caller(scope, caller)
        return None

    async def _read(self, scope: Scope, headers: Headers, receive: Receive) -> _Body:
        """Read an accepted request's body. Raises: Problem if its size, speed or type is wrong."""
        path = scope["path"]
        has_columns = path in _COLUMN_PATHS
        most = self._max_body_bytes
        if has_columns or _TURN_PATH.match(path) is not None:
            most = self._max_session_body_bytes
        if path in OPEN_PATHS or (scope["method"] in _BODILESS and has_own_keys(path)):
            most = OPEN_BODY_BYTES
        announced = announced_bytes(headers)
        if announced is not None and announced > most:
            raise _too_large(most)
        types = _COLUMN_TYPES if has_columns else _TYPES
        if announced:
            _check_format(headers, types)
        num_bytes = most if announced is None else announced
        room = self._room if is_large(num_bytes) else None
        if room is not None and not await room.take(num_bytes, limit_s=self._body_limit_s):
            raise _no_room()
        body = _Body(receive, room, num_bytes)
        try:
            async with asyncio.timeout(self._body_limit_s):
                await body.read(most)
            if body:
                _check_format(headers, types)
            if _TURN_PATH.match(path) is None and _media_type(headers) in _TYPES:
                # An agent's route answers in the agent's dialect, and checks this itself.
                await body.check_keys()
        except TimeoutError:
            body.drop()
            raise self._too_slow() from None
        except BaseException:
            body.drop()
            raise
        return body

    def _too_slow(self) -> Problem:
        return Problem(
            408,
            "body-too-slow",
            f"the body was not complete after {self._body_limit_s:g} s; send it again, in one "
            "piece or with fewer tasks",
            headers={"Connection": "close"},
        )


def has_own_keys(path: str) -> bool:
    """Return whether requests to a path need a session's key.

    The guards do not look up such a key among the run's named keys.
    """
    return _SESSION_PATH.match(path) is not None


class _Body:
    """Reads and checks a request's body before the route runs, then passes it to the route."""

    def __init__(self, receive: Receive, room: BodyRoom | None, num_bytes: int) -> None:
        """Create a reader of a body.

        room: the budget in which num_bytes are reserved for this body; None if nothing is reserved.
        """
        self._receive = receive
        self._room, self._num_bytes = room, num_bytes
        self._whole: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._whole)

    async def read(self, most: int) -> None:
        """Read the body. Raises: Problem if it is larger than `most` bytes."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            if not message.get("more_body", False):
                self._whole = parts[0] if len(parts) == 1 else b"".join(parts)
                return

    async def check_keys(self) -> None:
        """Raise a Problem if a JSON object in the body has a key twice."""
        whole = self._whole or b""
        is_long = len(whole) > THREAD_BYTES
        key = await asyncio.to_thread(repeated_key, whole) if is_long else repeated_key(whole)
        if key is not None:
            raise Problem(400, "malformed-body", f"the body: {repeated_text(key)}")

    async def replay(self) -> Message:
        """Return the whole body as one ASGI message; later calls return the client's next messages.

        The second call shows that the route has read the body. It therefore releases the memory
        that is reserved for the body.
        """
        if self._whole is None:
            self.drop()
            return await self._receive()
        whole, self._whole = self._whole, None
        return {"type": "http.request", "body": whole, "more_body": False}

    def drop(self) -> None:
        """Discard the body, and release the memory that is still reserved for it."""
        self._whole = None
        room, self._room = self._room, None
        if room is not None:
            room.give_back(self._num_bytes)


def _session_check(scope: Scope) -> CheckSessionKey | None:
    """Return the app's check of session keys; None if the app has no routes for sessions."""
    app = scope.get("app")
    return None if app is None else getattr(app.state, "check_session_key", None)


def _answer_to(error: Problem | RunUnavailable, scope: Scope) -> Response:
    problem = error if isinstance(error, Problem) else unavailable(str(error))
    return problem_response(problem, instance=scope["path"])


def _close_unread(answer: Response, headers: Headers) -> Response:
    """Make the answer close the connection, because the request's body will not be read."""
    if announced_bytes(headers) != 0:
        answer.headers["connection"] = "close"
    return answer


def _too_large(most: int) -> Problem:
    return Problem(
        413,
        "body-too-large",
        f"the body is larger than {most} bytes; send fewer tasks in a request, or raise "
        "service.max_body_kib, for sessions sessions.max_body_mib",
    )


def _no_room() -> Problem:
    return Problem(
        503,
        "no-room",
        "too many large bodies are being read at once; send it again in a moment",
        headers={"Retry-After": "2"},
    )


def _check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise Problem(
            431,
            "headers-too-large",
            f"got {len(headers)} headers of {size} bytes, expected at most {MAX_HEADERS} of "
            f"{MAX_HEADER_BYTES} together; send fewer",
        )
    keys = {value for name, value in headers if name == b"idempotency-key"}
    if len(keys) > 1:
        raise Problem(
            400,
            "repeated-header",
            f"got {len(keys)} different Idempotency-Key headers, expected one; remove the others",
        )


def _check_format(headers: Headers, media_types: tuple[str, ...]) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Encoding is {shown(encoding)!r}, expected none; send the body without it",
            headers={"Accept-Encoding": "identity"},
        )
    if _media_type(headers) not in media_types:
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Type is {shown(headers.get('content-type', ''))!r}, expected "
            f"{' or '.join(media_types)}; send one JSON object with Content-Type: application/json",
        )


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _host_of(headers: Headers) -> str:
    """Return the host name that a request names, without the port. Example: [::1]:8000 -> ::1"""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _wrong_host(headers: Headers) -> Problem:
    return Problem(
        421,
        "unknown-host",
        f"the request is for the host {shown(headers.get('host', ''))!r}, expected localhost: the "
        "API listens only on this machine, and no web page may reach it under another name; use "
        "localhost, or add the name to service.allowed_hosts",
    )
