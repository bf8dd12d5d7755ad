"""Responses: items become requests, replies become what OpenAI's SDK knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from worlds.builders.chat_replies import REPLIES, chat_reply, refusal, without_nulls
from worlds.parts.dialect_server import DialectServer, Late

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.chat import RefusalCode, Refused
from service.gateway.dialects.openai_responses import OPENAI_RESPONSES

TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Reads a page.",
    "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
    "strict": True,
}


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "any", "input": "Hello", **changed}


@pytest.fixture
def client(dialect_server: DialectServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dialect_server.url}/v1", api_key="k") as made:
        yield made


def call(call_id: str, arguments: str = '{"a": 1}') -> dict[str, Any]:
    named = {"type": "function_call", "call_id": call_id, "name": "look_up", "id": "fc"}
    return {**named, "arguments": arguments, "status": "completed"}


def output(call_id: str, said: object) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def said(words: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": words, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "m", "content": [part]}


def thought(words: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": words}]}


SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
SECRET = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        thought("hm"), said("I look"), call("c1"), call("c2"),
        output("c1", "f"), output("c2", [{"type": "input_text", "text": "g"}]),
        thought("well"), call("c3"), output("c3", None),
        said("one"), said("two"), SUMMARY, said("three"), call("c4"), thought("later"),
        {"type": "message", "role": "system", "content": "in the middle"},
        SECRET,
        {"role": "user", "content": "end"},
    ]  # fmt: skip
    request, _ = OPENAI_RESPONSES.read(
        body(input=items, instructions="be", tools=[TOOL], max_output_tokens=9), {}
    )

    def made(call_id: str) -> ToolCall:
        return ToolCall(name="look_up", arguments={"a": 1}, id=call_id)

    def assistant(content: str, *ids: str, reasoning: str | None = None) -> Message:
        calls = tuple(made(each) for each in ids)
        return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)

    assert request.messages == (
        Message(role=Role.SYSTEM, content="be"),
        Message(role=Role.SYSTEM, content="d"),
        Message(role=Role.USER, content="b"),
        assistant("I look", "c1", "c2", reasoning="hm"),
        Message(role=Role.TOOL, content="f", tool_call_id="c1"),
        Message(role=Role.TOOL, content="g", tool_call_id="c2"),
        assistant("", "c3", reasoning="well"),
        Message(role=Role.TOOL, content="", tool_call_id="c3"),
        assistant("one"),
        assistant("two"),
        assistant("three", "c4", reasoning="in short"),
        assistant("", reasoning="later"),
        Message(role=Role.SYSTEM, content="in the middle"),
        Message(role=Role.USER, content="end"),
    )
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    tool = ToolSchema(name="look_up", description="Reads a page.", parameters=schema)
    assert (request.tools, request.max_tokens, request.continues) == ((tool,), 9, "")


def test_an_answer_can_be_continued_by_its_id() -> None:
    request, style = OPENAI_RESPONSES.read(
        body(previous_response_id="resp_prompt-9-3.4", instructions="be brief"), {}
    )
    assert (request.continues, request.instructions) == ("prompt-9-3.4", "be brief")
    assert request.messages == (Message(role=Role.USER, content="Hello"),)
    assert style.repeated["previous_response_id"] == "resp_prompt-9-3.4"
    without, _ = OPENAI_RESPONSES.read(body(previous_response_id="resp_s.0"), {})
    assert without.instructions is None


def test_what_asks_for_nothing_is_taken() -> None:
    harmless = body(
        temperature=1.0, top_p=0.1, store=False, reasoning={"effort": "high"}, background=False,
        text={"format": {"type": "text"}, "verbosity": "low"}, include=["x"], truncation="auto",
        parallel_tool_calls=True, prompt_cache_key="k", client_metadata={}, tool_choice="auto",
        tools=[TOOL], stream_options={"include_obfuscation": False}, conversation=None,
    )  # fmt: skip
    request, style = OPENAI_RESPONSES.read(harmless, {})
    assert (len(request.tools), style.streams) == (1, False)
    without, _ = OPENAI_RESPONSES.read(body(tools=[TOOL], tool_choice="none"), {})
    assert without.tools == request.tools and not without.may_call


IMAGE = {"type": "input_image", "image_url": "data:"}
UNSUPPORTED = [
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [IMAGE]}]}),
    ("input[0].output[0].type", {"input": [output("c", [IMAGE])]}),
    ("input[0].type", {"input": [{"type": "custom_tool_call", "input": ""}]}),
    ("input[0].mood", {"input": [{"role": "user", "content": "", "mood": "glad"}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "look_up"}}),
    ("text.format", {"text": {"format": {"type": "json_schema"}}}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("beam_width", {"beam_width": 4}),
]
INVALID = [
    ("", "Hello"),
    ("input", body(input=None)),
    ("input", body(input=[])),
    ("input", body(input=[SECRET])),
    ("input", body(input={})),
    ("input", body(input="\ud800")),
    *(
        ("input[0].id", body(input=[{"type": "item_reference", "id": name}]))
        for name in ("m", "resp_s.0", "msg_", "fc_s.0", "fc_s.0.x", "fc_s.0.99999999999", None, 3)
        if name != "fc_s.0"
    ),
    ("input[0].role", body(input=[{"role": "tool", "content": ""}])),
    ("input[0].type", body(input=[{"type": 3}])),
    ("input[0].call_id", body(input=[{"type": "function_call_output", "output": ""}])),
    ("input[0].arguments", body(input=[call("c", "{")])),
    ("input[0].summary", body(input=[{"type": "reasoning", "summary": 3}])),
    ("instructions", body(instructions=[])),
    ("previous_response_id", body(previous_response_id="chatcmpl-1")),
    ("previous_response_id", body(previous_response_id="resp_")),
    ("previous_response_id", body(previous_response_id=4)),
    ("max_output_tokens", body(max_output_tokens="9")),
    ("text", body(text="plain")),
    ("tools[0].name", body(tools=[{"type": "function"}])),
]


def test_what_a_session_cannot_keep_to_is_refused_by_its_name() -> None:
    for param, changed in UNSUPPORTED:
        with pytest.raises(Refused) as caught:
            OPENAI_RESPONSES.read(body(**changed), {})
        found = caught.value.code, caught.value.param
        assert found == (RefusalCode.UNSUPPORTED_PARAMETER, param)
    for param, wrong in INVALID:
        with pytest.raises(Refused) as caught:
            OPENAI_RESPONSES.read(wrong, {})
        assert (caught.value.code, caught.value.param) == (RefusalCode.INVALID_REQUEST, param)


@pytest.mark.parametrize("name", REPLIES)
def test_the_sdk_makes_of_a_stream_what_the_whole_answer_is(
    name: str, client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    reply = REPLIES[name]
    dialect_server.begin(reply)
    asked: Any = {"model": "gpt", "input": "Hello", "tools": [TOOL], "instructions": "be"}
    whole = client.responses.create(**asked)
    is_cut_off = name.startswith("length")
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        assert [each.sequence_number for each in events] == list(range(len(events)))
        last: Any = events[-1]
        assert last.type == ("response.incomplete" if is_cut_off else "response.completed")
        streamed = last.response
    assert without_nulls(streamed.to_dict()) == without_nulls(whole.to_dict())
    # Each item and each text is sent whole once more, and is what its pieces make.
    done: Any = [each.item for each in events if each.type == "response.output_item.done"]
    assert [without_nulls(each.to_dict()) for each in done] == without_nulls(whole.to_dict())[
        "output"
    ]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == reply.message.content
    assert (whole.id, whole.model, whole.status) == (
        "resp_prompt-9-3.4", "gpt", "incomplete" if is_cut_off else "completed"
    )  # fmt: skip
    if is_cut_off:
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (
        11, 3, 14
    )  # fmt: skip
    # What was answered can be sent back.
    user = {"role": "user", "content": "Hello"}
    back: Any = [user, *(item.to_dict() for item in whole.output), user]
    client.responses.create(model="gpt", input=back)
    (_, echoed, _) = dialect_server.requests[-1].messages
    assert echoed.content == reply.message.content
    assert echoed.reasoning == reply.message.reasoning
    assert [each[1:] for each in echoed.call_texts] == [
        each[1:] for each in reply.message.call_texts
    ]
    client.responses.create(model="gpt", input="go on", previous_response_id=whole.id)
    assert dialect_server.requests[-1].continues == reply.turn_id


def test_the_sdk_gets_the_tokens_that_were_sampled(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    dialect_server.begin(REPLIES["tokens"])
    shown = {"token_ids": [5, 6, 7], "token_logprobs": [-0.5, None, -0.25]}
    assert client.responses.create(model="gpt", input="Hello").model_extra == shown
    with client.responses.stream(model="gpt", input="Hello") as stream:
        assert stream.get_final_response().model_extra == shown


def test_the_sdk_reads_refusals_and_repeats_only_what_may_pass(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    for code in (RefusalCode.SESSION_CLOSED, RefusalCode.ROLLOUT_STOPPED, RefusalCode.CONFLICT):
        dialect_server.begin(refusal(code, param="input"))
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(model="gpt", input="Hello")
        found = caught.value.status_code, caught.value.code, caught.value.param
        assert found == (code.status, code, "input")
        assert len(dialect_server.bodies) == 1
    dialect_server.begin(refusal(RefusalCode.TOO_MANY_REQUESTS, retry_after_s=1), chat_reply("On."))
    assert client.responses.create(model="gpt", input="Hello").output_text == "On."
    assert [request.is_retry for request in dialect_server.requests] == [False, True]


def test_an_error_behind_the_heartbeats_reaches_the_sdk(
    client: openai.OpenAI, dialect_server: DialectServer
) -> None:
    dialect_server.begin(Late(refused=refusal(RefusalCode.CONTEXT_LENGTH_EXCEEDED)))
    with (
        pytest.raises(openai.APIError) as caught,
        client.responses.stream(model="gpt", input="Hello") as stream,
    ):
        stream.get_final_response()
    assert caught.value.code == "context_length_exceeded"
    words = "this model's maximum context length is exceeded: "
    assert caught.value.message == f"{words}this is context_length_exceeded"


def test_functions_of_a_namespace_are_known_by_both_names_and_called_by_each() -> None:
    members = [TOOL, {**TOOL, "name": "count"}]
    group = {"type": "namespace", "name": "pages", "description": "Of pages.", "tools": members}
    called = {**call("c"), "namespace": "pages"}
    asked, style = OPENAI_RESPONSES.read(
        body(
            input=[{"role": "user", "content": "u"}, called, output("c", "r")], tools=[TOOL, group]
        ),
        {},
    )
    assert [tool.name for tool in asked.tools] == ["look_up", "pages.look_up", "pages.count"]
    assert asked.messages[1].tool_calls[0].name == "pages.look_up"
    reply = chat_reply(
        "",
        ToolCall(name="pages.count", arguments={}, id="a"),
        ToolCall(name="look_up", arguments={}, id="b"),
    )
    shown = OPENAI_RESPONSES.answer(reply, style)
    names = [(item.get("namespace"), item["name"]) for item in shown["output"]]
    assert names == [("pages", "count"), (None, "look_up")]
    assert [tool["type"] for tool in shown["tools"]] == ["function", "namespace"]
    assert [tool["name"] for tool in shown["tools"][1]["tools"]] == ["look_up", "count"]


def test_a_namespace_that_cannot_be_kept_to_is_refused() -> None:
    group = {"type": "namespace", "name": "a", "tools": [TOOL, TOOL]}
    cases: dict[str, dict[str, Any]] = {
        "tools[0].name": {**group, "name": None},
        "tools[0].description": {**group, "description": 3},
        "tools[0].tools": {**group, "tools": "x"},
        "tools[0].tools[0].type": {**group, "tools": [{"type": "custom"}]},
        "tools[1]": group,
        "tools[0].type": {"type": "web_search"},
    }
    for where, tool in cases.items():
        with pytest.raises(Refused) as caught:
            OPENAI_RESPONSES.read(body(tools=[tool]), {})
        assert caught.value.param == where
