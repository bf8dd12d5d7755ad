"""The dialect of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import ChatReply, ChatRequest, RefusalCode, Refused
from service.gateway.dialects.dialect import (
    BOOKKEEPING,
    COMMON,
    IN_THE_CLIENT,
    MAX_TOKENS,
    STOP,
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
from service.gateway.dialects.reading import (
    check_given,
    check_names,
    check_tool_choice,
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
    read_stop,
    read_text,
    read_text_part,
    read_turn_id,
    unsupported,
)
from service.gateway.dialects.sending import ERROR_TYPES, event, pieces, shown_calls, shown_tokens

PREFIX = "msg_"
# Prefix of the result of a call that failed.
_ERROR = "Error: "

PARAMETERS: Parameters = {
    **COMMON,
    "system": taken("text or blocks of text, which are joined by newlines"),
    "messages": taken("blocks of text, of thinking, of calls and of their results"),
    "tools": taken("functions; `strict` and `cache_control` have no effect"),
    "tool_choice": taken("`auto`, or `none`: no call is read out of the reply"),
    "max_tokens": MAX_TOKENS,
    "output_config": taken("`effort` has no effect"),
    "thread": taken(
        "`create` has no effect; `continue` names the answer that the messages follow; its system "
        "text and tools stay"
    ),
    "thinking": without_effect(TRAINED),
    "context_management": without_effect("the history is what the client sends"),
    **dict.fromkeys(
        (
            "speed",
            "inference_geo",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
            "billing_policy",
            "fallback_credit_token",
        ),
        without_effect(BOOKKEEPING),
    ),
    "fallbacks": without_effect("the policy answers every request"),
    "stop_sequences": STOP,
    "output_format": ignorable(UNCONSTRAINED),
    "compaction": refused("ask for a summary in a message"),
    "container": refused(IN_THE_CLIENT),
    "mcp_servers": refused(IN_THE_CLIENT, []),
}

_OUTPUT_CONFIG: Parameters = {
    "effort": without_effect(TRAINED),
    "task_budget": without_effect(TRAINED),
    "format": ignorable(UNCONSTRAINED),
}
_MESSAGE: Parameters = {
    "role": taken("user, assistant or system"),
    "content": taken("text or blocks"),
    # Fields of an answer that a client sends back whole.
    **dict.fromkeys(
        ("id", "type", "model", "stop_reason", "stop_sequence", "usage", "cache_control"),
        without_effect(BOOKKEEPING),
    ),
}
_STOP = {
    "stop": "end_turn",
    "length": "max_tokens",
    "calls": "tool_use",
}


def read(
    body: object, headers: Mapping[str, str], *, ignores: bool = False
) -> tuple[ChatRequest, AnswerStyle]:
    """Return the request in a body, and the wanted form of the answer (`Dialect.read`)."""
    ignored: list[str] | None = [] if ignores else None
    given = read_body(body, PARAMETERS, ignored)
    model = read_text(given.get("model"), "model")
    system = read_content(given.get("system"), "system", texts={"text"})
    spoken = [
        message
        for where, tree in read_objects(given.get("messages"), "messages")
        for message in _messages(tree, where)
    ]
    if not spoken:
        raise invalid("messages", "got none, expected at least one")
    if spoken[-1].role is Role.ASSISTANT:
        raise unsupported(
            "messages",
            "the last message is the assistant's, expected the user's: the policy begins its own "
            "turns; end with a user message",
        )
    if system:
        spoken.insert(0, make_message(Role.SYSTEM, system, where="system"))
    read_fields(
        read_object(given.get("output_config", {}), "output_config"),
        _OUTPUT_CONFIG,
        "output_config",
        ignored=ignored,
    )
    tools = _tools(given.get("tools"))
    continues = _continued(given.get("thread"))
    if continues and (system or tools):
        name = "tools" if tools else "system"
        raise invalid(name, "the thread keeps its own, expected none; begin a thread to change it")
    request = make_request(
        headers,
        model=model,
        messages=spoken,
        tools=tools,
        may_call=_may_call(given.get("tool_choice"), ignored),
        template_options=given.get("chat_template_kwargs"),
        stop=read_stop(given.get("stop_sequences"), "stop_sequences"),
        ignored=ignored,
        max_tokens=read_limit(given.get("max_tokens"), "max_tokens"),
        continues=continues,
        keeps_tools=bool(continues),
    )
    return request, AnswerStyle(model=model, streams=read_flag(given.get("stream"), "stream"))


def _continued(value: object) -> str:
    """Return the id of the earlier answer that a request's `thread` continues; empty if none."""
    thread = {"type": "create"} if value is None else read_object(value, "thread")
    found = read_text(thread.get("type"), "thread.type")
    if found == "create":
        return ""
    if found != "continue":
        raise invalid("thread.type", f"got {printable(found)!r}, expected create or continue")
    return read_turn_id(
        thread.get("previous_message_id"), "thread.previous_message_id", prefix=PREFIX
    )


def _messages(tree: Mapping[str, Any], where: str) -> Iterator[Message]:
    """Convert one message; each tool result in a user's message becomes a message of its own."""
    given = read_fields(tree, _MESSAGE, where)
    role, content = read_text(given.get("role"), f"{where}.role"), given.get("content")
    where_content = f"{where}.content"
    check_given(given.get("content"), where)
    if role not in ("user", "assistant", "system"):
        raise invalid(
            f"{where}.role", f"got {printable(role)!r}, expected user, assistant or system"
        )
    if role == "system" or not isinstance(content, list) or not content:
        text = read_content(content, where_content, texts={"text"})
        yield make_message(Role(role), text, where=where)
    elif role == "assistant":
        yield _assistant(content, where_content)
    else:
        yield from _user(content, where_content)


def _user(content: list[Any], where: str) -> Iterator[Message]:
    texts: list[str] = []
    for place, block in read_objects(content, where):
        if check_type(block, place, known={"text", "tool_result"}) == "text":
            texts.append(read_text_part(block, place, texts={"text"}))
            continue
        if texts:
            yield make_message(Role.USER, "\n".join(texts), where=where)
            texts = []
        result = read_content(block.get("content"), f"{place}.content", texts={"text"})
        is_error = read_flag(block.get("is_error"), f"{place}.is_error")
        yield make_message(
            Role.TOOL,
            _shown_error(result) if is_error else result,
            where=place,
            tool_call_id=read_text(block.get("tool_use_id"), f"{place}.tool_use_id"),
        )
    if texts:
        yield make_message(Role.USER, "\n".join(texts), where=where)


def _shown_error(result: str) -> str:
    """Put "Error: " before a failed call's result, so that the policy sees the failure."""
    # A chat template has no field for a failure.
    return result if result.startswith(_ERROR) else f"{_ERROR}{result}"


def _assistant(content: list[Any], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    known = {"text", "thinking", "redacted_thinking", "tool_use"}
    for place, block in read_objects(content, where):
        match check_type(block, place, known=known):
            case "text":
                texts.append(read_text_part(block, place, texts={"text"}))
            case "thinking":
                thoughts.append(read_text(block.get("thinking"), f"{place}.thinking"))
            case "tool_use":
                name, arguments, call_id = (block.get(key) for key in ("name", "input", "id"))
                calls.append(make_call(name, arguments, call_id, where=place, key="input"))
    return make_message(
        Role.ASSISTANT,
        "\n".join(texts),
        where=where,
        reasoning=joined(thoughts),
        tool_calls=tuple(calls),
    )


def _tools(value: object) -> tuple[ToolSchema, ...]:
    found = []
    for where, tree in read_objects(value, "tools"):
        if tree.get("type") is not None:
            check_type(tree, where, known={"custom"})
        found.append(make_tool(tree, where, parameters="input_schema"))
    return check_names(found, "tools")


def _may_call(value: object, ignored: list[str] | None) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        raise invalid("tool_choice", f"got {kind(value)}, expected an object with a type")
    name = read_text(value.get("type"), "tool_choice.type")
    return check_tool_choice(name, "tool_choice", auto="auto", none="none", ignored=ignored)


def answer(reply: ChatReply, style: AnswerStyle) -> dict[str, Any]:
    """Return the whole answer as JSON (`Dialect.answer`)."""
    return {
        **_head(reply, style),
        "content": _blocks(reply),
        "stop_reason": "stop_sequence" if reply.stop_string else _STOP[reply.stop_reason],
        "stop_sequence": reply.stop_string or None,
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "output_tokens": reply.num_sampled_tokens,
        },
    }


def events(reply: ChatReply, style: AnswerStyle) -> Iterator[bytes]:
    """Yield the answer as server-sent events (`Dialect.events`)."""
    begun = {"input_tokens": reply.num_prompt_tokens, "output_tokens": 0}
    message = {**_head(reply, style), "content": [], "stop_reason": None, "usage": begun}
    yield _event("message_start", message=message)
    for index, block in enumerate(_blocks(reply)):
        empty, deltas = _growing(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    whole = answer(reply, style)
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=end, usage=whole["usage"])
    yield _event("message_stop")


def _growing(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return an empty copy of a content block, and the deltas that fill it in a stream."""
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        parts = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(arguments)]
        return {**block, "input": {}}, parts
    if block["type"] == "thinking":
        thoughts = [
            {"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])
        ]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*thoughts, signature]
    texts = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    return {**block, "text": ""}, texts


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    """Return a reply's content blocks: at least one, because clients read the first block."""
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        # Some clients send only signed thinking back; the session has its own copy anyway.
        blocks.append(
            {"type": "thinking", "thinking": message.reasoning, "signature": reply.turn_id}
        )
    if message.content or not (blocks or message.tool_calls):
        blocks.append({"type": "text", "text": message.content})
    for (call_id, name, _), call in zip(shown_calls(reply), message.tool_calls, strict=True):
        blocks.append(
            {"type": "tool_use", "id": call_id, "name": name, "input": dict(call.arguments)}
        )
    return blocks


def _head(reply: ChatReply, style: AnswerStyle) -> dict[str, Any]:
    # Put the tokens into the first event, because SDKs drop unknown fields of later events.
    return {
        "id": f"{PREFIX}{reply.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": style.model,
        "stop_sequence": None,
        **shown_tokens(reply),
    }


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name=name)


def error(refusal: Refused) -> dict[str, Any]:
    """Return the body of the answer to a refused request (`Dialect.error`).

    Rayloom adds the fields `code` and `param`, because Anthropic's error types are coarser.
    """
    message = refusal.message
    kind_of_error = ERROR_TYPES.get(refusal.code, "invalid_request_error")
    if refusal.code is RefusalCode.NOT_AVAILABLE:
        kind_of_error = "overloaded_error"
    if refusal.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED:
        # Clients recognise a full context only by these words.
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {
            "type": kind_of_error,
            "message": message,
            "code": refusal.code.value,
            "param": refusal.param or None,
        },
    }


def error_event(refusal: Refused) -> bytes:
    """Return the event of an error that ends a stream (`Dialect.error_event`)."""
    return event(error(refusal), name="error")


def counted(num_tokens: int) -> dict[str, int]:
    """Return the answer to a request that counts a prompt's tokens (`Dialect.counted`)."""
    return {"input_tokens": num_tokens}


ANTHROPIC_MESSAGES = Dialect(
    name="anthropic-messages",
    path="/v1/messages",
    count_path="/v1/messages/count_tokens",
    counted=counted,
    parameters=PARAMETERS,
    heartbeat=event({"type": "ping"}, name="ping"),
    read=read,
    answer=answer,
    events=events,
    error=error,
    error_event=error_event,
)
