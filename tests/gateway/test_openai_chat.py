"""Chat completions: bodies become requests, replies become what OpenAI's SDK knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from worlds.builders.chat_replies import REPLIES, chat_reply, refusal, without_nulls
from worlds.parts.dialect_server import DialectServer, Late

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import RefusalCode, Refused
from service.gateway.dialects.openai_chat import OPENAI_CHAT

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Reads a page.",
        "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "Hello"}


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [USER], **changed}


@pytest.fixture
def client(dialect_server: DialectServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dialect_server.url}/v1", api_key="k") as made:
        yield made


def test_every_role_is_read_and_parts_of_text_are_joined_by_newlines() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "system", "content": "in the middle"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "so", "reasoning": "old", "refusal": None, "audio": None},
        {"role": "user", "content": "and?", "name": "Ann"},
    ]
    request, _ = OPENAI_CHAT.read(body(messages=messages, tools=[TOOL], max_tokens=9), {})
    call = ToolCall(name="look_up", arguments={"a": 1}, id="c1")
    assert request.messages == (
        Message(role=Role.SYSTEM, content="a"),
        Message(role=Role.USER, content="b\nc"),
        Message(role=Role.SYSTEM, content="in the middle"),
        Message(role=Role.ASSISTANT, content="", tool_calls=(call,), reasoning="hm"),
        Message(role=Role.TOOL, content="found", tool_call_id="c1"),
        Message(role=Role.ASSISTANT, content="so", reasoning="old"),
        Message(role=Role.USER, content="and?", name="Ann"),
    )
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    tool = ToolSchema(name="look_up", description="Reads a page.", parameters=schema)
    assert (request.tools, request.max_tokens, request.continues) == ((tool,), 9, "")


def test_what_asks_for_nothing_is_taken() -> None:
    """The run forces how is sampled; what bills, stores or caches has nothing to do it to."""
    harmless = body(
        temperature=0, top_p=0.1, seed=4, n=1, presence_penalty=0.0, logit_bias={}, stop=[],
        response_format={"type": "text"}, logprobs=False, metadata={"a": "b"}, user="u",
        store=True, parallel_tool_calls=False, reasoning_effort="high", functions=None,
        stream=False, tools=[TOOL], tool_choice="auto", modalities=["text"],
        anything_unknown=None, max_completion_tokens=5, max_tokens=7,
    )  # fmt: skip
    request, style = OPENAI_CHAT.read(harmless, {})
    assert (len(request.tools), request.max_tokens, style.streams) == (1, 5, False)
    without, _ = OPENAI_CHAT.read(body(tools=[TOOL], tool_choice="none"), {})
    assert without.tools == request.tools and (request.may_call, without.may_call) == (True, False)
    bare, _ = OPENAI_CHAT.read(
        body(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=None), {}
    )
    assert bare.tools[0].parameters == {"type": "object", "properties": {}}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
UNSUPPORTED = [
    ("n", {"n": 2}),
    ("n", {"n": True}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("chat_template", {"chat_template": "x"}),
    ("chat_template_kwargs.tools", {"chat_template_kwargs": {"tools": []}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "look_up"}}}),
    ("functions", {"functions": [{}]}),
    ("function_call", {"function_call": "auto"}),
    ("audio", {"audio": {}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("prediction", {"prediction": {}}),
    ("guided_json", {"guided_json": {}}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("web_search_options", {"web_search_options": {}}),
    ("beam_width", {"beam_width": 4}),
    ("stream_options.rate", {"stream_options": {"rate": 1}}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "x"}}]}),
    ("messages[0].mood", {"messages": [{"role": "user", "content": "", "mood": "glad"}]}),
    ("half \\ud800", {"half \ud800": 1}),
]


def test_what_a_session_cannot_keep_to_is_refused_by_its_name() -> None:
    for param, changed in UNSUPPORTED:
        with pytest.raises(Refused) as caught:
            OPENAI_CHAT.read(body(**changed), {})
        found = caught.value.code, caught.value.param
        assert found == (RefusalCode.UNSUPPORTED_PARAMETER, param)


def with_arguments(arguments: object) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return body(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"d": DEEP}
INVALID = [
    ("", [1]),
    ("", None),
    ("", body(metadata=DEEP)),
    ("model", {"messages": [USER]}),
    ("model", body(model="\ud800")),
    ("messages", {"model": "m"}),
    ("messages", body(messages=[])),
    ("messages", body(messages="Hello")),
    ("messages[0]", body(messages=["Hello"])),
    ("messages[0].role", body(messages=[{"role": "function", "content": ""}])),
    ("messages[0].role", body(messages=[{"content": ""}])),
    ("messages[0].content", body(messages=[{"role": "user", "content": 3}])),
    ("messages[0].content", body(messages=[{"role": "user", "content": "\udfff"}])),
    ("messages[0]", body(messages=[{"role": "user", "content": "", "tool_call_id": "c"}])),
    ("messages[0]", body(messages=[{"role": "tool", "content": "", "tool_call_id": 3}])),
    ("messages[0]", body(messages=[{"role": "user", "content": "", "tool_calls": [CALL]}])),
    ("stop", body(stop=3)),
    ("stop", body(stop=["x"] * 65)),
    ("stop[0]", body(stop="\ud800")),
    ("chat_template_kwargs", body(chat_template_kwargs=[])),
    ("chat_template_kwargs", body(chat_template_kwargs={"a": "b" * 17_000})),
    ("chat_template_kwargs", body(chat_template_kwargs={"a": float("nan")})),
    ("max_tokens", body(max_tokens=0)),
    ("max_tokens", body(max_tokens=-1)),
    ("max_tokens", body(max_tokens=True)),
    ("max_tokens", body(max_tokens=1.0)),
    ("stream", body(stream="yes")),
    ("stream_options", body(stream_options=[])),
    ("stream_options.include_usage", body(stream_options={"include_usage": 1})),
    ("tool_choice", body(tool_choice=3)),
    ("tools", body(tools={})),
    ("tools[1]", body(tools=[TOOL, TOOL])),
    ("tools[0].function", body(tools=[{"type": "function"}])),
    ("tools[0].function.name", body(tools=[{"type": "function", "function": {"name": ""}}])),
    *(
        ("messages[0].tool_calls[0].function.arguments", with_arguments(arguments))
        for arguments in (
            "{",
            "[1]",
            "3",
            "{'a': {1}}",
            [1],
            7,
            "[" * 5000,
            "  ",
            [],
            False,
            "{'a': '\\z'}",
        )
    ),
    ("messages[0]", with_arguments('{"a": NaN}')),
    ("messages[0]", with_arguments('{"a": "\\ud800"}')),
]


def test_what_does_not_fit_is_refused_with_its_place() -> None:
    for param, wrong in INVALID:
        with pytest.raises(Refused) as caught:
            OPENAI_CHAT.read(wrong, {})
        assert (caught.value.code, caught.value.param) == (RefusalCode.INVALID_REQUEST, param)
        assert str(caught.value).encode()


def test_arguments_are_json_or_what_python_prints_for_it() -> None:
    vectors = {
        "{'a': False, 'b': None, 'c': \"it's\"}": {"a": False, "b": None, "c": "it's"},
        "{'True': 'None', 'x': [1, True]}": {"True": "None", "x": [1, True]},
        ' {"a" : "False"} ': {"a": "False"},
        "": {},
    }
    for text, arguments in vectors.items():
        request, _ = OPENAI_CHAT.read(with_arguments(text), {})
        assert request.messages[0].tool_calls[0].arguments == arguments
    for direct in ({"a": 1}, {}, None):
        request, _ = OPENAI_CHAT.read(with_arguments(direct), {})
        assert request.messages[0].tool_calls[0].arguments == (direct or {})


def test_headers_name_retries_keys_and_calls_that_are_no_part_of_the_task() -> None:
    def read(model: str = "m", **headers: str) -> tuple[bool, str, bool]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request, _ = OPENAI_CHAT.read(body(model=model), named)
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


def told(completion: ChatCompletion) -> Any:
    """Without what the SDK's helper for streams adds of its own."""
    found: Any = without_nulls(completion.to_dict())
    for call in found["choices"][0]["message"].get("tool_calls", []):
        call.pop("index", None)
    return found


@pytest.mark.parametrize("name", REPLIES)
def test_the_sdk_makes_of_a_stream_what_the_whole_answer_is(
    name: str, client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    """Case 27."""
    reply = REPLIES[name]
    dialect_server.begin(reply)
    asked: dict[str, Any] = {"model": "gpt", "messages": [USER]}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    assert told(streamed) == told(whole)
    choice = whole.choices[0]
    assert (whole.id, whole.model, whole.created) == ("chatcmpl-prompt-9-3.4", "gpt", 1_700_000_000)
    assert choice.message.content == (reply.message.content or (None if "call" in name else ""))
    assert (choice.message.model_extra or {}).get("reasoning_content") == reply.message.reasoning
    assert whole.usage is not None
    assert whole.usage.to_dict() == {
        "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14
    }  # fmt: skip
    finishes = {"length": "length", "call": "tool_calls", "all": "tool_calls"}
    assert choice.finish_reason == finishes.get(name.partition(" ")[0], "stop")


def test_the_sdk_gets_calls_and_tokens_as_they_were_sampled(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    dialect_server.begin(REPLIES["all"])
    whole = client.chat.completions.create(model="gpt", messages=[USER])
    calls = whole.choices[0].message.tool_calls or []
    assert [(each.id, each.type) for each in calls] == [
        ("call_a", "function"), ("call_prompt_9_3_4_1", "function")
    ]  # fmt: skip
    functions = [each.function for each in calls if each.type == "function"]
    assert [(each.name, each.arguments) for each in functions] == [
        ("look_up", '{"title": "Ærø 🏝", "deep": false}'), ("count", "{}")
    ]  # fmt: skip
    dialect_server.begin(REPLIES["tokens"])
    shown = client.chat.completions.create(model="gpt", messages=[USER])
    assert shown.choices[0].model_extra == {
        "token_ids": [5, 6, 7], "token_logprobs": [-0.5, None, -0.25]
    }  # fmt: skip


def test_what_the_sdk_was_answered_it_can_send_back(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    for reply in REPLIES.values():
        dialect_server.begin(reply)
        whole = client.chat.completions.create(model="gpt", messages=[USER])
        back: Any = [USER, whole.choices[0].message, USER]
        client.chat.completions.create(model="gpt", messages=back)
        echoed = dialect_server.requests[-1].messages[1]
        assert echoed.content == reply.message.content
        assert echoed.reasoning == reply.message.reasoning
        assert [text[1:] for text in echoed.call_texts] == [
            text[1:] for text in reply.message.call_texts
        ]


def test_usage_ends_a_stream_only_where_it_is_asked_for(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    """Case 37; the heartbeats are in the test below."""
    dialect_server.begin(chat_reply("Good"))
    plain = client.chat.completions.create(model="m", messages=[USER], stream=True)
    assert [chunk.usage for chunk in plain] == [None] * 6
    counted = list(
        client.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
    )
    assert [bool(chunk.usage) for chunk in counted] == [False] * 6 + [True]
    assert counted[-1].choices == []


def test_the_sdk_reads_the_code_of_every_refusal_and_repeats_only_what_may_pass(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    for code in RefusalCode:
        if code.status in (429, 503):
            continue
        dialect_server.begin(refusal(code, param="messages"))
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="m", messages=[USER])
        error = caught.value
        assert (error.status_code, error.code, error.param) == (code.status, code, "messages")
        assert f"this is {code}" in str(error)
        assert len(dialect_server.bodies) == 1


def test_the_sdk_waits_as_it_is_told_and_marks_its_retry(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    dialect_server.begin(refusal(RefusalCode.NOT_AVAILABLE, retry_after_s=1), chat_reply("Here."))
    began = time.monotonic()
    whole = client.chat.completions.create(model="m", messages=[USER])
    assert time.monotonic() - began >= 0.9
    assert whole.choices[0].message.content == "Here."
    assert [request.is_retry for request in dialect_server.requests] == [False, True]


def test_an_error_behind_the_heartbeats_reaches_the_sdk(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    """Case 37."""
    dialect_server.begin(Late(refused=refusal(RefusalCode.CONTEXT_LENGTH_EXCEEDED)))
    stream = client.chat.completions.create(model="m", messages=[USER], stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "context_length_exceeded"
    words = "this model's maximum context length is exceeded: "
    assert caught.value.message == f"{words}this is context_length_exceeded"


def test_a_refused_body_reaches_the_sdk_as_400(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    dialect_server.begin(chat_reply("never"))
    image: Any = [{"role": "user", "content": [IMAGE]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=image)
    assert (caught.value.code, caught.value.param) == (
        "unsupported_parameter", "messages[0].content[0].type"
    )  # fmt: skip
    assert dialect_server.requests == []


def test_the_sdk_finds_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").created == 7
