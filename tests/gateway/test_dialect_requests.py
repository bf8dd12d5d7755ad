"""Tests of reading request bodies, for all dialects together and for each separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsBase as BetaMessageCreateParamsBase,
)
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from worlds.builders.chat_replies import chat_reply
from worlds.parts.dialect_sdks import SDKS, USER, MessagesSdk, ResponsesSdk

from actors.environment.builtin.single_turn import chat_message
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import ChatRequest, RefusalCode, Refused
from service.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES
from service.gateway.dialects.dialect import Dialect
from service.gateway.dialects.openai_chat import OPENAI_CHAT
from service.gateway.dialects.openai_responses import OPENAI_RESPONSES

IMAGE, INPUT_IMAGE = MessagesSdk.image, ResponsesSdk.image
Body = dict[str, Any]
# The path that a refusal names, and the parameters that make a valid body invalid.
Case = tuple[str, Body]
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
NAMED = {"name": "look_up", "description": "Reads a page."}
LOOK_UP = ToolSchema(name="look_up", description="Reads a page.", parameters=SCHEMA)
# A function and a call of it in the form of each provider.
FUNCTION = {"type": "function", "function": {**NAMED, "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
TOOL = {**NAMED, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CONTINUED = {"type": "continue", "previous_message_id": "msg_s.0"}
USE = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"a": 1}}
FLAT = {"type": "function", **NAMED, "parameters": SCHEMA, "strict": True}


def text(words: str) -> Body:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def result(call_id: str, content: object, **rest: Any) -> Body:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **rest}


def item(call_id: str, arguments: str = '{"a": 1}') -> Body:
    named = {"type": "function_call", "call_id": call_id, "name": "look_up", "id": "fc"}
    return {**named, "arguments": arguments, "status": "completed"}


def output(call_id: str, said: object) -> Body:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def said(words: str) -> Body:
    part = {"type": "output_text", "text": words, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "m", "content": [part]}


def thought(words: str) -> Body:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": words}]}


SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
NO_THOUGHT = {"type": "thinking", "thinking": "", "signature": "s"}
SECRET = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}


def user(content: object, **rest: Any) -> Body:
    return {"role": "user", "content": content, **rest}


def spoken(*contents: object, **rest: Any) -> Body:
    """Return the parameter messages with turns of the assistant that have these contents."""
    return {"messages": [{"role": "assistant", "content": each, **rest} for each in contents]}


def with_arguments(arguments: object) -> Body:
    return spoken("", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": arguments}}])


def made(call_id: str) -> ToolCall:
    return ToolCall(name="look_up", arguments={"a": 1}, id=call_id)


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def asked(content: str, **rest: Any) -> Message:
    return Message(role=Role.USER, content=content, **rest)


def found(content: str, call_id: str) -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call_id)


def answered(content: str, *ids: str, reasoning: str | None = None) -> Message:
    calls = tuple(made(each) for each in ids)
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


DEEP: Body = {}
for _ in range(70):
    DEEP = {"d": DEEP}


@dataclass(frozen=True, kw_only=True)
class Words:
    """The form of requests of one provider, and the parameters that only it has."""

    dialect: Dialect
    turns: str
    """The parameter that has the conversation."""
    limit: str
    """The parameter that limits the sampled tokens."""
    stop: str
    """The parameter of the stop strings; empty: the dialect has none."""
    tool: Body
    foreign_tool: Body
    """A tool that the provider's own servers run."""
    foreign_role: str
    """A role that only another dialect has."""
    none: object
    """The value of tool_choice that forbids calls."""
    forced: tuple[object, ...]
    """Values of tool_choice that force a call."""
    form: Case
    """A parameter that requires a form of the answer, such as JSON."""
    harmless: Body
    """Parameters without an effect, which are accepted."""
    conversation: Body
    messages: tuple[Message, ...]
    """The messages that reading `conversation` gives."""
    unsupported: tuple[Case, ...]
    invalid: tuple[Case, ...]

    def body(self, changed: Mapping[str, Any]) -> Body:
        return {"model": "any", self.turns: [USER], **changed}

    def read(self, changed: Mapping[str, Any], **headers: str) -> ChatRequest:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.dialect.read(self.body(changed), named)[0]

    def refusal(self, body: object) -> tuple[RefusalCode, str]:
        with pytest.raises(Refused) as caught:
            self.dialect.read(body, {})
        assert str(caught.value).encode()
        return caught.value.code, caught.value.param


CHAT = Words(
    dialect=OPENAI_CHAT, turns="messages", limit="max_tokens", stop="stop", tool=FUNCTION,
    foreign_tool={"type": "custom", "custom": {"name": "x"}}, foreign_role="function", none="none",
    forced=("required", {"type": "function", "function": {"name": "look_up"}}),
    form=("response_format", {"response_format": {"type": "json_object"}}),
    harmless={
        "temperature": 0, "top_p": 0.1, "seed": 4, "n": 1, "presence_penalty": 0.0,
        "logit_bias": {}, "stop": [], "response_format": {"type": "text"}, "logprobs": False,
        "metadata": {"a": "b"}, "user": "u", "store": True, "parallel_tool_calls": False,
        "reasoning_effort": "high", "functions": None, "stream": False, "tool_choice": "auto",
        "modalities": ["text"], "anything_unknown": None, "max_completion_tokens": 5,
        "function_call": "auto", "stream_options": {"continuous_usage_stats": False},
        "documents": [],
    },
    conversation={"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        user([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]),
        {"role": "system", "content": "in the middle"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "so", "reasoning": "old", "refusal": None, "audio": None},
        user("and?", name="Ann"),
    ]},
    messages=(
        system("a"), asked("b\nc"), system("in the middle"), answered("", "c1", reasoning="hm"),
        found("found", "c1"), answered("so", reasoning="old"), asked("and?", name="Ann"),
    ),
    unsupported=(
        ("n", {"n": 2}),
        ("n", {"n": True}),
        ("functions", {"functions": [{}]}),
        ("function_call", {"function_call": {"name": "look_up"}}),
        ("stream_options.continuous_usage_stats",
         {"stream_options": {"continuous_usage_stats": True}}),
        ("audio", {"audio": {}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("prediction", {"prediction": {}}),
        ("web_search_options", {"web_search_options": {}}),
        ("stream_options.rate", {"stream_options": {"rate": 1}}),
        ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "x"}}]}),
    ),
    invalid=(
        ("messages", {"messages": "Hello"}),
        ("messages[0]", {"messages": [user("", tool_call_id="c")]}),
        ("messages[0]", {"messages": [{"role": "tool", "content": "", "tool_call_id": 3}]}),
        ("messages[0]", {"messages": [user("", tool_calls=[CALL])]}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("stream_options", {"stream_options": []}),
        ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        *(
            ("messages[0].tool_calls[0].function.arguments", with_arguments(arguments))
            for arguments in (
                "{", "[1]", "3", "{'a': {1}}", [1], 7, "[" * 5000, [], False, "{'a': '\\z'}"
            )
        ),
        ("messages[0]", with_arguments('{"a": NaN}')),
        ("messages[0]", with_arguments('{"a": "\\ud800"}')),
    ),
)  # fmt: skip
MESSAGES = Words(
    dialect=ANTHROPIC_MESSAGES, turns="messages", limit="max_tokens", stop="stop_sequences",
    tool=TOOL, foreign_tool={"type": "web_search_20250305", "name": "web_search"},
    foreign_role="tool", none={"type": "none"},
    forced=({"type": "any"}, {"type": "tool", "name": "look_up"}),
    form=("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    harmless={
        "temperature": 1.0, "top_k": 5, "top_p": 0.1, "stop_sequences": [],
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 4},
        "service_tier": "auto", "system": "", "output_config": {"effort": "high"},
        "cache_control": {}, "mcp_servers": [], "container": None,
        "context_management": {"edits": []}, "tools": [{**TOOL, "type": "custom"}],
        "thread": {"type": "create"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
    conversation={"system": [text("s"), text("t")], "messages": [
        user([text("b"), text("c")]),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"}, NO_THOUGHT, text("I look"), USE,
        ]},
        user([
            text("before"), result("c1", [text("f"), text("g")]),
            result("c2", "no such page", is_error=True), result("c3", None), text("after"),
        ]),
        {"role": "system", "content": "in the middle"},
        {"role": "assistant", "content": [NO_THOUGHT, text("so")]},
        user([]),
    ]},
    messages=(
        system("s\nt"), asked("b\nc"), answered("I look", "c1", reasoning="hm"), asked("before"),
        found("f\ng", "c1"), found("Error: no such page", "c2"), found("", "c3"), asked("after"),
        system("in the middle"), answered("so"), asked(""),
    ),
    unsupported=(
        ("messages", {"messages": [USER, *spoken("The answer is (")["messages"]]}),
        ("messages[0].content[0].content[0].type", {"messages": [user([result("c", [IMAGE])])]}),
        ("messages[0].content[0].type", spoken([IMAGE])),
        ("system[0].type", {"system": [IMAGE]}),
        ("mcp_servers", {"mcp_servers": [{}]}),
        ("container", {"container": "c"}),
    ),
    invalid=(
        ("thread", {"thread": "t"}),
        ("thread.type", {"thread": {}}),
        ("thread.type", {"thread": {"type": "end"}}),
        *(
            ("thread.previous_message_id", {"thread": {**CONTINUED, "previous_message_id": wrong}})
            for wrong in (None, "", "msg_", "resp_s.0", 3)
        ),
        ("system", {"thread": CONTINUED, "system": "be brief"}),
        ("tools", {"thread": CONTINUED, "tools": [TOOL]}),
        ("messages[0].content[0]", {"messages": [user(["a"])]}),
        ("messages[0].content[0].type", {"messages": [user([{}])]}),
        ("messages[0].content[0].tool_use_id", {"messages": [user([{"type": "tool_result"}])]}),
        (
            "messages[0].content[0].is_error",
            {"messages": [user([result("c", "", is_error="no")])]},
        ),
        ("messages[0].content[0].input", spoken([{**USE, "input": "{"}])),
        ("system", {"system": {}}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice.type", {"tool_choice": {}}),
        ("tools[0].input_schema", {"tools": [{**TOOL, "input_schema": "x"}]}),
        ("tools[0]", {"tools": [{**TOOL, "input_schema": {"properties": []}}]}),
    ),
)  # fmt: skip
RESPONSES = Words(
    dialect=OPENAI_RESPONSES, turns="input", limit="max_output_tokens", stop="", tool=FLAT,
    foreign_tool={"type": "web_search"}, foreign_role="tool", none="none",
    forced=("required", {"type": "function", "name": "look_up"}),
    form=("text.format", {"text": {"format": {"type": "json_schema"}}}),
    harmless={
        "temperature": 1.0, "top_p": 0.1, "store": False, "reasoning": {"effort": "high"},
        "background": False, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["x"], "truncation": "auto", "parallel_tool_calls": True,
        "prompt_cache_key": "k", "client_metadata": {}, "tool_choice": "auto",
        "stream_options": {"include_obfuscation": False}, "conversation": None,
    },
    conversation={"instructions": "be", "input": [
        {"role": "developer", "content": "d"},
        user([{"type": "input_text", "text": "b"}]),
        thought("hm"), said("I look"), item("c1"), item("c2"),
        output("c1", "f"), output("c2", [{"type": "input_text", "text": "g"}]),
        thought("well"), item("c3"), output("c3", None),
        said("one"), said("two"), SUMMARY, said("three"), item("c4"), thought("later"),
        {"type": "message", "role": "system", "content": "in the middle"}, SECRET, user("end"),
    ]},
    messages=(
        system("be"), system("d"), asked("b"), answered("I look", "c1", "c2", reasoning="hm"),
        found("f", "c1"), found("g", "c2"), answered("", "c3", reasoning="well"), found("", "c3"),
        answered("one"), answered("two"), answered("three", "c4", reasoning="in short"),
        answered("", reasoning="later"), system("in the middle"), asked("end"),
    ),
    unsupported=(
        ("input[0].output[0].type", {"input": [output("c", [INPUT_IMAGE])]}),
        ("input[0].type", {"input": [{"type": "custom_tool_call", "input": ""}]}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "c"}),
        ("prompt", {"prompt": {"id": "p"}}),
    ),
    invalid=(
        ("input", {"input": [SECRET]}),
        ("input", {"input": "\ud800"}),
        *(
            ("input[0].id", {"input": [{"type": "item_reference", "id": name}]})
            for name in ("m", "resp_s.0", "msg_", "fc_s.0.x", "fc_s.0.99999999999", None, 3)
        ),
        ("input[0].type", {"input": [{"type": 3}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "output": ""}]}),
        ("input[0].arguments", {"input": [item("c", "{")]}),
        ("input[0].summary", {"input": [{"type": "reasoning", "summary": 3}]}),
        ("instructions", {"instructions": []}),
        ("previous_response_id", {"previous_response_id": "chatcmpl-1"}),
        ("previous_response_id", {"previous_response_id": "resp_"}),
        ("previous_response_id", {"previous_response_id": 4}),
        ("text", {"text": "plain"}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
    ),
)  # fmt: skip
every_dialect = pytest.mark.parametrize(
    "words", [CHAT, MESSAGES, RESPONSES], ids=lambda words: words.dialect.name
)


def unsupported(words: Words) -> list[Case]:
    """Return the parameters that no dialect supports and those that this one does not."""
    image = SDKS[words.dialect.name].image
    return [
        ("beam_width", {"beam_width": 4}),
        ("half \\ud800", {"half \ud800": 1}),
        ("chat_template", {"chat_template": "x"}),
        ("chat_template_kwargs.tools", {"chat_template_kwargs": {"tools": []}}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("logprobs", {"logprobs": True}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("min_tokens", {"min_tokens": 1}),
        ("ignore_eos", {"ignore_eos": True}),
        ("guided_json", {"guided_json": {}}),
        ("tools[0].type", {"tools": [words.foreign_tool]}),
        *(("tool_choice", {"tool_choice": forced}) for forced in words.forced),
        (f"{words.turns}[0].content[0].type", {words.turns: [user([image])]}),
        (f"{words.turns}[0].mood", {words.turns: [user("", mood="glad")]}),
        words.form,
        *words.unsupported,
    ]


def invalid(words: Words) -> list[Case]:
    turns, stop = words.turns, words.stop
    stops: list[Case] = [
        *((stop, {stop: wrong}) for wrong in (3, {}, ["x"] * 65)),
        (f"{stop}[0]", {stop: "\ud800"}),
        (f"{stop}[1]", {stop: ["a", 3]}),
    ]
    roles = ({"role": words.foreign_role}, {"role": "nobody"}, {"role": None}, {})
    options: tuple[object, ...] = ([], {"a": "b" * 17_000}, {"a": float("nan")})
    return [
        ("", {"metadata": DEEP}),
        ("model", {"model": "\ud800"}),
        *((turns, {turns: wrong}) for wrong in (None, [], {})),
        (f"{turns}[0]", {turns: ["Hello"]}),
        *((f"{turns}[0].role", {turns: [{**role, "content": ""}]}) for role in roles),
        *((f"{turns}[0].content", {turns: [user(wrong)]}) for wrong in (3, "\udfff")),
        *(
            (words.limit, {words.limit: wrong})
            for wrong in (0, -1, True, False, 1.5, float("inf"), float("nan"), "9")
        ),
        ("stream", {"stream": "yes"}),
        ("tool_choice", {"tool_choice": 3}),
        ("tools", {"tools": {}}),
        ("tools[1]", {"tools": [words.tool] * 2}),
        *(("chat_template_kwargs", {"chat_template_kwargs": wrong}) for wrong in options),
        *(stops if stop else []),
        *words.invalid,
    ]


@every_dialect
def test_a_conversation_becomes_messages_in_their_order(words: Words) -> None:
    request = words.read({**words.conversation, "tools": [words.tool], words.limit: 9})
    assert request.messages == words.messages
    assert (request.tools, request.max_tokens, request.continues) == ((LOOK_UP,), 9, "")


@every_dialect
def test_parameters_without_an_effect_are_accepted(words: Words) -> None:
    """Check parameters of sampling, which the run decides, and of billing, storage and caching."""
    # Clients of vLLM send these values, some of them always.
    neutral = {
        "best_of": 1, "min_tokens": 0, "ignore_eos": False, "length_penalty": 1.0,
        "repetition_penalty": 1.0, "stop_token_ids": [], "skip_special_tokens": True,
        "include_stop_str_in_output": False, "use_beam_search": False,
    }  # fmt: skip
    body = words.body({"tools": [words.tool], words.limit: 7.0, **neutral, **words.harmless})
    request, style = words.dialect.read(body, {"Anthropic-Version": "2023-06-01"})
    assert (request.tools, len(request.messages), style.streams) == ((LOOK_UP,), 1, False)
    # `max_completion_tokens` is read instead of `max_tokens`.
    assert request.max_tokens == words.harmless.get("max_completion_tokens", 7)
    without = words.read({"tools": [words.tool], "tool_choice": words.none})
    assert without.tools == request.tools and (request.may_call, without.may_call) == (True, False)


@every_dialect
def test_unsupported_parameters_are_refused_by_name(words: Words) -> None:
    for param, changed in unsupported(words):
        found = words.refusal(words.body(changed))
        assert found == (RefusalCode.UNSUPPORTED_PARAMETER, param), changed


@every_dialect
def test_invalid_values_are_refused_with_their_path(words: Words) -> None:
    for param, changed in invalid(words):
        found = words.refusal(words.body(changed))
        assert found == (RefusalCode.INVALID_REQUEST, param), changed
    for missing in ("model", words.turns):
        body = words.body({})
        del body[missing]
        assert words.refusal(body) == (RefusalCode.INVALID_REQUEST, missing)
    for wrong in ([], [1], None, "Hello"):
        assert words.refusal(wrong) == (RefusalCode.INVALID_REQUEST, "")


@every_dialect
def test_a_limit_that_is_not_a_positive_whole_number_is_refused(words: Words) -> None:
    for value, got in ((0, "0"), (-2, "-2"), (1.5, "1.5"), (True, "true or false"), ("9", "text")):
        with pytest.raises(Refused) as caught:
            words.read({words.limit: value})
        expected = f"{words.limit}: got {got}, expected a whole number, at least 1"
        assert caught.value.message == expected


@every_dialect
def test_headers_mark_retries_idempotency_keys_and_auxiliary_calls(words: Words) -> None:
    def read(model: str = "m", **headers: str) -> tuple[bool, str, bool]:
        request = words.read({"model": model}, **headers)
        return request.is_retry, request.idempotency_key, request.is_auxiliary

    assert read() == (False, "", False)
    assert read(X_Stainless_Retry_Count="0") == (False, "", False)
    assert read(X_Stainless_Retry_Count="2", Idempotency_Key="k 1") == (True, "k 1", False)
    assert read(x_stainless_retry_count="²" + "9" * 9999) == (False, "", False)
    assert read("gpt:auxiliary") == (False, "", True)
    assert read(X_Rayloom_Auxiliary="1") == (False, "", True)
    for key in ("k" * 256, "a\nb", "é"):
        with pytest.raises(Refused) as caught:
            read(Idempotency_Key=key)
        assert caught.value.param == "Idempotency-Key"


def test_a_function_of_a_chat_may_have_only_a_name() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    bare = CHAT.read({"tools": tools, "tool_choice": None})
    assert bare.tools[0].parameters == {"type": "object", "properties": {}}


def test_arguments_of_a_chat_are_json_or_a_printed_python_dictionary() -> None:
    vectors: list[tuple[object, Body]] = [
        ("{'a': False, 'b': None, 'c': \"it's\"}", {"a": False, "b": None, "c": "it's"}),
        ("{'True': 'None', 'x': [1, True]}", {"True": "None", "x": [1, True]}),
        (' {"a" : "False"} ', {"a": "False"}),
        ("", {}), ({"a": 1}, {"a": 1}), ({}, {}), (None, {}),
        (" \n", {}), ("null", {}), (" null ", {}), ("None", {}),
    ]  # fmt: skip
    for given, arguments in vectors:
        [message] = CHAT.read(with_arguments(given)).messages
        assert message.tool_calls[0].arguments == arguments


def test_a_chat_of_a_data_set_is_read_as_the_same_messages_of_a_request() -> None:
    assert tuple(map(chat_message, CHAT.conversation["messages"])) == CHAT.messages


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no such page", "Error: no such page"),
        ("", "Error: "),
        ("Exit code 1\nTypeError: x", "Error: Exit code 1\nTypeError: x"),
        ("0 errors", "Error: 0 errors"),
        ("error_count: 0", "Error: error_count: 0"),
        ("error: no such page", "Error: error: no such page"),
        ("<tool_use_error>No</tool_use_error>", "Error: <tool_use_error>No</tool_use_error>"),
        ("\nTypeError: x", "Error: \nTypeError: x"),
        ("Error: no such page",) * 2,
    ],
)
def test_a_result_of_messages_that_is_an_error_begins_with_error_once(
    said: str, shown: str
) -> None:
    for is_error, expected in ((True, shown), (False, said)):
        request = MESSAGES.read({"messages": [user([result("c", said, is_error=is_error)])]})
        assert request.messages[0].content == expected


def test_a_response_can_be_continued_by_its_id() -> None:
    body = {"model": "any", "input": "Hello", "previous_response_id": "resp_prompt-9-3.4"}
    request, style = OPENAI_RESPONSES.read({**body, "instructions": "be brief"}, {})
    assert (request.continues, request.instructions) == ("prompt-9-3.4", "be brief")
    assert request.messages == (Message(role=Role.USER, content="Hello"),)
    assert style.repeated["previous_response_id"] == "resp_prompt-9-3.4"
    assert RESPONSES.read({"previous_response_id": "resp_s.0"}).instructions is None


def test_every_parameter_of_the_providers_sdks_is_in_the_dialects_table() -> None:
    """Check the tables; `sessions.unsupported: ignore` would ignore a parameter in none of them."""
    for dialect, *kinds in (
        (OPENAI_CHAT, CompletionCreateParamsBase),
        (ANTHROPIC_MESSAGES, MessageCreateParamsBase, BetaMessageCreateParamsBase),
        (OPENAI_RESPONSES, ResponseCreateParamsBase),
    ):
        names = {name for kind in kinds for name in get_type_hints(kind)} - {"betas"}
        assert names <= set(dialect.parameters)


def test_functions_of_a_namespace_are_listed_and_called_by_their_full_names() -> None:
    group = {
        "type": "namespace", "name": "pages", "description": "Of pages.",
        "tools": [FLAT, {**FLAT, "name": "count"}],
    }  # fmt: skip
    items = [USER, {**item("c"), "namespace": "pages"}, output("c", "r")]
    body = RESPONSES.body({"input": items, "tools": [FLAT, group]})
    request, style = OPENAI_RESPONSES.read(body, {})
    assert [tool.name for tool in request.tools] == ["look_up", "pages.look_up", "pages.count"]
    assert request.messages[1].tool_calls[0].name == "pages.look_up"
    calls = [ToolCall(name=name, arguments={}, id=name[0]) for name in ("pages.count", "look_up")]
    shown = OPENAI_RESPONSES.answer(chat_reply("", *calls), style)
    names = [(item.get("namespace"), item["name"]) for item in shown["output"]]
    assert names == [("pages", "count"), (None, "look_up")]
    assert [tool["type"] for tool in shown["tools"]] == ["function", "namespace"]
    assert [tool["name"] for tool in shown["tools"][1]["tools"]] == ["look_up", "count"]


def test_an_invalid_namespace_is_refused() -> None:
    group = {"type": "namespace", "name": "a", "tools": [FLAT, FLAT]}
    cases: dict[str, Body] = {
        "tools[0].name": {**group, "name": None},
        "tools[0].description": {**group, "description": 3},
        "tools[0].tools": {**group, "tools": "x"},
        "tools[0].tools[0].type": {**group, "tools": [{"type": "custom"}]},
        "tools[1]": group,
    }
    for where, tool in cases.items():
        assert RESPONSES.refusal(RESPONSES.body({"tools": [tool]}))[1] == where
