"""Tests of canonical keys: equal for messages that a client only rewrote, else different."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.agents.session_player import call, result, says, system, user

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from service.gateway.canonical import links_of, request_digest, tools_key
from service.gateway.chat import ChatRequest

WEATHER = ToolSchema(name="weather", description="Of a city.", parameters={"type": "object"})


def key(*messages: Message) -> bytes:
    return links_of(messages)[-1].key


def called(**arguments: object) -> Message:
    return says("", ToolCall(id="a", name="search", arguments=arguments))


# Forms in which clients send the same message.
SAME = {
    "reasoning": [says("4"), says("4", reasoning="hm"), says("4", reasoning=" hm\n")],
    "empty thoughts": [says("4"), says("4", reasoning=""), says("<think>\n\n</think>\n\n4")],
    "white space around": [says("4"), says(" 4\n")],
    "order of arguments": [called(a=1, b={"c": 2, "d": 3}), called(b={"d": 3, "c": 2}, a=1)],
    "inlined thoughts": [
        says("4"),
        says("<think>hm</think>4"),
        says("<think>\nhm\n</think>\n\n4", reasoning="hm"),
        says("<thinking>hm</thinking> 4"),
        says("[THINK]hm[/THINK]4"),
        says("\u25c1think\u25b7hm\u25c1/think\u25b74"),
    ],
    "JavaScript's numbers": [called(n=1, x=-3), called(n=1.0, x=-3.0)],
    "numbers that JavaScript rounds": [
        called(n=1234567890123456789),
        called(n=1234567890123456800),
        called(n=1.2345678901234568e18),
    ],
    "numbers that JavaScript writes with an exponent": [
        called(n=[123456789012345678901234]),
        called(n=[1.2345678901234568e23]),
    ],
    "rotating header": [
        system("x-anthropic-billing-header: cc=1; cch=ab\nBe brief."),
        system("x-anthropic-billing-header: cc=1; cch=cd\nBe brief."),
        system("Be brief."),
    ],
    "header in the middle": [
        system("A\nx-anthropic-billing-header: 1\nB"),
        system("A\nx-anthropic-billing-header: 2\nB"),
    ],
}
OTHER = {
    "text": [says("4"), says("5"), says("4 5"), says("45")],
    "role": [says("4"), user("4"), system("4")],
    "a question's white space": [user("4"), user(" 4"), user("4\n")],
    "a thought in another place": [says("4"), says("4<think>hm</think>"), says("hm</think>4")],
    "arguments": [called(), called(a=1), called(a="1"), called(a=True), called(a=[1]), called(b=1)],
    "whole numbers": [called(a=2**53), called(a=2**53 - 1), called(a=2**53 + 2)],
    "fractions": [called(a=0.5), called(a=0.25), called(a=0)],
    "called tool": [says("", call("a")), says("", call("a", name="weather")), says("")],
    "number of calls": [says("", call("a")), says("", call("a"), call("b"))],
    "order of calls": [
        says("", call("a", "1"), call("b", "2")),
        says("", call("a", "2"), call("b", "1")),
    ],
    "header of a user": [user("x-anthropic-billing-header: 1"), user("")],
    "name of the speaker": [
        Message(role=Role.USER, content="4", name=name) for name in (None, "a", "b")
    ],
}


@pytest.mark.parametrize("messages", SAME.values(), ids=SAME)
def test_rewritten_forms_of_a_message_have_the_same_key(messages: list[Message]) -> None:
    assert len({key(message) for message in messages}) == 1


@pytest.mark.parametrize("messages", OTHER.values(), ids=OTHER)
def test_different_messages_have_different_keys(messages: list[Message]) -> None:
    assert len({key(message) for message in messages}) == len(messages)


def test_renaming_the_ids_of_calls_does_not_change_the_key() -> None:
    def chat(first: str, second: str, *order: str) -> bytes:
        calls = (call(first, "1"), call(second, "2"))
        return key(user("hi"), says("", *calls), *(result(each, "r" + each) for each in order))

    def of_results(first: str, second: str, *, swapped: bool = False) -> bytes:
        answers = [(first, "one"), (second, "two")]
        if swapped:
            answers = [(second, "one"), (first, "two")]
        messages = (result(*answer) for answer in answers)
        return key(user("hi"), says("", call(first, "1"), call(second, "2")), *messages)

    def repeated(*ids: str) -> tuple[Message, ...]:
        return (says("", *(call("a", text) for text in "12")), *(result(each, "r") for each in ids))

    assert of_results("a", "b") == of_results("b", "a") == of_results("toolu_1", "toolu-1")
    assert of_results("a", "b") != of_results("a", "b", swapped=True)
    # Results with one id answer the calls with this id in order; a further one, the last of them.
    assert of_results("a", "b") == of_results("a", "a")
    assert [link.answers for link in links_of(repeated("a", "a", "a"))] == [None, 0, 1, 1]
    # A later reply may use the id again, even if an earlier call has no result.
    again = (*repeated("a", "a")[:2], *repeated("a", "a"))
    assert [link.answers for link in links_of(again)] == [None, 0, None, 2, 3]
    # The id of a result without a call counts, and the name of the tool does not.
    assert chat("a", "b", "x") != chat("a", "b", "y")
    named = Message(role=Role.TOOL, content="4", name="calculator", tool_call_id="a")
    assert key(says("", call("a")), named) == key(says("", call("b")), result("b", "4"))


def test_a_repeated_id_refers_to_the_newest_call() -> None:
    chat = [says("", call("call_0")), result("call_0", "1"), says("", call("call_0"))]
    links = links_of([*chat, result("call_0", "2"), result("call_1", "3")])
    assert [link.answers for link in links] == [None, 0, None, 1, None]


@given(st.data())
@settings(max_examples=50)
def test_reading_a_conversation_in_two_parts_gives_the_links_of_the_whole(
    data: st.DataObject,
) -> None:
    names = st.sampled_from(["", "a", "b", "c"])
    calling = st.lists(names, max_size=2).map(lambda ids: says("", *map(call, ids)))
    message = calling | names.map(user) | names.map(lambda name: result(name, "4"))
    chat = data.draw(st.lists(message, min_size=1, max_size=8))
    # The earlier part ends with a turn, whose calls have unique ids.
    cut = data.draw(st.integers(1, len(chat)))
    chat.insert(cut - 1, says("", *map(call, data.draw(st.lists(names, unique=True)))))
    ids = [call_id for each in chat[:cut] for call_id, _, _ in each.call_texts]
    newest = {call_id: number for number, call_id in enumerate(ids)}
    whole, first = links_of(chat), links_of(chat[:cut])
    rest = links_of(chat[cut:], after=first[-1].key, num_calls=len(ids), call_before=newest.get)
    assert first + rest == whole
    assert len({link.key for link in whole}) == len(whole)


@pytest.mark.parametrize("num_earlier", [0, 1])
def test_results_after_a_later_reply_answer_the_newest_call_with_their_id(num_earlier: int) -> None:
    results = [result("a", "1"), result("a", "2")]
    began = (says("", call("a"), call("a")), *results[:num_earlier], says("sampled"))
    whole, first = links_of((*began, *results)), links_of(began)
    rest = links_of(results, after=first[-1].key, num_calls=2, call_before={"a": 1}.get)
    assert [link.answers for link in rest] == [1, 1]
    assert first + rest == whole


def test_tools_have_the_same_key_in_any_order() -> None:
    parameters = {"required": [], "type": "object"}
    rekeyed = replace(WEATHER, parameters={"type": "object", "required": []})
    keys = [
        tools_key((CALCULATOR, replace(WEATHER, parameters=parameters))),
        tools_key([rekeyed, CALCULATOR]),
    ]
    assert len(set(keys)) == 1
    assert tools_key(()) == tools_key([])
    described = replace(CALCULATOR, description="Of numbers.")
    others = [(), (CALCULATOR,), (WEATHER,), (CALCULATOR, WEATHER), (described,)]
    assert len({tools_key(tools) for tools in others}) == len(others)


def test_only_a_repeated_request_has_the_same_digest() -> None:
    def digest(*, tools: tuple[ToolSchema, ...] = (), **fields: object) -> str:
        messages = fields.pop("messages", (user("hi"), says("4"), user("no")))
        request = ChatRequest(messages=messages, tools=tools, **fields)  # type: ignore[arg-type]
        return request_digest(request, key=key(*request.messages), tools=tools_key(tools))

    assert digest() == digest(is_retry=True) == digest(idempotency_key="k")
    assert digest(tools=(CALCULATOR, WEATHER)) == digest(tools=(WEATHER, CALCULATOR))
    others = [
        digest(),
        digest(tools=(CALCULATOR,)),
        digest(max_tokens=5),
        digest(is_auxiliary=True),
        digest(continues="s.1"),
        digest(messages=(user("hi"),)),
        digest(messages=(user("hi"), says("4", reasoning="hm"), user("no"))),
    ]
    assert len(set(others)) == len(others)
