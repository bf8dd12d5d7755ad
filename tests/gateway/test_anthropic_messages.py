"""Messages: bodies become requests, replies become what Anthropic's SDK knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from worlds.builders.chat_replies import REPLIES, chat_reply, refusal, without_nulls
from worlds.parts.dialect_server import DialectServer, Late

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import RefusalCode, Refused
from service.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES

TOOL = {
    "name": "look_up",
    "description": "Reads a page.",
    "input_schema": {"type": "object", "properties": {"title": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"a": 1}}
USER = {"role": "user", "content": "Hello"}


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 9, "messages": [USER], **changed}


@pytest.fixture
def client(dialect_server: DialectServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=dialect_server.url, api_key="k") as made:
        yield made


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def result(call_id: str, content: object, **rest: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **rest}


def test_blocks_become_messages_in_their_order() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    empty = {"type": "thinking", "thinking": "", "signature": "s"}
    secret = {"type": "redacted_thinking", "data": "x"}
    messages = [
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": [thought, secret, empty, text("I look"), CALL]},
        {"role": "user", "content": [
            text("before"), result("c1", [text("f"), text("g")]),
            result("c2", "no such page", is_error=True), result("c3", None), text("after"),
        ]},
        {"role": "system", "content": "in the middle"},
        {"role": "assistant", "content": [empty, text("so")]},
        {"role": "user", "content": []},
    ]  # fmt: skip
    request, _ = ANTHROPIC_MESSAGES.read(
        body(system=[text("s"), text("t")], messages=messages, tools=[TOOL]), {}
    )
    call = ToolCall(name="look_up", arguments={"a": 1}, id="c1")
    assert request.messages == (
        Message(role=Role.SYSTEM, content="s\nt"),
        Message(role=Role.USER, content="b\nc"),
        Message(role=Role.ASSISTANT, content="I look", tool_calls=(call,), reasoning="hm"),
        Message(role=Role.USER, content="before"),
        Message(role=Role.TOOL, content="f\ng", tool_call_id="c1"),
        Message(role=Role.TOOL, content="Error: no such page", tool_call_id="c2"),
        Message(role=Role.TOOL, content="", tool_call_id="c3"),
        Message(role=Role.USER, content="after"),
        Message(role=Role.SYSTEM, content="in the middle"),
        Message(role=Role.ASSISTANT, content="so"),
        Message(role=Role.USER, content=""),
    )
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    tool = ToolSchema(name="look_up", description="Reads a page.", parameters=schema)
    assert (request.tools, request.max_tokens) == ((tool,), 9)


def test_what_asks_for_nothing_is_taken() -> None:
    harmless = body(
        temperature=1.0, top_k=5, top_p=0.1, stop_sequences=[], metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 4}, service_tier="auto", system="",
        output_config={"effort": "high"}, cache_control={}, mcp_servers=[], container=None,
        context_management={"edits": []}, tools=[{**TOOL, "type": "custom"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )  # fmt: skip
    request, style = ANTHROPIC_MESSAGES.read(harmless, {"Anthropic-Version": "2023-06-01"})
    assert (len(request.tools), len(request.messages), style.streams) == (1, 1, False)
    without, _ = ANTHROPIC_MESSAGES.read(body(tools=[TOOL], tool_choice={"type": "none"}), {})
    assert without.tools and (request.may_call, without.may_call) == (True, False)


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
def test_a_result_that_is_an_error_says_so_once(said: str, shown: str) -> None:
    for is_error, expected in ((True, shown), (False, said)):
        content = [result("c", said, is_error=is_error)]
        request, _ = ANTHROPIC_MESSAGES.read(
            body(messages=[{"role": "user", "content": content}]), {}
        )
        assert request.messages[0].content == expected


IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}
UNSUPPORTED = [
    ("messages", {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (
        "messages[0].content[0].content[0].type",
        {"messages": [{"role": "user", "content": [result("c", [IMAGE])]}]},
    ),
    ("messages[0].content[0].type", {"messages": [{"role": "assistant", "content": [IMAGE]}]}),
    ("messages[0].mood", {"messages": [{"role": "user", "content": "", "mood": "glad"}]}),
    ("system[0].type", {"system": [IMAGE]}),
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tool_choice": {"type": "tool", "name": "look_up"}}),
    ("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    ("mcp_servers", {"mcp_servers": [{}]}),
    ("container", {"container": "c"}),
    ("beam_width", {"beam_width": 4}),
]
INVALID = [
    ("", []),
    ("messages", body(messages=None)),
    ("stop_sequences", body(stop_sequences={})),
    ("stop_sequences[1]", body(stop_sequences=["a", 3])),
    ("messages[0].role", body(messages=[{"role": "tool", "content": ""}])),
    ("messages[0].content", body(messages=[{"role": "user", "content": 3}])),
    ("messages[0].content[0]", body(messages=[{"role": "user", "content": ["a"]}])),
    ("messages[0].content[0].type", body(messages=[{"role": "user", "content": [{}]}])),
    (
        "messages[0].content[0].tool_use_id",
        body(messages=[{"role": "user", "content": [{"type": "tool_result"}]}]),
    ),
    (
        "messages[0].content[0].is_error",
        body(messages=[{"role": "user", "content": [result("c", "", is_error="no")]}]),
    ),
    (
        "messages[0].content[0].input",
        body(messages=[{"role": "assistant", "content": [{**CALL, "input": "{"}]}]),
    ),
    ("system", body(system={})),
    ("tool_choice", body(tool_choice="auto")),
    ("tool_choice.type", body(tool_choice={})),
    ("max_tokens", body(max_tokens=False)),
    ("tools[1]", body(tools=[TOOL, TOOL])),
    ("tools[0].input_schema", body(tools=[{**TOOL, "input_schema": "x"}])),
    ("tools[0]", body(tools=[{**TOOL, "input_schema": {"properties": []}}])),
]


def test_what_a_session_cannot_keep_to_is_refused_by_its_name() -> None:
    for param, changed in UNSUPPORTED:
        with pytest.raises(Refused) as caught:
            ANTHROPIC_MESSAGES.read(body(**changed), {})
        found = caught.value.code, caught.value.param
        assert found == (RefusalCode.UNSUPPORTED_PARAMETER, param)
    for param, wrong in INVALID:
        with pytest.raises(Refused) as caught:
            ANTHROPIC_MESSAGES.read(wrong, {})
        assert (caught.value.code, caught.value.param) == (RefusalCode.INVALID_REQUEST, param)


@pytest.mark.parametrize("name", REPLIES)
def test_the_sdk_makes_of_a_stream_what_the_whole_answer_is(
    name: str, client: anthropic.Anthropic, dialect_server: DialectServer
) -> None:
    reply = REPLIES[name]
    dialect_server.begin(reply)
    asked: Any = {"model": "claude", "messages": [USER], "max_tokens": 9}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert without_nulls(stream.get_final_message().to_dict()) == without_nulls(whole.to_dict())
    assert (whole.id, whole.model, whole.role) == ("msg_prompt-9-3.4", "claude", "assistant")
    stops = {"length": "max_tokens", "call": "tool_use", "all": "tool_use"}
    assert whole.stop_reason == stops.get(name.partition(" ")[0], "end_turn")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (11, 3)
    texts = [block.text for block in whole.content if block.type == "text"]
    assert "".join(texts) == reply.message.content
    thoughts = [block.thinking for block in whole.content if block.type == "thinking"]
    assert thoughts == ([reply.message.reasoning] if reply.message.reasoning else [])
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [(each.name, each.input) for each in calls] == [
        (call.name, call.arguments) for call in reply.message.tool_calls
    ]
    assert all(each.id for each in calls)
    # What was answered can be sent back.
    back: Any = [USER, {"role": "assistant", "content": whole.content}, USER]
    client.messages.create(**{**asked, "messages": back})
    echoed = dialect_server.requests[-1].messages[1]
    assert echoed.content == reply.message.content
    assert echoed.reasoning == reply.message.reasoning
    assert [each[1:] for each in echoed.call_texts] == [
        each[1:] for each in reply.message.call_texts
    ]


def test_the_sdk_gets_the_tokens_that_were_sampled(
    client: anthropic.Anthropic, dialect_server: DialectServer
) -> None:
    dialect_server.begin(REPLIES["tokens"])
    asked: Any = {"model": "claude", "messages": [USER], "max_tokens": 9}
    shown = {"token_ids": [5, 6, 7], "token_logprobs": [-0.5, None, -0.25]}
    assert client.messages.create(**asked).model_extra == shown
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().model_extra == shown


def test_the_sdk_reads_every_refusal_and_repeats_only_what_may_pass(
    client: anthropic.Anthropic, dialect_server: DialectServer
) -> None:
    asked: Any = {"model": "claude", "messages": [USER], "max_tokens": 9}
    for code in RefusalCode:
        if code.status in (429, 503):
            continue
        dialect_server.begin(refusal(code, param="messages"))
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**asked)
        assert caught.value.status_code == code.status
        said: Any = caught.value.body
        assert said["type"] == "error"
        assert (said["error"]["code"], said["error"]["param"]) == (code, "messages")
        assert f"this is {code}" in str(caught.value)
        assert len(dialect_server.bodies) == 1
    dialect_server.begin(refusal(RefusalCode.NOT_AVAILABLE, retry_after_s=1), chat_reply("Here."))
    assert client.messages.create(**asked).content[0].to_dict()["text"] == "Here."
    assert [request.is_retry for request in dialect_server.requests] == [False, True]


def test_a_full_context_is_told_in_the_words_that_clients_know(
    client: anthropic.Anthropic, dialect_server: DialectServer
) -> None:
    dialect_server.begin(Late(refused=refusal(RefusalCode.CONTEXT_LENGTH_EXCEEDED)))
    asked: Any = {"model": "claude", "messages": [USER], "max_tokens": 9}
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(**asked) as stream,
    ):
        stream.get_final_message()
    said: Any = caught.value.body
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["message"] == "prompt is too long: this is context_length_exceeded"


def test_the_sdk_finds_the_model(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").created_at.year == 1970
