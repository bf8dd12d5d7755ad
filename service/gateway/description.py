"""Describe the routes of OpenAI's and Anthropic's protocols in the OpenAPI document.

The text is made from each protocol's table of parameters and its function for errors (`Dialect`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.api.feed import EVENT_SCHEMA
from service.gateway.chat import RefusalCode, Refused
from service.gateway.dialects.dialect import Dialect, Parameter

_HELLO = [{"role": "user", "content": "Hello."}]
SMALLEST: Mapping[str, dict[str, Any]] = {
    "openai-chat": {"model": "policy", "messages": _HELLO},
    "anthropic-messages": {"model": "policy", "messages": _HELLO},
    "openai-responses": {"model": "policy", "input": "Hello."},
}
"""The smallest valid body of each dialect; its keys are the required parameters."""
_PREFIXES = {
    "read": "",
    "none": "Accepted without effect: ",
    "refused": "Refused: ",
    "ignorable": "Refused, or ignored with sessions.unsupported: ",
}
_SAID = {
    400: "a parameter that a session does not support, a full context, or a limit of the session",
    401: "no key of this session",
    403: "a key of the session, but not its agent's",
    404: "no such session, or no such route",
    409: "the request contradicts what the session has",
    410: "the session has ended",
    429: "too many requests; Retry-After says when to try again",
    503: "neither the engine nor the database answered in time; the same request may be sent again",
}

_SAMPLED: dict[str, Any] = {
    "description": "the turn, or with `stream` its events; `X-Policy-Version` is the version that "
    "sampled it",
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": EVENT_SCHEMA},
    },
}
_COUNTED: dict[str, Any] = {
    "description": "number of tokens in the prompt of this request",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


def described(dialect: Dialect, *, counts: bool = False) -> dict[str, Any]:
    """Return the `openapi_extra` of a dialect's route: its body and answers.

    FastAPI cannot derive them. counts: whether the route only counts a prompt's tokens, instead of
    sampling a turn.
    """
    smallest = SMALLEST[dialect.name]
    body = {
        "type": "object",
        "properties": {name: _property(each) for name, each in dialect.parameters.items()},
        "required": list(smallest),
        "additionalProperties": False,
    }
    answers: dict[str, Any] = {
        str(status): {
            "description": description,
            "content": {
                "application/json": {
                    "schema": {"type": "object", "required": ["error"]},
                    "examples": _examples(dialect, status),
                }
            },
        }
        for status, description in _SAID.items()
    }
    answers["200"] = _COUNTED if counts else _SAMPLED
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": smallest}},
        },
        "responses": answers,
    }


def _property(parameter: Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _PREFIXES[parameter.effect] + parameter.note}
    if parameter.effect in ("refused", "ignorable"):
        # The values of a refused parameter that are accepted nevertheless.
        found["enum"] = [None, *parameter.harmless]
    return found


def _examples(dialect: Dialect, status: int) -> dict[str, Any]:
    return {
        code.value: {"value": dialect.error(Refused(code, "what was got, and what to do"))}
        for code in RefusalCode
        if code.status == status
    }
