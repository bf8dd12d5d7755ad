"""What is checked before a route runs: the size of the body, and the bearer key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.key import digest_of
from service.api.problems import Problem, problem_response

# What probes and people may read without a key.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guards:
    """ASGI middleware. A body is counted as it comes: its header may be missing, or lie."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, key_digest: str | None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._key_digest = key_digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if path not in OPEN_PATHS and not self._has_key(headers):
            await problem_response(_wrong_key(headers), instance=path)(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            await problem_response(self._too_large(), instance=path)(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            await problem_response(self._too_large(), instance=path)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _has_key(self, headers: Headers) -> bool:
        if self._key_digest is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        return is_bearer and hmac.compare_digest(digest_of(key.strip()), self._key_digest)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when it is too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                return None
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Problem:
        return Problem(
            413,
            "body-too-large",
            f"the body is larger than {self._max_body_bytes} bytes; send fewer tasks a request, or "
            "raise service.max_body_kib",
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


def _wrong_key(headers: Headers) -> Problem:
    given = "another" if headers.get("authorization") else "none"
    return Problem(
        401,
        "wrong-key",
        f"a bearer key is asked for, got {given}; send Authorization: Bearer KEY with the key that "
        "the service was started with (RAYLOOM_API_KEY)",
        headers={"WWW-Authenticate": "Bearer"},
    )
