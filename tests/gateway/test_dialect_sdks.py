"""Tests of replies as the SDKs of the providers read them, for all dialects and for each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from pydantic import BaseModel
from worlds.builders.chat_replies import REPLIES, chat_reply, refusal, without_nulls
from worlds.parts.dialect_sdks import SDKS, USER, ChatSdk, MessagesSdk, ResponsesSdk, Sdk
from worlds.parts.dialect_server import DialectServer, Late

from service.gateway.chat import RefusalCode


class Sum(BaseModel):
    """The form of an answer that a client asks for."""

    value: int


@pytest.fixture(params=SDKS.values(), ids=list(SDKS))
def sdk(request: pytest.FixtureRequest, dialect_server: DialectServer) -> Iterator[Sdk]:
    made: Sdk = request.param(dialect_server.url)
    with closing(made.client):
        yield made


def of_only(made: type[Sdk]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sdk", [made], ids=[made.name], indirect=True)


@pytest.mark.parametrize("name", REPLIES)
def test_the_sdk_reads_the_same_answer_from_a_stream_and_whole(
    name: str, sdk: Sdk, dialect_server: DialectServer
) -> None:
    """Check also that an answer can be sent back in the next request."""
    reply = REPLIES[name]
    dialect_server.begin(reply)
    whole = sdk.whole()
    assert without_nulls(sdk.streamed().to_dict()) == without_nulls(whole.to_dict())
    shown = sdk.shown(whole)
    assert shown.head == (f"{sdk.prefix}prompt-9-3.4", "m", {"assistant"})
    assert (shown.content, shown.reasoning) == (reply.message.content, reply.message.reasoning)
    assert shown.calls == [(call.name, call.arguments) for call in reply.message.tool_calls]
    assert all(shown.call_ids)
    assert (shown.end, shown.usage) == (sdk.ends[reply.stop_reason], (11, 3, 14))
    tokens = {"token_ids": [5, 6, 7], "token_logprobs": [-0.5, None, -0.25]}
    assert shown.tokens == (tokens if name == "tokens" else {})
    sdk.whole([USER, *sdk.back(whole), USER])
    (_, echoed, _) = dialect_server.requests[-1].messages
    assert (echoed.content, echoed.reasoning) == (reply.message.content, reply.message.reasoning)
    assert [each[1:] for each in echoed.call_texts] == [
        each[1:] for each in reply.message.call_texts
    ]


LASTING = [code for code in RefusalCode if code.status not in (429, 503)]


def test_the_sdk_reads_every_refusal_and_does_not_repeat_it(
    sdk: Sdk, dialect_server: DialectServer
) -> None:
    for code in LASTING:
        dialect_server.begin(refusal(code, param=sdk.turns))
        with pytest.raises(sdk.status_error) as caught:
            sdk.whole()
        error: Any = caught.value
        assert error.status_code == code.status
        assert sdk.reason(caught.value)[:2] == (code, sdk.turns)
        assert f"this is {code}" in str(caught.value)
        assert len(dialect_server.bodies) == 1


def test_the_sdk_waits_as_the_refusal_says_and_marks_its_retry(
    sdk: Sdk, dialect_server: DialectServer
) -> None:
    dialect_server.begin(refusal(sdk.passing, retry_after_s=1), chat_reply("Here."))
    began = time.monotonic()
    assert sdk.shown(sdk.whole()).content == "Here."
    assert time.monotonic() - began >= 0.9
    assert [request.is_retry for request in dialect_server.requests] == [False, True]


def test_an_error_after_heartbeats_reaches_the_sdk_in_a_known_form(
    sdk: Sdk, dialect_server: DialectServer
) -> None:
    dialect_server.begin(Late(refused=refusal(RefusalCode.CONTEXT_LENGTH_EXCEEDED)))
    with pytest.raises(sdk.error) as caught:
        sdk.streamed()
    code, _, message = sdk.reason(caught.value)
    assert code == "context_length_exceeded"
    assert message == f"{sdk.full_context}this is context_length_exceeded"
    if isinstance(sdk, MessagesSdk):
        error: Any = caught.value
        said = error.body
        assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")


def test_a_refused_body_reaches_the_sdk_as_400(sdk: Sdk, dialect_server: DialectServer) -> None:
    dialect_server.begin(chat_reply("never"))
    with pytest.raises(sdk.status_error) as caught:
        sdk.whole([{"role": "user", "content": [sdk.image]}])
    error: Any = caught.value
    assert error.status_code == 400
    code, param, _ = sdk.reason(caught.value)
    assert (code, param) == ("unsupported_parameter", f"{sdk.turns}[0].content[0].type")
    assert dialect_server.requests == []


def test_the_sdk_finds_the_model(sdk: Sdk) -> None:
    assert [model.id for model in sdk.client.models.list()] == ["tiny"]
    found = sdk.client.models.retrieve("tiny")
    assert found.to_dict()["created"] == 7
    if isinstance(sdk, MessagesSdk):
        assert sdk.client.models.retrieve("tiny").created_at.year == 1970


@of_only(ChatSdk)
def test_a_chat_completion_has_calls_and_usage_in_the_form_of_openai(
    sdk: ChatSdk, dialect_server: DialectServer
) -> None:
    dialect_server.begin(REPLIES["all"])
    whole = sdk.whole()
    assert whole.created == 1_700_000_000
    assert whole.usage.to_dict() == {
        "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14
    }  # fmt: skip
    assert [call.to_dict() for call in whole.choices[0].message.tool_calls] == [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (
            ("call_a", "look_up", '{"title": "Ærø 🏝", "deep": false}'),
            ("call_prompt_9_3_4_1", "count", "{}"),
        )
    ]
    for name, content in {"call": None, "length after a call": None, "nothing": ""}.items():
        dialect_server.begin(REPLIES[name])
        assert sdk.whole().choices[0].message.content == content


@of_only(ChatSdk)
def test_a_chat_stream_ends_with_usage_only_on_request(
    sdk: ChatSdk, dialect_server: DialectServer
) -> None:
    dialect_server.begin(chat_reply("Good"))
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "stream": True}
    plain = sdk.client.chat.completions.create(**asked)
    assert [chunk.usage for chunk in plain] == [None] * 6
    usage = {"include_usage": True}
    counted = list(sdk.client.chat.completions.create(**asked, stream_options=usage))
    assert [bool(chunk.usage) for chunk in counted] == [False] * 6 + [True]
    assert counted[-1].choices == []


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@of_only(ChatSdk)
def test_an_answer_that_the_sdk_has_parsed_can_be_sent_back(
    sdk: ChatSdk, dialect_server: DialectServer
) -> None:
    dialect_server.begin(chat_reply('{"value": 4}'))
    asked: dict[str, Any] = {"model": "m", "response_format": Sum}
    # The SDK parses the answer, and the server gets a form that it supports.
    asked["extra_body"] = {"response_format": {"type": "text"}}
    found = sdk.client.chat.completions.parse(messages=[USER], **asked).choices[0].message
    assert found.parsed == Sum(value=4)
    sdk.client.chat.completions.parse(messages=[USER, found, USER], **asked)
    assert dialect_server.bodies[-1]["messages"][1]["parsed"] == {"value": 4}
    assert dialect_server.requests[-1].messages[1].content == '{"value": 4}'


@of_only(ResponsesSdk)
@pytest.mark.parametrize("name", REPLIES)
def test_each_item_of_a_streamed_response_is_also_sent_whole(
    name: str, sdk: ResponsesSdk, dialect_server: DialectServer
) -> None:
    reply = REPLIES[name]
    dialect_server.begin(reply)
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": True}
    asked: Any = {"model": "m", "input": "Hello", "tools": [tool], "instructions": "be"}
    whole = sdk.client.responses.create(**asked)
    with sdk.client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    assert [each.sequence_number for each in events] == list(range(len(events)))
    end = "response.incomplete" if name.startswith("length") else "response.completed"
    assert events[-1].type == end
    sent = without_nulls(whole.to_dict())
    assert without_nulls(events[-1].response.to_dict()) == sent
    done = [each.item.to_dict() for each in events if each.type == "response.output_item.done"]
    assert without_nulls(done) == sent["output"]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == reply.message.content
    sdk.client.responses.create(model="m", input="go on", previous_response_id=whole.id)
    assert dialect_server.requests[-1].continues == reply.turn_id
