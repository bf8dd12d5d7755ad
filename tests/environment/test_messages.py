"""Tests of messages: which values they accept, and when two are equal."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from actors.environment.protocol import Message, Role, StepResult, ToolCall

CALL = ToolCall(id="c1", name="calculator", arguments={"expression": "3+4"})


def calling(*calls: Any) -> Message:
    return Message(role=Role.ASSISTANT, content="", tool_calls=calls)


def with_arguments(arguments: Any) -> Message:
    return calling(ToolCall(name="calculator", arguments=arguments))


def test_a_role_may_be_given_as_text_and_an_unknown_one_is_refused() -> None:
    message = Message(role="user", content="x")  # type: ignore[arg-type]
    assert message.role is Role.USER
    with pytest.raises(ValueError, match="role: got 'developer', expected one of system, user"):
        Message(role="developer", content="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": Role.USER, "tool_calls": (CALL,)}, "tool_calls: got one on a message of role"),
        ({"role": Role.USER, "reasoning": "hm"}, "reasoning: .* only on role assistant"),
        ({"role": Role.USER, "tool_call_id": "c1"}, "tool_call_id: .* only on role tool"),
        ({"role": Role.ASSISTANT, "tool_call_id": "c1"}, "tool_call_id: got one"),
        ({"role": Role.ASSISTANT, "reasoning": "a\ud800"}, "reasoning: got a lone surrogate"),
        ({"role": Role.TOOL, "tool_call_id": "\udc80"}, "tool_call_id: got a lone surrogate"),
    ],
)
def test_a_field_of_another_role_or_with_a_lone_surrogate_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Message(content="x", **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"content": None}, "content: got a NoneType, expected text"),
        ({"content": "", "reasoning": 3}, "reasoning: got an int, expected text"),
        ({"content": "", "tool_calls": [CALL]}, "tool_calls: got a list, expected a tuple"),
        ({"content": "", "tool_calls": ({"id": "c1"},)}, "got a dict, expected ToolCall values"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Message(role=Role.ASSISTANT, **fields)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "a value that is not JSON"),
        (b"bytes", "a value that is not JSON"),
        ({1, 2}, "a value that is not JSON"),
        (nested(100_000), "a value that is not JSON"),
        ("a\ud800", "lone surrogate"),
        ({"\ud800": 1}, "lone surrogate"),
    ],
)
def test_arguments_that_are_not_json_are_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_arguments({"expression": value})


def test_arguments_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="the arguments of a tool call: got a list"):
        with_arguments([1])


def test_messages_are_equal_only_if_all_their_fields_are() -> None:
    message = calling(CALL)
    assert message == calling(replace(CALL, arguments=dict(CALL.arguments)))
    assert hash(message) == hash(calling(CALL))
    others = [
        calling(replace(CALL, id="c2")),
        calling(replace(CALL, name="weather")),
        calling(replace(CALL, arguments={"expression": "4+3"})),
        calling(CALL, CALL),
        replace(message, reasoning="hm"),
        replace(message, content="x"),
    ]
    assert message not in others
    assert len({message, *others}) == 7


def test_a_message_is_pickled_with_its_calls() -> None:
    message = calling(CALL)
    there = pickle.loads(pickle.dumps(message))
    assert there == message
    assert there.tool_calls == (CALL,)


def test_a_message_does_not_change_with_the_dictionary_of_its_arguments() -> None:
    arguments: dict[str, Any] = {"n": 1}
    message = with_arguments(arguments)
    before = hash(message)
    arguments["n"] = 2
    assert hash(message) == before
    assert message == with_arguments({"n": 1})


def test_a_step_returns_only_new_messages_which_are_none_of_the_assistant() -> None:
    new = Message(role=Role.USER, content="Another.")
    repeated = Message(role=Role.ASSISTANT, content="3")
    words = "role 'assistant', expected only new messages .*; .*leave out .* the policy's reply"
    with pytest.raises(ValueError, match=words):
        StepResult(messages=(repeated, new))
    # The policy never sees the messages of an ended episode.
    StepResult(messages=(repeated, new), terminated=True)
    StepResult(messages=(repeated, new), truncated=True)
    others = (Message(role=role, content="sunny") for role in (Role.TOOL, Role.SYSTEM))
    StepResult(messages=(new, *others))
