"""Read a body in any dialect: parameters, texts, tools, calls, headers.

Every function raises only `Refused`, for any JSON. `where` is the value's position in the body,
such as `messages[3].content`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.api.problems import shown
from service.api.schemas import MAX_DEPTH, is_deeper
from service.gateway.chat import ChatRequest, Reference, RefusalCode, Refused
from service.gateway.dialects.dialect import Parameters

MAX_KEY_CHARACTERS = 255
MAX_STOPS = 64
# Largest number of ignored parameters in one request.
MAX_IGNORED = 32
MAX_OPTION_CHARACTERS = 16_384
# Arguments that the run gives to a chat template, or that decide how it is rendered.
NO_OPTIONS = frozenset(
    {
        "conversation", "conversations", "messages", "tools", "documents", "chat_template",
        "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
        "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
AUXILIARY_HEADER = "x-rayloom-auxiliary"
AUXILIARY_SUFFIX = ":auxiliary"
# Fields of a tool, and of a part of text, that have no text for the policy. Clients send parts of
# an earlier answer back with all of their fields.
_OF_TOOLS = frozenset({"type", "strict", "cache_control", "allowed_callers"})
_OF_TEXTS = frozenset(
    {
        "type", "cache_control", "citations", "annotations", "logprobs", "id", "phase",
        "signature", "provider_specific_fields",
    }
)  # fmt: skip
# Fields of a tool that are objects, and not the schema of its arguments.
_NO_SCHEMAS = frozenset({"cache_control"})
# Texts that some clients send as the arguments of a call without arguments.
_NO_ARGUMENTS = ("", "null", "None")
# The parts of a Python literal that differ from JSON. Python's own parser gets only its strings:
# other texts that a client may send make it warn or crash.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = r"\\[\\'\"abfnrtv]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"
_NEVER = r"\\\r\n\0\ud800-\udfff"
_PYTHON = re.compile(
    rf"""'(?:[^'{_NEVER}]|{_ESCAPE})*'|"(?:[^"{_NEVER}]|{_ESCAPE})*"|\b(?:True|False|None)\b"""
)
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number"}


def invalid(where: str, problem: str) -> Refused:
    """Return the error for an invalid value. problem: what was sent, and what is expected."""
    where = printable(where)
    return Refused(RefusalCode.INVALID_REQUEST, f"{where}: {problem}", param=where)


def unsupported(where: str, why: str) -> Refused:
    """Return the error for a parameter that sessions do not support. why: reason and remedy."""
    where = printable(where)
    return Refused(RefusalCode.UNSUPPORTED_PARAMETER, f"{where}: {why}", param=where)


def printable(text: str) -> str:
    """Return a client's text in a form that an answer can repeat: short, and valid in UTF-8."""
    return shown(text.encode("utf-8", "backslashreplace").decode())


def kind(value: object) -> str:
    """Return the name of a JSON value's type for an error. Example: kind([]) -> "a list"."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return _KINDS.get(type(value), "a list")


def read_body(
    body: object, parameters: Parameters, ignored: list[str] | None = None
) -> dict[str, Any]:
    """Return the body's parameters that have an effect; refuse those that are not supported.

    ignored: gets the names of unsupported parameters that can be ignored; None: refuse them too.
    """
    if not isinstance(body, dict):
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            f"the body: got {kind(body)}, expected an object; send one JSON object",
        )
    if is_deeper(body, MAX_DEPTH):
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            f"the body: lists and objects are nested more than {MAX_DEPTH} deep; flatten it",
        )
    return read_fields(body, parameters, ignored=ignored)


def read_fields(
    tree: Mapping[str, Any],
    parameters: Parameters,
    where: str = "",
    *,
    ignored: list[str] | None = None,
) -> dict[str, Any]:
    """Return the fields of an object in the body that have an effect; refuse unsupported fields.

    This does for the object what `read_body` does for the whole body.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if value is None:
            continue
        place = f"{where}.{name}" if where else name
        parameter = parameters.get(name)
        if parameter is None:
            ignore_or_refuse(ignored, place, "sessions have no such parameter; remove it")
        elif parameter.effect == "read":
            found[name] = value
        elif parameter.effect != "none" and not _is_one_of(value, parameter.harmless):
            why = f"sessions do not support this: {parameter.note}"
            ignore_or_refuse(ignored if parameter.effect == "ignorable" else None, place, why)
    return found


def ignore_or_refuse(ignored: list[str] | None, where: str, why: str) -> None:
    """Add an unsupported parameter to the list `ignored`, or refuse the request.

    why: the reason if it is refused. Raises: Refused if `ignored` is None or full.
    """
    if ignored is None:
        raise unsupported(where, why)
    if len(ignored) >= MAX_IGNORED:
        raise unsupported(where, f"more than {MAX_IGNORED} parameters are unknown; remove them")
    ignored.append(printable(where))


def read_stop(value: object, where: str) -> tuple[str, ...]:
    """Read a stop string or a list of them. An answer's text is cut before a stop string."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list):
        raise invalid(where, f"got {kind(value)}, expected text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise invalid(where, f"got {len(texts)} texts, expected at most {MAX_STOPS}")
    found = [read_text(text, f"{where}[{index}]") for index, text in enumerate(texts)]
    return tuple(text for text in found if text)


def _read_template_options(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    options = read_object(value, where)
    for name in options:
        place = f"{where}.{printable(name)}"
        if read_text(name, place) in NO_OPTIONS:
            raise unsupported(place, "the run decides this option; remove it")
    try:
        size = len(json.dumps(options, allow_nan=False, ensure_ascii=False).encode())
    except ValueError:
        raise invalid(
            where, "expected JSON with finite numbers, and text that UTF-8 can encode"
        ) from None
    if size > MAX_OPTION_CHARACTERS:
        raise invalid(where, f"got {size} characters, expected at most {MAX_OPTION_CHARACTERS}")
    return options


def _is_one_of(value: object, values: Sequence[object]) -> bool:
    # True and 1 are equal in Python, but not in JSON.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def read_text(value: object, where: str) -> str:
    """Return the value if it is text that UTF-8 can encode; refuse any other."""
    if not isinstance(value, str):
        raise invalid(where, f"got {kind(value)}, expected text")
    if not _is_utf8(value):
        raise invalid(where, "got half of a surrogate pair, expected text that UTF-8 can encode")
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_flag(value: object, where: str) -> bool:
    """Read a boolean; None is false."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(where, f"got {kind(value)}, expected true or false")


def read_object(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise invalid(where, f"got {kind(value)}, expected an object")


def read_objects(value: object, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a list of objects, each with its position; None is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(where, f"got {kind(value)}, expected a list")
    places = [f"{where}[{index}]" for index in range(len(value))]
    return [(place, read_object(each, place)) for place, each in zip(places, value, strict=True)]


def read_limit(value: object, where: str) -> int | None:
    """Read the maximum number of tokens to sample; None: the client sets no maximum."""
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    # Some clients send 1024.0.
    if number is None or number % 1 or number < 1:
        got = kind(value) if number is None else printable(repr(value))
        raise invalid(where, f"got {got}, expected a whole number, at least 1")
    return int(number)


def read_content(value: object, where: str, *, texts: Collection[str]) -> str:
    """Read a message's content: text, a list of text parts, or null.

    Parts are joined by newlines. Images, sounds and files are refused. texts: values of `type` that
    mark a part as text.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return read_text(value, where)
    if not isinstance(value, list):
        raise invalid(where, f"got {kind(value)}, expected text or a list of parts of text")
    return "\n".join(
        read_text_part(part, place, texts=texts) for place, part in read_objects(value, where)
    )


def check_given(content: object, where: str) -> None:
    """Refuse a message whose content is missing or null: it would be read as an empty text."""
    if content is None:
        raise invalid(f"{where}.content", "got null, expected text or a list of parts of text")


def read_text_part(part: Mapping[str, Any], where: str, *, texts: Collection[str]) -> str:
    """Read the text of one part of a message's content. texts: as in `read_content`."""
    check_type(part, where, known=texts)
    check_no_text(part, where, known=_OF_TEXTS | {"text"}, remedy="put it into `text`")
    return read_text(part.get("text"), f"{where}.text")


def check_no_text(
    tree: Mapping[str, Any], where: str, *, known: Collection[str], remedy: str
) -> None:
    """Refuse an unknown field that has a text: the prompt would not show it.

    known: names of fields that may have texts. remedy: where to put the text instead.
    """
    for name, value in tree.items():
        if name not in known and _has_text(value):
            raise unsupported(
                f"{where}.{name}",
                f"got an unknown field with a text, which no prompt would show; {remedy}, or "
                "remove the field",
            )


def check_tool_fields(
    tree: Mapping[str, Any], where: str, *, known: Collection[str], remedy: str
) -> None:
    """Refuse a tool if an unknown field of the tool contains text, which no prompt would show.

    known: further fields that may contain text; common fields such as `type` are always allowed.
    remedy: where to put the text instead.
    """
    check_no_text(tree, where, known=_OF_TOOLS.union(known), remedy=remedy)


def _has_text(value: object) -> bool:
    """Return whether a JSON value contains text. Keys count as text; white space does not."""
    if isinstance(value, list):
        return any(map(_has_text, value))
    return bool(value.strip() if isinstance(value, str) else isinstance(value, dict) and value)


def check_type(part: Mapping[str, Any], where: str, *, known: Collection[str]) -> str:
    """Read the `type` of an object, which must be one of `known`."""
    found = read_text(part.get("type"), f"{where}.type")
    if found not in known:
        raise unsupported(
            f"{where}.type",
            f"got {printable(found)!r}, expected one of {', '.join(sorted(known))}; the policy "
            "reads only text, and calls functions that the client runs",
        )
    return found


def joined(texts: Sequence[str]) -> str | None:
    """Join pieces of reasoning by newlines; None if all are empty."""
    return "\n".join(text for text in texts if text) or None


def make_message(role: Role, content: str, *, where: str, **rest: Any) -> Message:
    """Make a message. rest: the message's other fields."""
    try:
        return Message(role=role, content=content, **rest)
    except (TypeError, ValueError) as error:
        raise invalid(where, str(error)) from error


def make_tool(tree: Mapping[str, Any], where: str, *, parameters: str) -> ToolSchema:
    """Read a function that the client declares as a tool.

    parameters: name of the field that has the JSON schema of the function's arguments.
    """
    name = read_text(tree.get("name"), f"{where}.name")
    if not name:
        raise invalid(f"{where}.name", "got an empty text, expected a name")
    described = tree.get("description")
    description = "" if described is None else read_text(described, f"{where}.description")
    schema = tree.get(parameters)
    if schema is None:
        check_no_schema(tree, where, parameters=parameters)
        schema = {"type": "object", "properties": {}}
    check_tool_fields(
        tree,
        where,
        known={"name", "description", parameters},
        remedy=f"put it into `description` or `{parameters}`",
    )
    try:
        return ToolSchema(
            name=name,
            description=description,
            parameters=read_object(schema, f"{where}.{parameters}"),
        )
    except (TypeError, ValueError) as error:
        raise invalid(where, str(error)) from error


def check_no_schema(tree: Mapping[str, Any], where: str, *, parameters: str) -> None:
    """Refuse a tool that seems to have the schema of its arguments in a wrong field.

    Otherwise the prompt would not show the schema. parameters: name of the right field.
    """
    for name, value in tree.items():
        if isinstance(value, dict) and name not in _NO_SCHEMAS:
            raise invalid(
                f"{where}.{name}",
                f"got an object, expected the schema of the arguments as `{parameters}`; rename it",
            )


def check_names(tools: Sequence[ToolSchema], where: str) -> tuple[ToolSchema, ...]:
    """Check that tools have different names: a call identifies its tool by the name."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(
                f"{where}[{index}]", f"{printable(name)!r} is declared twice, expected once"
            )
    return tuple(tools)


def check_tool_choice(
    value: object, where: str, *, auto: str, none: str, ignored: list[str] | None = None
) -> bool:
    """Return whether the policy may call tools.

    auto, none: the dialect's words for "may call" and "must not call". Any other choice, such as a
    forced call, is added to the list `ignored`. If the list is None, the choice is refused.
    """
    if value is None or value == auto:
        return True
    if value == none:
        return False
    if not isinstance(value, str | dict):
        raise invalid(where, f"got {kind(value)}, expected {auto!r} or {none!r}")
    ignore_or_refuse(
        ignored,
        where,
        f"sessions cannot force calls, expected {auto!r} or {none!r}; ask for the call in a "
        "message",
    )
    return True


def make_call(
    name: object, arguments: object, call_id: object, *, where: str, key: str = "arguments"
) -> ToolCall:
    """Read a tool call in the history that a client sends.

    arguments: an object, or its JSON text. key: name of the call's field that has the arguments.
    """
    return ToolCall(
        name=read_text(name, f"{where}.name"),
        arguments=_read_arguments(arguments, f"{where}.{key}"),
        id="" if call_id is None else read_text(call_id, f"{where}.id"),
    )


def _read_arguments(value: object, where: str) -> dict[str, Any]:
    """Read a call's arguments: an object, its JSON text or its Python literal."""
    found = value
    if value is None or (isinstance(value, str) and value.strip() in _NO_ARGUMENTS):
        found = {}
    elif isinstance(value, str):
        found = _parsed(value)
    if not isinstance(found, dict) or is_deeper(found, MAX_DEPTH):
        raise invalid(
            where,
            "expected the JSON text of one object, at most "
            f"{MAX_DEPTH} levels deep; send the arguments as you received them",
        )
    return found


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_PYTHON.sub(_in_json, text))
    except (ValueError, RecursionError):
        return None


def _in_json(found: re.Match[str]) -> str:
    return _CONSTANTS.get(found[0]) or json.dumps(ast.literal_eval(found[0]))


def read_turn_id(value: object, where: str, *, prefix: str) -> str:
    """Read the id of an answer, and return the id of its turn.

    prefix: text with which the ids of answers begin; the rest is the turn's id.
    """
    found = read_text(value, where)
    turn_id = found.removeprefix(prefix)
    if not turn_id or turn_id == found:
        raise invalid(
            where, f"got {printable(found)!r}, expected the `id` of an answer of this session"
        )
    return turn_id


def make_request(
    headers: Mapping[str, str],
    *,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
    template_options: object = None,
    may_call: bool = True,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    references: Sequence[Reference] = (),
    ignored: Sequence[str] | None = None,
    continues: str = "",
    keeps_tools: bool = False,
    instructions: str | None = None,
) -> ChatRequest:
    """Make a request from the values that a dialect has read.

    The headers contain the idempotency key, and say whether the request is a retry. A request is
    marked as auxiliary, which means not part of the task, if a header says so or if the model's
    name ends with AUXILIARY_SUFFIX.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    key = lower.get("idempotency-key", "")
    if len(key) > MAX_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
        raise invalid(
            "Idempotency-Key",
            f"expected at most {MAX_KEY_CHARACTERS} printable ASCII characters, such as a UUID",
        )
    auxiliary = lower.get(AUXILIARY_HEADER, "0")
    if auxiliary not in ("0", "1"):
        raise invalid(
            "X-Rayloom-Auxiliary",
            f"got {printable(auxiliary)!r}, expected 1 for a call outside the task, which is not "
            "trained, or no such header",
        )
    retries = lower.get("x-stainless-retry-count", "")
    return ChatRequest(
        messages=tuple(messages),
        tools=tuple(tools),
        template_options=_read_template_options(template_options, "chat_template_kwargs"),
        may_call=may_call,
        max_tokens=max_tokens,
        stop=tuple(stop),
        references=tuple(references),
        ignored=tuple(ignored or ()),
        continues=continues,
        keeps_tools=keeps_tools,
        instructions=instructions,
        is_auxiliary=model.endswith(AUXILIARY_SUFFIX) or auxiliary == "1",
        is_retry=retries.isascii() and retries.isdigit() and retries.strip("0") != "",
        idempotency_key=key,
    )
