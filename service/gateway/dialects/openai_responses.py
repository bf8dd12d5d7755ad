"""The dialect of OpenAI's Responses API.

A request has all items of the conversation, or only the items that follow an earlier answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import (
    ChatReply,
    ChatRequest,
    Part,
    Reference,
    Refused,
    unknown_item,
)
from service.gateway.dialects.dialect import (
    BOOKKEEPING,
    COMMON,
    MAX_TOKENS,
    SHOWN_TOKENS,
    TRAINED,
    UNCONSTRAINED,
    AnswerStyle,
    Dialect,
    Parameters,
    ignorable,
    refused,
    taken,
    without_effect,
)
from service.gateway.dialects.openai_chat import error
from service.gateway.dialects.reading import (
    check_given,
    check_names,
    check_tool_choice,
    check_tool_fields,
    check_type,
    invalid,
    joined,
    kind,
    make_call,
    make_message,
    make_request,
    make_tool,
    printable,
    read_body,
    read_content,
    read_fields,
    read_flag,
    read_limit,
    read_object,
    read_objects,
    read_text,
    read_turn_id,
    unsupported,
)
from service.gateway.dialects.sending import COMMENT, event, pieces, shown_calls, shown_tokens

PREFIX = "resp_"
# An id with more digits in the index of its call is not ours.
MAX_DIGITS = 10
# The value of `include` that is refused, because an answer cannot have these data.
LOGPROBS = "message.output_text.logprobs"

PARAMETERS: Parameters = {
    **COMMON,
    "input": taken(
        "text, or items: messages, reasoning, calls of functions and their outputs, and references "
        "to items of this session's answers"
    ),
    "instructions": taken(
        "the first system message; with `previous_response_id` they replace earlier instructions, "
        "which stay if there are no new ones"
    ),
    "previous_response_id": taken("an answer of this session, which the input follows"),
    "tools": taken(
        "functions, also in namespaces: the policy knows them as NAMESPACE.NAME; `strict`, and a "
        "namespace's description, have no effect"
    ),
    "tool_choice": taken("`auto`, or `none`: no call is read out of the reply"),
    "max_output_tokens": MAX_TOKENS,
    "text": taken("`verbosity` has no effect"),
    **dict.fromkeys(("parallel_tool_calls", "reasoning"), without_effect(TRAINED)),
    "max_tool_calls": without_effect("it limits tools that a server runs"),
    "include": taken(
        f"`{LOGPROBS}` is refused: {SHOWN_TOKENS}; for the other names there is nothing to add"
    ),
    "stream_options": without_effect("nothing is padded"),
    "truncation": without_effect("the history is what the client sends"),
    "context_management": without_effect("the history is what the client sends"),
    "client_metadata": without_effect(BOOKKEEPING),
    "access_programs": without_effect(BOOKKEEPING),
    "background_options": without_effect("`background` itself is refused"),
    "image": without_effect("images are refused"),
    "background": refused("wait for the answer, or read the stream", False),
    "conversation": refused("use `previous_response_id`, or send the whole input"),
    "prompt": refused("send the prompt's text itself"),
}

MESSAGE_PARAMETERS: Parameters = {
    "type": taken("message; it may be missing"),
    "role": taken("system, developer (which is system), user or assistant"),
    "content": taken("text or parts of text, which are joined by newlines"),
    **dict.fromkeys(("id", "status", "phase"), without_effect("not a part of the text")),
}

_TEXT: Parameters = {
    "format": ignorable(UNCONSTRAINED, {"type": "text"}),
    "verbosity": without_effect(TRAINED),
}
_TEXTS = {"input_text", "output_text", "text"}
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_ITEMS = {"message", "reasoning", "function_call", "function_call_output", "item_reference"}
# Prefixes of the ids of an answer's items.
_PARTS: dict[str, Part] = {"rs_": "reasoning", "msg_": "content", "fc_": "call"}


def read(
    body: object, headers: Mapping[str, str], *, ignores: bool = False
) -> tuple[ChatRequest, AnswerStyle]:
    """Return the request in a body, and the wanted form of the answer (`Dialect.read`)."""
    ignored: list[str] | None = [] if ignores else None
    given = read_body(body, PARAMETERS, ignored)
    model = read_text(given.get("model"), "model")
    messages, references = _messages(given.get("input"))
    previous = given.get("previous_response_id")
    continues = ""
    if previous is not None:
        continues = read_turn_id(previous, "previous_response_id", prefix=PREFIX)
    instructions = given.get("instructions")
    if instructions is not None:
        instructions = read_text(instructions, "instructions")
        if instructions and not continues:
            messages.insert(0, make_message(Role.SYSTEM, instructions, where="instructions"))
            references = [replace(each, message=each.message + 1) for each in references]
    read_fields(read_object(given.get("text", {}), "text"), _TEXT, "text", ignored=ignored)
    tools, shown_tools = _tools(given.get("tools"))
    may_call = check_tool_choice(
        given.get("tool_choice"), "tool_choice", auto="auto", none="none", ignored=ignored
    )
    _check_include(given.get("include"))
    limit = read_limit(given.get("max_output_tokens"), "max_output_tokens")
    request = make_request(
        headers,
        model=model,
        messages=messages,
        tools=tools,
        may_call=may_call,
        template_options=given.get("chat_template_kwargs"),
        references=references,
        ignored=ignored,
        max_tokens=limit,
        continues=continues,
        instructions=instructions,
    )
    repeated = {
        "instructions": instructions,
        "previous_response_id": previous,
        "max_output_tokens": limit,
        "tools": shown_tools,
        "tool_choice": "auto" if may_call else "none",
    }
    streams = read_flag(given.get("stream"), "stream")
    return request, AnswerStyle(model=model, streams=streams, repeated=repeated)


def _check_include(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise invalid("include", f"got {kind(value)}, expected a list of texts")
    for index, each in enumerate(value):
        if read_text(each, f"include[{index}]") == LOGPROBS:
            raise unsupported(
                f"include[{index}]", f"sessions do not support {LOGPROBS}: {SHOWN_TOKENS}"
            )


class _Reader:
    """Makes messages from the items of `input`; consecutive assistant items become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.references: list[Reference] = []
        self._thoughts: list[str] = []
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    @property
    def has_spoken(self) -> bool:
        """Whether the current assistant's message has content or calls already.

        Reasoning comes first in a message, so a reasoning item after these begins a new message.
        """
        return self._content is not None or bool(self._calls)

    @property
    def has_references(self) -> bool:
        """Whether the client named a part of the current assistant's message only by an id."""
        return bool(self.references) and self.references[-1].message == len(self.messages)

    def take(self, item: Mapping[str, Any], where: str) -> None:
        kind_of_item = check_type({**item, "type": _kind_of(item)}, where, known=_ITEMS)
        match kind_of_item:
            case "item_reference":
                self._refer(_reference(item, where))
            case "function_call":
                self._calls.append(_call(item, where))
            case "reasoning":
                self._think(_thought(item, where))
            case "function_call_output":
                self.close()
                self.messages.append(_output(item, where))
            case _:
                self._say(*_message(item, where), where=where)

    def close(self) -> None:
        """End the current assistant's message.

        Drop the message if its only item was reasoning without readable text.
        """
        reasoning = joined(self._thoughts)
        if self.has_spoken or reasoning is not None or self.has_references:
            self.messages.append(
                make_message(
                    Role.ASSISTANT,
                    self._content or "",
                    where="input",
                    reasoning=reasoning,
                    tool_calls=tuple(self._calls),
                )
            )
        self._thoughts, self._content, self._calls = [], None, []

    def _refer(self, reference: Reference) -> None:
        match reference.part:
            case "reasoning":
                self._think("")
            case "content":
                self._say(Role.ASSISTANT, "", where=reference.where)
            case "call":
                self._calls.append(_UNKNOWN_CALL)
        at = max(len(self._calls) - 1, 0)
        self.references.append(replace(reference, message=len(self.messages), call=at))

    def _think(self, thought: str) -> None:
        if self.has_spoken:
            self.close()
        self._thoughts.append(thought)

    def _say(self, role: Role, content: str, *, where: str) -> None:
        if role is not Role.ASSISTANT or self._content is not None:
            self.close()
        if role is Role.ASSISTANT:
            self._content = content
        else:
            self.messages.append(make_message(role, content, where=where))


def _messages(value: object) -> tuple[list[Message], list[Reference]]:
    """Return the messages of `input`, and a reference for each part that was sent only as an id."""
    if isinstance(value, str):
        return [make_message(Role.USER, value, where="input")], []
    reader = _Reader()
    for where, item in read_objects(value, "input"):
        reader.take(item, where)
    reader.close()
    if not reader.messages:
        raise invalid("input", "got no message, expected text or at least one message")
    return reader.messages, reader.references


def _kind_of(item: Mapping[str, Any]) -> object:
    """Return an item's type. An item without a type is a reference if it has only an id, otherwise
    a message."""
    kind_of_item = item.get("type")
    if kind_of_item is not None:
        return kind_of_item
    return "item_reference" if item.keys() <= {"id", "type"} and "id" in item else "message"


# A placeholder for an item that is named by its id.
_UNKNOWN_CALL = ToolCall(name="item_reference", arguments={})


def _reference(item: Mapping[str, Any], where: str) -> Reference:
    where = f"{where}.id"
    name = read_text(item.get("id"), where)
    for prefix, part in _PARTS.items():
        turn_id, number = name.removeprefix(prefix), "0"
        if part == "call":
            turn_id, _, number = turn_id.rpartition(".")
        if name.startswith(prefix) and turn_id and _is_number(number):
            return Reference(message=0, turn_id=turn_id, part=part, number=int(number), where=where)
    raise unknown_item(where)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS


def _message(item: Mapping[str, Any], where: str) -> tuple[Role, str]:
    given = read_fields(item, MESSAGE_PARAMETERS, where)
    name = read_text(given.get("role"), f"{where}.role")
    if name not in _ROLES:
        raise invalid(
            f"{where}.role", f"got {printable(name)!r}, expected one of {', '.join(_ROLES)}"
        )
    if _ROLES[name] is not Role.ASSISTANT:
        check_given(given.get("content"), where)
    return _ROLES[name], read_content(given.get("content"), f"{where}.content", texts=_TEXTS)


def _thought(item: Mapping[str, Any], where: str) -> str:
    content = read_content(
        item.get("content"), f"{where}.content", texts={"reasoning_text", "text"}
    )
    summary = read_content(item.get("summary"), f"{where}.summary", texts={"summary_text"})
    return content or summary


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    name, arguments, call_id = (item.get(key) for key in ("name", "arguments", "call_id"))
    if item.get("namespace") is not None:
        namespace = read_text(item["namespace"], f"{where}.namespace")
        name = _full_name(namespace, read_text(name, f"{where}.name"))
    return make_call(name, arguments, call_id, where=where)


def _full_name(namespace: str, name: str) -> str:
    return f"{namespace}.{name}"


def _output(item: Mapping[str, Any], where: str) -> Message:
    return make_message(
        Role.TOOL,
        read_content(item.get("output"), f"{where}.output", texts=_TEXTS),
        where=where,
        tool_call_id=read_text(item.get("call_id"), f"{where}.call_id"),
    )


def _tools(value: object) -> tuple[tuple[ToolSchema, ...], list[dict[str, Any]]]:
    """Return the functions in a request's `tools`, and the list of tools for the answer."""
    found: list[ToolSchema] = []
    shown: list[dict[str, Any]] = []
    for where, tree in read_objects(value, "tools"):
        if check_type(tree, where, known={"function", "namespace"}) == "function":
            found.append(make_tool(tree, where, parameters="parameters"))
            shown.append(_shown_tool(found[-1]))
            continue
        name = read_text(tree.get("name"), f"{where}.name")
        check_tool_fields(
            tree,
            where,
            known={"name", "description", "tools"},
            remedy="put it into the description of a function",
        )
        members = []
        for place, member in read_objects(tree.get("tools"), f"{where}.tools"):
            check_type(member, place, known={"function"})
            members.append(make_tool(member, place, parameters="parameters"))
        found += [replace(each, name=_full_name(name, each.name)) for each in members]
        described = tree.get("description")
        shown.append(
            {
                "type": "namespace",
                "name": name,
                "description": ""
                if described is None
                else read_text(described, f"{where}.description"),
                "tools": [_shown_tool(each) for each in members],
            }
        )
    return check_names(found, "tools"), shown


def _shown_tool(tool: ToolSchema) -> dict[str, Any]:
    return {"type": "function", **tool.for_template()["function"], "strict": False}


def _short_names(style: AnswerStyle) -> dict[str, dict[str, str]]:
    """Return the fields `namespace` and `name` of each function in a namespace, by its full name.

    The policy calls a function by its full name. The client expects the two fields instead.
    """
    return {
        _full_name(group["name"], tool["name"]): {"namespace": group["name"], "name": tool["name"]}
        for group in style.repeated.get("tools", ())
        if group["type"] == "namespace"
        for tool in group["tools"]
    }


def answer(reply: ChatReply, style: AnswerStyle) -> dict[str, Any]:
    """Return the whole answer as JSON (`Dialect.answer`)."""
    is_cut_off = reply.stop_reason == "length"
    return {
        **_head(reply, style),
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "output": _items(reply, _short_names(style)),
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "output_tokens": reply.num_sampled_tokens,
            "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
            # The SDK requires these fields; the numbers are not known.
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        **shown_tokens(reply),
    }


def events(reply: ChatReply, style: AnswerStyle) -> Iterator[bytes]:
    """Yield the answer as server-sent events (`Dialect.events`)."""
    numbers = count()

    def send(kind_of_event: str, /, **data: Any) -> bytes:
        numbered = {"type": kind_of_event, "sequence_number": next(numbers), **data}
        return event(numbered, name=kind_of_event)

    begun = {**_head(reply, style), "status": "in_progress", "output": []}
    yield send("response.created", response=begun)
    yield send("response.in_progress", response=begun)
    whole = answer(reply, style)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        item_begun = {**item, **empty, "status": "in_progress"}
        yield send("response.output_item.added", output_index=index, item=item_begun)
        if is_call:
            arguments, prefix = item["arguments"], "response.function_call_arguments"
            for piece in pieces(arguments):
                yield send(f"{prefix}.delta", **at, delta=piece)
            yield send(f"{prefix}.done", **at, name=item["name"], arguments=arguments)
        else:
            for name, data in _growing(item["content"][0]):
                yield send(name, **at, content_index=0, **data)
        yield send("response.output_item.done", output_index=index, item=item)
    yield send(f"response.{whole['status']}", response=whole)


def _growing(part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and data of each event that streams one content part of an item."""
    prefix = f"response.{part['type']}"
    beside: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {"part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"{prefix}.delta", {"delta": piece, **beside}
    yield f"{prefix}.done", {"text": part["text"], **beside}
    yield "response.content_part.done", {"part": part}


def _items(reply: ChatReply, short_names: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the items that show a reply to the client: reasoning, message and calls.

    A later request may name an item by its id (`item_reference`), which contains the turn's id.
    """
    message, calls = reply.message, shown_calls(reply)
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.turn_id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning}],
                "status": "completed",
            }
        )
    if message.content or not calls:
        is_cut_off = reply.stop_reason == "length" and not calls
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.turn_id}",
                "role": "assistant",
                "content": [{"type": "output_text", "text": message.content, "annotations": []}],
                "status": "incomplete" if is_cut_off else "completed",
            }
        )
    return items + _call_items(reply.turn_id, calls, short_names)


def _call_items(
    turn_id: str,
    calls: Sequence[tuple[str, str, str]],
    short_names: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call",
            "id": f"fc_{turn_id}.{index}",
            "call_id": call_id,
            **short_names.get(name, {"name": name}),
            "arguments": arguments,
            "status": "completed",
        }
        for index, (call_id, name, arguments) in enumerate(calls)
    ]


def _head(reply: ChatReply, style: AnswerStyle) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{reply.turn_id}",
        "object": "response",
        "created_at": int(reply.created_at),
        "model": style.model,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
        **style.repeated,
    }


def error_event(refusal: Refused) -> bytes:
    """Return the two events of an error that ends a stream (`Dialect.error_event`).

    The first event has the error twice: OpenAI's SDK reads the field `error`, other clients read
    the event's own fields. The second event is a failed response, for which Codex waits.
    """
    found = error(refusal)["error"]
    first = {**found, "type": "error", "sequence_number": 0, "error": found}
    response = {
        "id": f"{PREFIX}failed",
        "object": "response",
        "status": "failed",
        "error": {"code": found["code"], "message": found["message"]},
        "output": [],
    }
    failed = {"type": "response.failed", "sequence_number": 1, "response": response}
    return event(first, name="error") + event(failed, name="response.failed")


def counted(num_tokens: int) -> dict[str, int | str]:
    """Return the answer to a request that counts a prompt's tokens (`Dialect.counted`)."""
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


OPENAI_RESPONSES = Dialect(
    name="openai-responses",
    path="/v1/responses",
    count_path="/v1/responses/input_tokens",
    counted=counted,
    parameters=PARAMETERS,
    heartbeat=COMMENT,
    read=read,
    answer=answer,
    events=events,
    error=error,
    error_event=error_event,
)
