"""Tests that results of parallel calls are shown in the order of the calls or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.builders.episode_builders import (
    DONE,
    HELLO,
    FakeEnvironment,
    FakePolicy,
    play,
    renderer,
    returning,
)
from worlds.builders.episode_builders import reply as sampled
from worlds.models.tool_families import FAMILIES, Family

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chat_template import RenderError, in_call_order
from actors.environment.chats import BadChat, ChatEncoder
from actors.environment.protocol import Message, Observation, Role, StepResult, ToolCall
from actors.types import Outcome

CALLS = tuple(
    ToolCall(id=f"abcdefgh{number}", name=name, arguments={"expression": "3+4"})
    for number, name in enumerate(("calculator", "weather", "search"), start=1)
)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def reply(content: str, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls)


def result(call: ToolCall, content: str) -> Message:
    return Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)


def test_results_are_put_directly_after_their_calls_in_call_order() -> None:
    said = reply("both", *CALLS)
    results = [result(call, text) for call, text in zip(CALLS, "789", strict=True)]
    first, second, third = results
    other, nameless = (replace(second, tool_call_id=each) for each in ("unknown00", None))
    calls = [(call.id, call.name) for call in CALLS]
    for sent, shown in (
        ([third, user("and"), first], [first, third, user("and")]),
        ([user("and"), second, first], [first, second, user("and")]),
        ([other, first], [first, other]),
        ([second, second, first], [first, second, second]),
        ([nameless, first], [first, nameless]),
        ([other, user("and"), other, other], [other, other, other, user("and")]),
    ):
        assert in_call_order(sent, calls) == tuple(shown)
        # The results answer the given calls, not those of a later reply.
        rest = [said, user("and"), second, first]
        assert in_call_order([*sent, *rest], calls) == (*shown, said, first, second, user("and"))
    # Calls of two consecutive messages of the assistant count as calls of one reply.
    apart = [reply("", CALLS[0]), reply("", CALLS[1])]
    assert in_call_order([*apart, second, first]) == (*apart, first, second)


@pytest.mark.parametrize("family", [FAMILIES[name] for name in ("qwen3", "hermes", "mistral")])
def test_a_result_that_looks_like_that_of_another_call_is_refused(family: Family) -> None:
    first, second = (result(call, "7") for call in CALLS[:2])
    stray = replace(second, tool_call_id="unknown00")
    said, check = reply("", *CALLS[:2]), family.renderer.template.check_results
    for kept in (
        [first],
        [second, first],
        [replace(first, tool_call_id=None)],
        [first, second, stray],
        [user("never mind")],
        [],
    ):
        check([user("hi"), said, *kept, user("and?")])
        check(kept, [(call.id, call.name) for call in CALLS[:2]])
    # As many results as calls may all have other ids.
    check([user("hi"), reply("", CALLS[0]), stray])
    check([user("hi"), said, stray, replace(stray, tool_call_id="unknown01"), user("and?")])
    # A result before all calls belongs to a history whose beginning the client removed.
    check([stray, user("hi")])
    for misread, name in (
        ([second], r"no result for call 1 \(calculator\) .* one for call 2 \(weather\)"),
        ([stray], r"no result for call 1 \(calculator\) .* one for id 'unknown00'"),
        ([first, first], r"no result for call 2 \(weather\) .* one for id 'abcdefgh1'"),
        ([first, stray], r"no result for call 2 \(weather\) .* one for id 'unknown00'"),
        ([stray] * 3, r"no result for call 1 \(calculator\) .* one for id 'unknown00'"),
    ):
        if family.name == "qwen3":
            with pytest.raises(RenderError, match=f"{name}.*; send one result for each call"):
                check([user("hi"), said, *misread])
        else:
            check([user("hi"), said, *misread])
    if family.name == "qwen3":
        with pytest.raises(RenderError, match="so the policy could not see which result answers"):
            check([user("hi"), reply("", CALLS[0]), stray, stray])
    # A name does not distinguish two calls of one tool; an id does.
    alike = reply("", CALLS[0], replace(CALLS[1], name="calculator"))
    if family.name == "mistral":
        check([user("hi"), alike, second])
    else:
        with pytest.raises(RenderError, match="the chat template shows no ids of calls"):
            check([user("hi"), alike, second])


@pytest.mark.parametrize(
    "sent", ["in order", "reversed", "renamed", "none", "second", "stray", "first chat"]
)
async def test_results_of_an_environment_for_the_wrong_calls_are_an_error(sent: str) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    # The fake policy gives these ids to the calls of a reply.
    calls = [ToolCall(id=f"call-{n}", name="calculator", arguments={}) for n in (0, 1)]
    first, second = (result(*pair) for pair in zip(calls, ("one", "two"), strict=True))
    stray = replace(second, tool_call_id="unknown")
    renamed = [replace(first, tool_call_id="other"), stray]
    results = {
        "reversed": [second, first],
        "renamed": renamed,
        "none": [],
        "second": [second],
        "stray": [stray],
    }
    begun = [*HELLO.messages, *([reply("", *calls), second] if sent == "first chat" else [])]
    environment = FakeEnvironment(
        StepResult(messages=(*results.get(sent, [first, second]), user("and?"))),
        DONE,
        on_reset=returning(Observation(messages=tuple(begun), tools=(CALCULATOR,))),
    )
    policy = FakePolicy(sampled(f"{call}\n{call}<|im_end|>"), sampled())
    trajectory = await play(environment, policy, max_context_tokens=4000)
    if sent in ("in order", "reversed", "renamed", "none"):
        assert trajectory.outcome is Outcome.COMPLETED
        shown = renderer().decode(policy.requests[-1].prompt_token_ids)
        assert ("one" in shown) is ("two" in shown) is (sent != "none")
        assert shown.find("one") <= shown.find("two")
    else:
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
        method = "reset" if sent == "first chat" else "step"
        assert trajectory.detail.startswith(f"{method}: RenderError: got no result for call 1 ")
        assert len(policy.requests) == (method == "step")


async def test_the_only_result_of_the_only_call_may_have_another_id() -> None:
    own = Message(role=Role.TOOL, content="seven", name="calculator", tool_call_id="calc-1")
    environment = FakeEnvironment(
        StepResult(messages=(own,)),
        DONE,
        on_reset=returning(Observation(messages=HELLO.messages, tools=(CALCULATOR,))),
    )
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    policy = FakePolicy(sampled(f"{call}<|im_end|>"), sampled())
    trajectory = await play(environment, policy, max_context_tokens=4000)
    assert trajectory.outcome is Outcome.COMPLETED
    assert "seven" in renderer().decode(policy.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_chat_with_a_result_that_would_be_read_as_that_of_another_call_is_refused(
    name: str,
) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    encoder = ChatEncoder(tokenizer, stop_token_ids=[tokenizer.convert_tokens_to_ids(family.end)])
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in CALLS[:2]
    ]
    first, second = (
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
        for call, content in zip(CALLS, "78", strict=False)
    )
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
    answer = {"role": "assistant", "content": "It is 8."}
    assert encoder.samples({"messages": [*asked, second, first, answer]}, "chat")
    others = [result | {"tool_call_id": f"stranger{n}"} for n, result in enumerate((first, second))]
    assert encoder.samples({"messages": [*asked, *others, answer]}, "chat")
    # The results after the last trained reply are not read by the policy.
    assert encoder.samples({"messages": [*asked, second]}, "chat")
    row = {"messages": [*asked, second, answer]}
    if name == "mistral":
        assert encoder.samples(row, "chat")
        return
    with pytest.raises(BadChat, match=r"messages: got no result for call 1 \(calculator\) .* ids"):
        encoder.samples(row, "chat")
