"""A dialect: pure functions that translate between a provider's protocol and the gateway's types.

    try:
        request, style = dialect.read(body, headers)
        reply = sample(request)  # the session's part
        answer = dialect.answer(reply, style)
        stream = dialect.events(reply, style)  # the same answer, if style.streams
    except Refused as refused:
        answer, status = dialect.error(refused), refused.code.status

A body may be any JSON. A dialect's tables of parameters say which parameters are read, which have
no effect, and which are refused by name. The documentation is made from these tables too. A
parameter that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from service.gateway.chat import ChatReply, ChatRequest, RefusalCode, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The effect of one parameter in a client's body, and a note about it for the docs."""

    effect: Literal["read", "none", "refused", "ignorable"]
    """none: any value is accepted and changes nothing, because the run decides, or nothing depends
    on it. ignorable: the parameter is refused, but `sessions.unsupported: ignore` accepts and
    counts it, because the answer has the same form without it."""
    note: str
    """Text for the docs: the form of the value, or why it has no effect or is refused."""
    harmless: tuple[object, ...] = ()
    """Values of a refused or ignorable parameter that change nothing, and are accepted."""


Parameters = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """The form in which a client wants its answer; only the HTTP routes use it."""

    model: str
    """The model's name that the client sent; the answer repeats it."""
    streams: bool
    shows_usage: bool = False
    """Whether a stream ends with token counts; used only if the dialect has this option."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats from the request, because the provider's API does so."""


class Reads(Protocol):
    """The type of the function `Dialect.read`, which makes a `ChatRequest` from a body."""

    def __call__(
        self, body: object, headers: Mapping[str, str], *, ignores: bool = False
    ) -> tuple[ChatRequest, AnswerStyle]:
        """Translate a client's parsed body; return the request and the form of its answer.

        headers: HTTP headers, whose names may have any case. ignores: whether to accept unsupported
        parameters that do not change the form of the answer (`ChatRequest.ignored`).
        Raises: Refused, and no other error.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One provider's protocol for calling a model, as pure functions."""

    name: str
    path: str
    """Path of the dialect's POST route, after the session's address."""
    parameters: Parameters
    """The parameters of the body, each with its effect."""
    heartbeat: bytes
    """Bytes that a stream repeats before its first event; clients ignore them."""
    read: Reads
    answer: Callable[[ChatReply, AnswerStyle], dict[str, Any]]
    """Makes the whole answer, as JSON."""
    events: Callable[[ChatReply, AnswerStyle], Iterator[bytes]]
    """Makes all server-sent events of a streamed answer, including the last one."""
    error: Callable[[Refused], dict[str, Any]]
    """Makes the body of the answer to a refused request; its HTTP status is `code.status`."""
    error_event: Callable[[Refused], bytes]
    """Makes the event that ends a stream if the request is refused after its first heartbeat."""
    count_path: str = ""
    """Path of the POST route that counts a prompt's tokens; empty: the dialect has none."""
    counted: Callable[[int], Mapping[str, int | str]] | None = None
    """Maps a prompt's number of tokens to the answer of the route `count_path`, as JSON."""


_WORTH_ANOTHER_TRY = {RefusalCode.TOO_MANY_REQUESTS, RefusalCode.NOT_AVAILABLE}


def error_headers(refused: Refused) -> dict[str, str]:
    """Return the headers with which an error answer says whether and when to retry.

    Without these headers the SDKs would also repeat a request that was refused with 409.
    """
    if refused.code not in _WORTH_ANOTHER_TRY:
        return {"x-should-retry": "false"}
    if refused.retry_after_s is None:
        return {}
    return {"retry-after": str(refused.retry_after_s)}


def model_answer(name: str, *, created_at: float) -> dict[str, int | str]:
    """Return the body of GET /v1/models/NAME, with the fields of both OpenAI and Anthropic.

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
    """Return the body of GET /v1/models: a list of the one model, which every dialect can read."""
    return {
        "object": "list",
        "data": [model_answer(name, created_at=created_at)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }


def taken(note: str) -> Parameter:
    return Parameter(effect="read", note=note)


def without_effect(note: str) -> Parameter:
    return Parameter(effect="none", note=note)


def refused(note: str, *harmless: object) -> Parameter:
    return Parameter(effect="refused", note=note, harmless=harmless)


def ignorable(note: str, *harmless: object) -> Parameter:
    """Declare a parameter that is ignored or refused, as the setting `sessions.unsupported` says.

    note: the reason why it is not supported. harmless: values that are always accepted, because
    they change nothing.
    """
    return Parameter(effect="ignorable", note=note, harmless=harmless)


BOOKKEEPING = "nothing is billed, stored or cached by it"
TRAINED = "the policy's training decides this"
UNCONSTRAINED = "sampling cannot be constrained; ask for the form in a message"
OWN_PROBABILITIES = (
    "tokens are sampled with the policy's own probabilities; send the request without this"
)
OWN_SAMPLING = "the run decides how a turn is sampled and read; send the request without this"
SHOWN_TOKENS = "create the session with shows_tokens"
OWN_TEMPLATE = "the run trains with its own chat template"
OWN_TURNS = "the policy begins its own turns"
ONLY_TEXT = "the policy reads and writes only text"
IN_THE_CLIENT = "tools run in the client; declare a function"

MODEL = taken("any text; `:auxiliary` at its end marks a call outside the task")
MAX_TOKENS = taken("at least 1; the session's own limit holds too")
STREAM = taken("the answer is sampled whole, then sent as events")
STOP = taken(
    "the answer's text ends before the first of these texts; the sampled tokens are trained whole. "
    "Reasoning and calls are not searched for them"
)

# Parameters of vLLM that some clients always send, with the values that change nothing.
_NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "bad_words": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_reasoning": True,
    "priority": 0,
}
COMMON: Parameters = {
    "model": MODEL,
    "stream": STREAM,
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "seed"),
        without_effect("the run decides the sampling"),
    ),
    "presence_penalty": ignorable(OWN_PROBABILITIES, 0),
    "frequency_penalty": ignorable(OWN_PROBABILITIES, 0),
    "repetition_penalty": ignorable(OWN_PROBABILITIES, 1),
    **{name: ignorable(OWN_SAMPLING, neutral) for name, neutral in _NEUTRAL.items()},
    **dict.fromkeys(
        ("metadata", "user", "store", "service_tier", "safety_identifier", "cache_control"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ignorable(UNCONSTRAINED),
    ),
    "chat_template": refused(OWN_TEMPLATE),
    "chat_template_kwargs": taken(
        "options of the chat template, such as enable_thinking; they belong to the conversation, "
        "as tools do"
    ),
    "logit_bias": ignorable(UNCONSTRAINED, {}),
    "documents": refused("send them in a message", []),
    "add_generation_prompt": refused(OWN_TURNS, True),
    "continue_final_message": refused(OWN_TURNS, False),
    "echo": refused(OWN_TURNS, False),
    "logprobs": refused(SHOWN_TOKENS, False),
    "prompt_logprobs": refused(SHOWN_TOKENS),
    "return_token_ids": refused(SHOWN_TOKENS, False),
    "top_logprobs": refused(SHOWN_TOKENS, 0),
    "moderation": ignorable("there is no moderation"),
}
"""Parameters that every dialect has: a provider's client may call another provider's routes."""
