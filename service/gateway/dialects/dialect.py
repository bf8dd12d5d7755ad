"""What a dialect is: functions between a provider's words and the gateway's, and nothing else.

A dialect holds no state and does no I/O, so that the ingress's routes are written once for all. It
takes whatever JSON a client sends: what it cannot keep to is refused by its name, never dropped.
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
    """How a client wants its answer; it stays with the request in the ingress."""

    model: str
    """The name that the client gave; the answer repeats it."""
    streams: bool
    shows_usage: bool = False
    """A stream ends with the counts of tokens, in the dialect where they are asked for."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the provider's answer repeats, as JSON."""


class Reads(Protocol):
    """Makes a request of a body."""

    def __call__(
        self, body: object, headers: Mapping[str, str], *, ignores: bool = False
    ) -> tuple[ChatRequest, AnswerStyle]:
        """body: as parsed. headers: their names may have any case. ignores: note in the request,
        instead of refusing, parameters that a session cannot obey, if the answer has the same form
        without them. Raises: only Refused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One provider's way to ask a model, as pure functions."""

    name: str
    path: str
    """Of its POST route, behind the session's address."""
    parameters: Parameters
    """Of the body."""
    heartbeat: bytes
    """Sent as often as wanted before the first event, and ignored by clients."""
    read: Reads
    answer: Callable[[ChatReply, AnswerStyle], dict[str, Any]]
    """The whole answer, as JSON."""
    events: Callable[[ChatReply, AnswerStyle], Iterator[bytes]]
    """The same as server-sent events, to the last one."""
    error: Callable[[Refused], dict[str, Any]]
    """The body of an answer with the status `refused.code.status`."""
    error_event: Callable[[Refused], bytes]
    """The end of a stream of which only heartbeats were sent."""
    count_path: str = ""
    """Path of its POST route that counts the tokens of a request's prompt; empty: it has none."""
    counted: Callable[[int], dict[str, Any]] | None = None
    """The answer of that route, as JSON."""


_WORTH_ANOTHER_TRY = {RefusalCode.TOO_MANY_REQUESTS, RefusalCode.NOT_AVAILABLE}


def error_headers(refused: Refused) -> dict[str, str]:
    """Whether and when to send the request again; the SDKs would also repeat a 409."""
    if refused.code not in _WORTH_ANOTHER_TRY:
        return {"x-should-retry": "false"}
    if refused.retry_after_s is None:
        return {}
    return {"retry-after": str(refused.retry_after_s)}


def model_answer(name: str, *, created_at: float) -> dict[str, Any]:
    """GET /v1/models/NAME in the words of both providers. created_at: seconds since 1970."""
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
    """GET /v1/models, whose path all dialects share: there is one model."""
    return {
        "object": "list",
        "data": [model_answer(name, created_at=created_at)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }
