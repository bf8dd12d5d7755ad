"""The dialect of OpenAI's Chat Completions API.

Messages also have the field `reasoning_content`, by which servers of open models extend this API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import ChatReply, ChatRequest, RefusalCode, Refused
from service.gateway.dialects.dialect import (
    BOOKKEEPING,
    COMMON,
    IN_THE_CLIENT,
    MAX_TOKENS,
    ONLY_TEXT,
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
    check_no_schema,
    check_tool_choice,
    check_tool_fields,
    check_type,
    invalid,
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
)
from service.gateway.dialects.sending import (
    COMMENT,
    ERROR_TYPES,
    event,
    pieces,
    shown_calls,
    shown_tokens,
)

PARAMETERS: Parameters = {
    **COMMON,
    "messages": taken("texts and calls"),
    "tools": taken("functions; `strict` has no effect"),
    "tool_choice": taken("`auto`, or `none`: no call is read out of the reply"),
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": taken("as `max_tokens`, and instead of it"),
    "stream_options": taken("`include_usage`; `include_obfuscation` has no effect"),
    **dict.fromkeys(
        ("parallel_tool_calls", "reasoning_effort", "verbosity", "thinking"),
        without_effect(TRAINED),
    ),
    "n": refused("each request gets one answer; send it n times", 1),
    "response_format": ignorable(UNCONSTRAINED, {"type": "text"}),
    "stop": STOP,
    "functions": refused("use `tools`", []),
    "function_call": refused("use `tools`", "none", "auto"),
    "modalities": refused(ONLY_TEXT, ["text"]),
    "audio": refused(ONLY_TEXT),
    "prediction": ignorable("the policy samples every token itself"),
    "web_search_options": refused(IN_THE_CLIENT),
}

MESSAGE_PARAMETERS: Parameters = {
    "role": taken("system, developer (which is system), user, assistant or tool"),
    "content": taken("text or parts of text, which are joined by newlines"),
    "name": taken(
        "name of the speaker; if the prompt would not show it, an assistant's is dropped, and "
        "another is refused or ignored"
    ),
    "tool_calls": taken("an assistant's calls"),
    "tool_call_id": taken("in a tool's answer"),
    "reasoning_content": taken("an assistant's reasoning"),
    "reasoning": taken("same as `reasoning_content`, which takes precedence"),
    "refusal": refused("send the text as `content`", ""),
    "audio": refused(ONLY_TEXT),
    "function_call": refused("use `tool_calls`"),
    "annotations": without_effect("not a part of the text"),
    # crewai marks the end of a prompt that a provider may cache.
    **dict.fromkeys(("cache_control", "cache_breakpoint"), without_effect(BOOKKEEPING)),
    **dict.fromkeys(
        ("parsed", "provider_specific_fields", "reasoning_details", "thinking_blocks"),
        without_effect("a copy that some clients keep"),
    ),
    "token_ids": without_effect("the session has its own copy"),
    "token_logprobs": without_effect("the session has its own copy"),
}

_STREAM_OPTIONS: Parameters = {
    "include_usage": taken("the last event has the counts of tokens"),
    "include_obfuscation": without_effect("nothing is padded"),
    "continuous_usage_stats": ignorable("only the last event has the counts of tokens", False),
}
_ROLES = {**{role.value: role for role in Role}, "developer": Role.SYSTEM}
_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


def read(
    body: object, headers: Mapping[str, str], *, ignores: bool = False
) -> tuple[ChatRequest, AnswerStyle]:
    """Return the request in a body, and the wanted form of the answer (`Dialect.read`)."""
    ignored: list[str] | None = [] if ignores else None
    given = read_body(body, PARAMETERS, ignored)
    model = read_text(given.get("model"), "model")
    messages = [
        _message(tree, where) for where, tree in read_objects(given.get("messages"), "messages")
    ]
    if not messages:
        raise invalid("messages", "got none, expected at least one")
    tools = _tools(given.get("tools"))
    calls = check_tool_choice(
        given.get("tool_choice"), "tool_choice", auto="auto", none="none", ignored=ignored
    )
    limits = [read_limit(given.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
    options = read_object(given.get("stream_options", {}), "stream_options")
    options = read_fields(options, _STREAM_OPTIONS, "stream_options", ignored=ignored)
    request = make_request(
        headers,
        model=model,
        messages=messages,
        tools=tools,
        may_call=calls,
        template_options=given.get("chat_template_kwargs"),
        stop=read_stop(given.get("stop"), "stop"),
        ignored=ignored,
        max_tokens=next((limit for limit in limits if limit is not None), None),
    )
    return request, AnswerStyle(
        model=model,
        streams=read_flag(given.get("stream"), "stream"),
        shows_usage=read_flag(options.get("include_usage"), "stream_options.include_usage"),
    )


def _message(tree: Mapping[str, Any], where: str) -> Message:
    given = read_fields(tree, MESSAGE_PARAMETERS, where)
    name = read_text(given.get("role"), f"{where}.role")
    if name not in _ROLES:
        raise invalid(
            f"{where}.role", f"got {printable(name)!r}, expected one of {', '.join(_ROLES)}"
        )
    if _ROLES[name] in (Role.SYSTEM, Role.USER):
        check_given(given.get("content"), where)
    content = read_content(given.get("content"), f"{where}.content", texts={"text"})
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        raise invalid(f"{where}.reasoning_content", f"got {kind(reasoning)}, expected text")
    return make_message(
        _ROLES[name],
        content,
        where=where,
        name=given.get("name"),
        tool_calls=tuple(
            _call(call, place)
            for place, call in read_objects(given.get("tool_calls"), f"{where}.tool_calls")
        ),
        tool_call_id=given.get("tool_call_id"),
        reasoning=reasoning or None,
    )


def _call(tree: Mapping[str, Any], where: str) -> ToolCall:
    check_type({"type": "function", **tree}, where, known={"function"})
    function = read_object(tree.get("function"), f"{where}.function")
    return make_call(
        function.get("name"),
        function.get("arguments"),
        tree.get("id"),
        where=f"{where}.function",
    )


def _tools(value: object) -> tuple[ToolSchema, ...]:
    found = []
    for where, tree in read_objects(value, "tools"):
        check_type(tree, where, known={"function"})
        function = read_object(tree.get("function"), f"{where}.function")
        if function.get("parameters") is None:
            outer = {name: value for name, value in tree.items() if name != "function"}
            check_no_schema(outer, where, parameters="function.parameters")
        check_tool_fields(
            tree, where, known={"function"}, remedy="put it into `function.description`"
        )
        found.append(make_tool(function, f"{where}.function", parameters="parameters"))
    return check_names(found, "tools")


def answer(reply: ChatReply, style: AnswerStyle) -> dict[str, Any]:
    """Return the whole answer as JSON (`Dialect.answer`)."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(reply)}
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    calls = shown_calls(reply)
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for call_id, name, arguments in calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _FINISH[reply.stop_reason],
        **shown_tokens(reply),
    }
    return {**_head(reply, style, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(reply: ChatReply, style: AnswerStyle) -> Iterator[bytes]:
    """Yield the answer as server-sent events (`Dialect.events`)."""
    head = _head(reply, style, "chat.completion.chunk")
    if style.shows_usage:
        head["usage"] = None

    def chunk(delta: Mapping[str, Any], **choice: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **choice}
        return event({**head, "choices": [choice]})

    content = _content(reply)
    # Put all tokens into the first chunk, because SDKs drop unknown fields of later chunks.
    first = None if content is None else ""
    yield chunk({"role": "assistant", "content": first}, **shown_tokens(reply))
    for piece in pieces(reply.message.reasoning or ""):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(content or ""):
        yield chunk({"content": piece})
    for index, (call_id, name, arguments) in enumerate(shown_calls(reply)):
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        yield chunk({"tool_calls": [call]})
        for piece in pieces(arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, finish_reason=_FINISH[reply.stop_reason])
    if style.shows_usage:
        yield event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _content(reply: ChatReply) -> str | None:
    message = reply.message
    return None if message.tool_calls and not message.content else message.content


def _head(reply: ChatReply, style: AnswerStyle, kind_of_answer: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.turn_id}",
        "object": kind_of_answer,
        "created": int(reply.created_at),
        "model": style.model,
    }


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
    }


def error(refusal: Refused) -> dict[str, Any]:
    """Return the body of the answer to a refused request (`Dialect.error`).

    The field `code` is a string, as in OpenAI's own errors.
    """
    message = refusal.message
    if refusal.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED:
        # Some clients search for these words, and repeat the request if they are missing.
        message = f"this model's maximum context length is exceeded: {message}"
    kind_of_error = ERROR_TYPES.get(refusal.code, "invalid_request_error")
    if refusal.code is RefusalCode.NOT_AVAILABLE:
        kind_of_error = "server_error"
    return {
        "error": {
            "message": message,
            "type": kind_of_error,
            "param": refusal.param or None,
            "code": refusal.code.value,
        }
    }


def error_event(refusal: Refused) -> bytes:
    """Return the event of an error that ends a stream (`Dialect.error_event`)."""
    return event(error(refusal))


OPENAI_CHAT = Dialect(
    name="openai-chat",
    path="/v1/chat/completions",
    parameters=PARAMETERS,
    heartbeat=COMMENT,
    read=read,
    answer=answer,
    events=events,
    error=error,
    error_event=error_event,
)
