"""A dialect: pure functions that translate between a provider's protocol and the gateway's types.

    try:
        request, style = dialect.read(body, headers)
        reply = sample(request)  # the session's part
        answer = dialect.answer(reply, style)
        stream = dialect.events(reply, style)  # the same answer, if style.streams
    except Refused as refused:
        answer, status = dialect.error(refused), refused.code.status

A dialect has no state and does no I/O, so that the ingress's routes are the same for all. It
accepts any JSON; a parameter that it does not support is refused by its name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from service.gateway.chat import ChatReply, ChatRequest, RefusalCode, Refused
from service.gateway.dialects.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """The form of answer that a client wants; only the ingress uses it."""

    model: str
    """The name that the client gave; the answer repeats it."""
    streams: bool
    shows_usage: bool = False
    """Whether a stream ends with token counts; used only if the dialect has this option."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the provider's answer repeats, as JSON."""


class Reads(Protocol):
    """The type of `Dialect.read`, which makes a request from a body."""

    def __call__(
        self, body: object, headers: Mapping[str, str], *, ignores: bool = False
    ) -> tuple[ChatRequest, AnswerStyle]:
        """Read a parsed body. Raises: only Refused.

        Args: headers: their names may have any case. ignores: list unsupported parameters in the
        request, instead of refusing them, if the answer has the same form without them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One provider's protocol for calling a model, as pure functions."""

    name: str
    path: str
    """Path of the dialect's POST route, after the session's address."""
    parameters: Parameters
    """Parameters of the body."""
    heartbeat: bytes
    """Bytes that a stream repeats before its first event; clients ignore them."""
    read: Reads
    answer: Callable[[ChatReply, AnswerStyle], dict[str, Any]]
    """The whole answer, as JSON."""
    events: Callable[[ChatReply, AnswerStyle], Iterator[bytes]]
    """The whole answer as server-sent events, up to the last one."""
    error: Callable[[Refused], dict[str, Any]]
    """The body of an answer with the status `refused.code.status`."""
    error_event: Callable[[Refused], bytes]
    """The error that ends a stream after its heartbeats."""
    count_path: str = ""
    """Path of the POST route that counts a prompt's tokens; empty: the dialect has none."""
    counted: Callable[[int], Mapping[str, int | str]] | None = None
    """Maps a prompt's number of tokens to the answer of the route `count_path`, as JSON."""


_WORTH_ANOTHER_TRY = {RefusalCode.TOO_MANY_REQUESTS, RefusalCode.NOT_AVAILABLE}


def error_headers(refused: Refused) -> dict[str, str]:
    """Return headers that say whether and when to retry.

    Without them the SDKs would also repeat a request that was refused with 409.
    """
    if refused.code not in _WORTH_ANOTHER_TRY:
        return {"x-should-retry": "false"}
    if refused.retry_after_s is None:
        return {}
    return {"retry-after": str(refused.retry_after_s)}


def model_answer(name: str, *, created_at: float) -> dict[str, int | str]:
    """Return the body of GET /v1/models/NAME, for both providers.

    created_at: seconds since 1970.
    """
    return {
        "id": name,
        "object": "model",
        "created": int(created_at),
        "owned_by": "rayloom",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created_at), UTC).isoformat(),
    }


def models_answer(name: str, *, created_at: float) -> dict[str, Any]:
    """Return the body of GET /v1/models, which lists the only model in every dialect."""
    return {
        "object": "list",
        "data": [model_answer(name, created_at=created_at)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }
