"""Reading tool calls out of a decoded assistant turn.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Nothing here raises on any text:
what cannot be read becomes a typed `MalformedCall` with a sentence that the policy may be shown.
Called by the turn loop for environments that declare tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from actors.environment.protocol import MalformedCall, MalformedReason, ToolCall, ToolSchema

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
END_OF_THOUGHT = "</think>"
MAX_CALL_CHARS = 20_000

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def visible_text(text: str) -> str:
    """What follows the last `</think>`, stripped: a thought is not an answer and calls nothing."""
    return text.rpartition(END_OF_THOUGHT)[2].strip()


def parse_tool_calls(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[ToolCall | MalformedCall, ...]:
    """Read every call of a turn, in order.

    Args: text: the decoded turn. tools: what the environment declared.
    Returns: one entry a call; an opened call without an end and an end without a beginning are
    malformed entries too. A text without any markup gives ().
    """
    by_name = {tool.name: tool for tool in tools}
    return tuple(
        body if isinstance(body, MalformedCall) else _parse_call(body, by_name)
        for body in _bodies(visible_text(text))
    )


def _bodies(text: str) -> Iterator[str | MalformedCall]:
    position = 0
    while True:
        start = text.find(OPEN, position)
        end = text.find(CLOSE, position)
        if start < 0 and end < 0:
            return
        if start < 0 or 0 <= end < start:
            yield _malformed(MalformedReason.UNOPENED, f"{CLOSE} without {OPEN}.")
            position = end + len(CLOSE)
        elif end < 0:
            yield _malformed(MalformedReason.UNCLOSED, f"{OPEN} without {CLOSE}.")
            return
        else:
            yield text[start + len(OPEN) : end]
            position = end + len(CLOSE)


def _parse_call(body: str, tools: Mapping[str, ToolSchema]) -> ToolCall | MalformedCall:
    call = _load(body)
    if isinstance(call, MalformedCall):
        return call
    name = call.get("name")
    if not isinstance(name, str) or name not in tools:
        return _malformed(
            MalformedReason.UNKNOWN_TOOL, f"No such tool. Tools: {', '.join(tools) or 'none'}."
        )
    arguments = call.get("arguments", {})
    # Some models write the arguments as a JSON text within the JSON, as the OpenAI API does.
    if isinstance(arguments, str):
        arguments = _load(arguments)
        if isinstance(arguments, MalformedCall):
            return arguments
    if not isinstance(arguments, dict):
        return _malformed(MalformedReason.NOT_AN_OBJECT, "Arguments must be a JSON object.")
    return _check_arguments(name, arguments, tools[name].parameters)


def _load(body: str) -> dict[str, Any] | MalformedCall:
    if len(body) > MAX_CALL_CHARS:
        return _malformed(MalformedReason.INVALID_JSON, "The tool call is too long.")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _malformed(MalformedReason.INVALID_JSON, "The tool call is not valid JSON.")
    if not isinstance(value, dict):
        return _malformed(MalformedReason.NOT_AN_OBJECT, "The tool call must be a JSON object.")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_arguments(
    name: str, arguments: dict[str, Any], schema: Mapping[str, Any]
) -> ToolCall | MalformedCall:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for required in schema.get("required", ()):
        if required not in arguments:
            return _malformed(MalformedReason.MISSING_ARGUMENT, f"Missing argument {required}.")
    for key, value in arguments.items():
        if key not in properties:
            # A schema without properties leaves the arguments open.
            if not properties:
                continue
            return _malformed(
                MalformedReason.UNKNOWN_ARGUMENT,
                f"Unknown argument. Arguments: {', '.join(properties)}.",
            )
        expected = properties[key].get("type")
        if not _is_of_type(value, expected):
            return _malformed(
                MalformedReason.ILL_TYPED_ARGUMENT, f"Argument {key} must be of type {expected}."
            )
    return ToolCall(name=name, arguments=arguments)


def _is_of_type(value: Any, expected: str | Sequence[str] | None) -> bool:
    if expected is None:
        return True
    names = (expected,) if isinstance(expected, str) else tuple(expected)
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _malformed(reason: MalformedReason, message: str) -> MalformedCall:
    return MalformedCall(reason=reason, message=message)
