"""A model call in the form common to all dialects: request, reply and refusal.

Each dialect (`service.gateway.dialects`) translates a client's body to a `ChatRequest`, and a
`ChatReply` back to its own form. A session's tree (`tree`) uses only these two types, so that a
session may mix dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from actors.environment.protocol import Message, ToolSchema
from actors.types import LogProbs, TokenIds

# Seconds after which a client should repeat a request that could not be answered.
RETRY_AFTER_S = 5


Part = Literal["reasoning", "content", "call"]
"""The parts of an earlier reply that a client can name by an id instead of sending them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An id that a client sends in place of a part of an earlier reply.

    The session inserts the part into a message of the request.
    """

    message: int
    """Index, in the request, of the message into which the session inserts the part."""
    call: int = 0
    """Index, in that message, of the tool call to be filled in; only if the part is a call."""
    turn_id: str
    """The id of the turn whose reply has the part."""
    part: Part
    number: int = 0
    """Index of the tool call in the turn's reply; only if the part is a call."""
    where: str
    """Position of the id in the body, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A client's request for a reply of the policy."""

    messages: tuple[Message, ...]
    """The whole conversation, or with `continues` the messages after that turn; not empty."""
    tools: tuple[ToolSchema, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options for the chat template; they replace the run's options of the same names."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens, >= 1; if None, the session's limit applies."""
    stop: tuple[str, ...] = ()
    """Stop strings, which are not empty; the reply's text is cut before the first one in it."""
    references: tuple[Reference, ...] = ()
    """Parts of `messages` that the client named by an id; the session must still insert them."""
    ignored: tuple[str, ...] = ()
    """Names of parameters that the client sent and that have no effect in a session."""
    continues: str = ""
    """The id of the turn that the messages follow; empty: the client sends the whole
    conversation."""
    keeps_tools: bool = False
    """With `continues`: whether the request keeps the tools of that turn instead of sending its
    own.
    """
    instructions: str | None = None
    """Text of the request's `instructions`, a system message; None: the request has none. In a new
    conversation it is also the first of `messages`, unless it is empty. With `continues`, a text
    replaces the conversation's earlier instructions, and None keeps them."""
    may_call: bool = True
    """Whether tool calls are parsed from the reply; the prompt shows the tools in any case."""
    is_auxiliary: bool = False
    """Whether the client marked this call as not part of the task (a title, a classifier)."""
    is_retry: bool = False
    """Whether the client marked this request as a repeat of a request that got no answer."""
    idempotency_key: str = ""
    """The idempotency key: requests with the same key are the same request. Empty: the client sent
    no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A client's `ChatRequest`, with the session, key, id and time limit of the HTTP request."""

    session_id: str
    key_digest: str
    """SHA-256 of the key that the client sent."""
    request_id: str
    """Id of the HTTP request, which stays the same if the request is sent to another gateway."""
    request: ChatRequest
    deadline_s: float
    """Seconds from now until the answer is due."""


StopReason = Literal["stop", "length", "calls"]
"""The reason why a reply ended; `length`: it was cut off at a limit, and a call that was cut off is
omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One sampled turn, as a client receives it."""

    turn_id: str
    """Unique in the run: the session's id, a dot, the turn's number."""
    message: Message
    """The assistant's content, reasoning and calls."""
    stop_reason: StopReason
    stop_string: str = ""
    """The string of the request's `stop` at which the text was cut; empty: it was not cut."""
    num_prompt_tokens: int
    num_sampled_tokens: int
    policy_version: int
    """The newest policy version that sampled a token of the reply."""
    created_at: float
    """Seconds since 1970."""
    sampled_token_ids: TokenIds | None = None
    """[A] int32; None if the session does not show its tokens."""
    logprobs: LogProbs | None = None
    """[A] float32, nats; None if the session does not show its tokens."""


class RefusalCode(StrEnum):
    """The reason why a session's request is refused; the values are stable for programs."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    ROLLOUT_STOPPED = "rollout_stopped"
    """The session has reached a limit: it samples no more turns, but can be finished."""
    INVALID_KEY = "invalid_key"
    FORBIDDEN = "forbidden"
    """The key belongs to the session, but does not permit this request."""
    UNKNOWN_SESSION = "unknown_session"
    NOT_FOUND = "not_found"
    """The route or the model does not exist."""
    CONFLICT = "conflict"
    SESSION_CLOSED = "session_closed"
    TOO_MANY_REQUESTS = "too_many_requests"
    NOT_AVAILABLE = "not_available"
    """The engine or the store did not answer in time; the same request may be sent again."""

    @property
    def status(self) -> int:
        """The HTTP status of an answer with this code."""
        return _STATUS[self]


_STATUS = {
    RefusalCode.INVALID_REQUEST: 400,
    RefusalCode.UNSUPPORTED_PARAMETER: 400,
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: 400,
    RefusalCode.ROLLOUT_STOPPED: 400,
    RefusalCode.INVALID_KEY: 401,
    RefusalCode.FORBIDDEN: 403,
    RefusalCode.UNKNOWN_SESSION: 404,
    RefusalCode.NOT_FOUND: 404,
    RefusalCode.CONFLICT: 409,
    RefusalCode.SESSION_CLOSED: 410,
    RefusalCode.TOO_MANY_REQUESTS: 429,
    RefusalCode.NOT_AVAILABLE: 503,
}


class Refused(Exception):
    """A refused request of a session; the message states the cause and the remedy."""

    def __init__(
        self, code: RefusalCode, message: str, *, param: str = "", retry_after_s: int | None = None
    ) -> None:
        """Refuse a request.

        param: position of the wrong part in the body; empty if no single part is wrong.
        retry_after_s: seconds after which the client may send the request again; None: not stated.
        """
        super().__init__(code, message, param, retry_after_s)
        self.code, self.message, self.param = code, message, param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        make = partial(type(self), param=self.param, retry_after_s=self.retry_after_s)
        return make, (self.code, self.message)


def unknown_item(where: str) -> Refused:
    """Return the error for a body with an item id that no answer of the session contains.

    An item is a part of an answer, such as a tool call. where: position of the id in the body.
    """
    return Refused(
        RefusalCode.INVALID_REQUEST,
        f"{where}: no answer of this session has an item with this id; send the item itself",
        param=where,
    )


def unavailable(why: str) -> Refused:
    """Return the error (HTTP 503) for a request that may be sent again unchanged."""
    return Refused(RefusalCode.NOT_AVAILABLE, why, retry_after_s=RETRY_AFTER_S)
