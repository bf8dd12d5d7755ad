"""Check the tool calls of an assistant turn against the declared tools; report each bad call.

`check_calls` checks calls that vLLM's parser has read, in whatever format the model writes.
`parse_tool_calls` reads and checks calls without this parser, in the format of most chat templates:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>

The built-in tiny model writes this format. If vLLM's parser of this format (`hermes`) cannot read a
text, `parse_tool_calls` finds what is wrong. No text raises an error: an unreadable call becomes a
`MalformedCall`, with a sentence that the policy may be shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from actors.environment.policy import ParsedCall
from actors.environment.protocol import MalformedCall, MalformedReason, ToolCall, ToolSchema

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
END_OF_THOUGHT = "</think>"
MAX_CALL_CHARS = 20_000
# Python's JSON and templates fail at deeper values, at a depth that varies with the caller's.
MAX_CALL_DEPTH = 200

_THOUGHT_MARKS = (
    ("<think>", END_OF_THOUGHT),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
# A generation prompt may have opened the thought, so that the text has only its end.
_INLINED_THOUGHT = re.compile(
    "|".join(
        rf"\s*{re.escape(start)}(?P<thought{number}>.*?){re.escape(end)}"
        for number, (start, end) in enumerate(_THOUGHT_MARKS)
    ),
    re.DOTALL,
)

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
    """Return the text after the last `</think>`, stripped; without this tag, the whole text.

    The thought before the tag is left out, because neither an answer nor calls are read from it.
    """
    return text.rpartition(END_OF_THOUGHT)[2].strip()


def split_thought(content: str) -> tuple[str | None, str]:
    """Split a content into the thought at its beginning and the rest.

    The markers of thoughts of all known model families are recognised.

    Returns: the thought, stripped (None if there is none), and the rest.
    Example: split_thought("<think>hm</think>4") -> ("hm", "4")
    """
    found = _INLINED_THOUGHT.match(content)
    if found is None:
        return None, content
    thought = next(text for text in found.groups() if text is not None)
    return thought.strip(), content[found.end() :]


def without_thought(content: str) -> str:
    """Return a reply without its thoughts: the text after the last marker that ends a thought.

    In later turns, chat templates show only this text of the reply.
    """
    for _, end in _THOUGHT_MARKS:
        content = content.rpartition(end)[2]
    return content


def check_calls(
    calls: Iterable[ParsedCall | MalformedCall], tools: Sequence[ToolSchema]
) -> tuple[ToolCall | MalformedCall, ...]:
    """Check that calls name declared tools and fit their schemas; return the calls or their faults.

    Returns: one entry for each call that a parser read, in order.
    """
    by_name = {tool.name: tool for tool in tools}
    return tuple(
        call
        if isinstance(call, MalformedCall)
        else _check_call(call.name, call.arguments, by_name, call_id=call.id)
        for call in calls
    )


def parse_tool_calls(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[ToolCall | MalformedCall, ...]:
    """Return the calls in the text of a turn, in order.

    Args: text: the decoded turn. tools: the tools that the environment declared.
    Returns: one entry for each call, and a `MalformedCall` for a tag `<tool_call>` or
    `</tool_call>` without the other tag. The result is empty for a text without these tags.
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
            yield _malformed("unopened", f"{CLOSE} without {OPEN}.")
            position = end + len(CLOSE)
        elif end < 0:
            yield _malformed("unclosed", f"{OPEN} without {CLOSE}.")
            return
        else:
            yield text[start + len(OPEN) : end]
            position = end + len(CLOSE)


def _parse_call(body: str, tools: Mapping[str, ToolSchema]) -> ToolCall | MalformedCall:
    call = _load(body)
    if isinstance(call, MalformedCall):
        return call
    if not isinstance(call, dict):
        return _malformed("not_an_object", "The tool call must be a JSON object.")
    return _check_call(call.get("name"), call.get("arguments", {}), tools)


def _check_call(
    name: object, arguments: Any, tools: Mapping[str, ToolSchema], *, call_id: str = ""
) -> ToolCall | MalformedCall:
    if not isinstance(name, str) or name not in tools:
        return _malformed("unknown_tool", f"No such tool. Tools: {', '.join(tools) or 'none'}.")
    arguments = _unpacked(arguments)
    if isinstance(arguments, MalformedCall):
        return arguments
    if not isinstance(arguments, dict):
        return _malformed("not_an_object", "Arguments must be a JSON object.")
    return _check_arguments(name, arguments, tools[name].parameters, call_id=call_id)


def arguments_of(call: ParsedCall) -> dict[str, Any] | None:
    """Return the unchecked arguments of a parsed call; None if they are not a JSON object."""
    arguments = _unpacked(call.arguments)
    return arguments if isinstance(arguments, dict) else None


def _unpacked(arguments: Any) -> Any:
    """Return a call's arguments, decoded if they are JSON text; MalformedCall if this fails."""
    for _ in range(2):
        if isinstance(arguments, str):
            arguments = _load(arguments)
    return arguments


def _load(text: str) -> Any:
    if len(text) > MAX_CALL_CHARS:
        return _malformed("invalid_json", "The tool call is too long.")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # An escape can make a lone surrogate, which a message must not contain.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _malformed("invalid_json", "The tool call is not valid JSON.")
    if _is_deeper(value, MAX_CALL_DEPTH):
        return _malformed("invalid_json", "The tool call is nested too deeply.")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit < 0 or any(_is_deeper(each, limit - 1) for each in inner)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_arguments(
    name: str, arguments: dict[str, Any], schema: Mapping[str, Any], *, call_id: str
) -> ToolCall | MalformedCall:
    for required in schema.get("required", ()):
        if required not in arguments:
            return _malformed("missing_argument", f"Missing argument {required}.")
    for key, value in arguments.items():
        for declared in _schemas_of(key, schema):
            # The schema `true` allows any value; `false` means that there is no such argument.
            if declared is True:
                continue
            if declared is False:
                known = ", ".join(schema.get("properties", ())) or "none"
                return _malformed("unknown_argument", f"Unknown argument. Arguments: {known}.")
            expected = declared.get("type")
            is_null = value is None and declared.get("nullable") is True
            if not (is_null or _is_of_type(value, expected)):
                told = f"Argument {key} must be of type {expected}."
                return _malformed("ill_typed_argument", told)
    return ToolCall(name=name, arguments=arguments, id=call_id)


def with_integers(
    calls: Sequence[ToolCall | MalformedCall], tools: Sequence[ToolSchema]
) -> tuple[ToolCall | MalformedCall, ...]:
    """Return checked calls with `5` in place of `5.0` where an integer is declared.

    An environment gets these calls, because a Python function, for example `range`, may need an
    `int`. The chat keeps the original ones, so that it contains what the policy wrote.
    """
    by_name = {tool.name: tool.parameters for tool in tools}
    return tuple(
        replace(call, arguments=_with_integers(call.arguments, by_name[call.name]))
        if isinstance(call, ToolCall)
        else call
        for call in calls
    )


def _with_integers(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(arguments)
    for key in found:
        for declared in _schemas_of(key, schema):
            found[key] = _as_integer(found[key], declared)
    return found


def _as_integer(value: Any, schema: Any) -> Any:
    """Convert a whole number such as 5.0 to `int` if integers are the only numbers allowed."""
    choices = list(_choices(schema))
    if isinstance(value, list):
        of_items = {"anyOf": [each["items"] for each in choices if "items" in each]}
        return [_as_integer(item, of_items) for item in value]
    given = [each.get("type") for each in choices]
    kinds = [
        kind for each in given for kind in (each if isinstance(each, list | tuple) else [each])
    ]
    is_integer = "integer" in kinds and "number" not in kinds
    return int(value) if is_integer and _is_whole(value) else value


def _choices(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and the schemas under its `anyOf` and `oneOf`."""
    if isinstance(schema, Mapping):
        yield schema
        for where in ("anyOf", "oneOf"):
            inner = schema.get(where)
            for each in inner if isinstance(inner, list | tuple) else ():
                yield from _choices(each)


def _schemas_of(key: str, schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the schemas that the argument `key` of a tool must satisfy.

    The schema True allows any argument, and the schema False refuses every argument.
    """
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties") or {}
    named = [properties[key]] if key in properties else []
    for pattern, each in patterns.items():
        try:
            named += [each] if re.search(pattern, key) else []
        except (re.error, OverflowError, RecursionError):
            # The patterns are JavaScript's; one that Python cannot read allows any argument.
            named.append(True)
    # Without `additionalProperties`, a tool that declares no arguments accepts any argument.
    others = schema.get("additionalProperties")
    return named or [not (properties or patterns) if others is None else others]


def _is_of_type(value: Any, expected: str | Sequence[str] | None) -> bool:
    if expected is None:
        return True
    names = (expected,) if isinstance(expected, str) else tuple(expected)
    if isinstance(value, bool):
        return "boolean" in names
    if "integer" in names and _is_whole(value):
        return True
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _malformed(reason: MalformedReason, message: str) -> MalformedCall:
    return MalformedCall(reason=reason, message=message)
