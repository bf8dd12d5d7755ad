"""Tests that all dialects read the same request, and that any body is read or refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.builders.chat_replies import REPLIES

from service.gateway.chat import ChatRequest, RefusalCode, Refused
from service.gateway.dialects import DIALECTS
from service.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES
from service.gateway.dialects.dialect import AnswerStyle, Dialect, error_headers
from service.gateway.dialects.openai_chat import OPENAI_CHAT
from service.gateway.dialects.openai_responses import OPENAI_RESPONSES
from service.gateway.dialects.reading import MAX_IGNORED

FUNCTION = {
    "name": "look_up",
    "description": "Reads a page.",
    "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
}
ARGUMENTS = '{"title": "Ærø"}'
# A system message, a reply with thought, text and call, its result, a text, and a question.
CHAT: dict[str, Any] = {
    "model": "m", "max_tokens": 9, "stream": True, "tool_choice": "auto",
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be"}]},
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant", "content": "I look", "reasoning_content": "hm",
            "tool_calls": [{
                "id": "c1", "type": "function",
                "function": {"name": "look_up", "arguments": ARGUMENTS},
            }],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "Sure?"},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 9, "stream": True, "tool_choice": {"type": "auto"},
    "tools": [{
        "name": FUNCTION["name"], "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }],
    "system": [{"type": "text", "text": "be"}],
    "messages": [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "c1", "name": "look_up", "input": json.loads(ARGUMENTS)},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "is_error": False,
             "content": [{"type": "text", "text": "found"}]},
        ]},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "m", "max_output_tokens": 9, "stream": True, "tool_choice": "auto",
    "tools": [{"type": "function", "strict": None, **FUNCTION}],
    "instructions": "be",
    "input": [
        {"role": "user", "content": "Where?"},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ],
}  # fmt: skip
BODIES = [(OPENAI_CHAT, CHAT), (ANTHROPIC_MESSAGES, MESSAGES), (OPENAI_RESPONSES, RESPONSES)]


def test_the_same_conversation_is_the_same_request_in_every_dialect() -> None:
    """Check one conversation in each dialect; tests/scenarios has a session that mixes them."""
    requests = [dialect.read(body, {})[0] for dialect, body in BODIES]
    # Only the dialect Responses says which message later instructions replace.
    assert [each.instructions for each in requests] == [None, None, requests[2].messages[0].content]
    assert requests[0] == requests[1] == replace(requests[2], instructions=None)
    assert [message.role for message in requests[0].messages] == [
        "system", "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip
    assert tuple(dialect for dialect, _ in BODIES) == DIALECTS


def test_every_dialect_shows_the_same_calls_and_ids_of_a_reply() -> None:
    reply, style = REPLIES["all"], AnswerStyle(model="m", streams=False)
    chat = OPENAI_CHAT.answer(reply, style)["choices"][0]["message"]["tool_calls"]
    blocks = ANTHROPIC_MESSAGES.answer(reply, style)["content"]
    items = OPENAI_RESPONSES.answer(reply, style)["output"]
    ids = [call["id"] for call in chat]
    assert ids == [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert ids == [item["call_id"] for item in items if item["type"] == "function_call"]


def test_no_piece_of_a_stream_splits_a_character_or_a_line() -> None:
    """Check streams for clients that decode events separately or end lines at U+0085 and U+2028."""
    style, content = AnswerStyle(model="m", streams=True), REPLIES["characters"].message.content
    for dialect in DIALECTS:
        sent = list(dialect.events(REPLIES["characters"], style))
        assert all(each.endswith(b"\n\n") and each.count(b"\n\n") == 1 for each in sent)
        lines = [line for each in sent for line in each.decode("ascii").splitlines()]
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        found = [text for each in data for text in deltas(each)]
        assert "".join(found) == content
        assert 2 <= len(found) <= 4
        for text in found:
            text.encode()


def deltas(data: dict[str, Any]) -> list[str]:
    """Return the text that an event of any dialect adds."""
    if data.get("type") == "response.output_text.delta":
        return [data["delta"]]
    if data.get("type") == "content_block_delta":
        return [data["delta"]["text"]]
    return [
        each["delta"]["content"] for each in data.get("choices", []) if each["delta"].get("content")
    ]


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=4),
    st.sampled_from([
        "\ud800", "", "user", "assistant", "tool", "tool_result", "function_call", "thinking",
        "reasoning", "message", "{", "{'a': None}", "[]", "{'a': '\ud800'}", '{"a": NaN}',
    ]),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "name", "id", "\udfff", "properties"]),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return each container of a tree with each of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    return found


@pytest.mark.parametrize(("dialect", "body"), BODIES, ids=[each.name for each, _ in BODIES])
@settings(max_examples=150)
@given(data=st.data())
def test_any_body_is_a_request_or_is_refused(
    dialect: Dialect, body: dict[str, Any], data: st.DataObject
) -> None:
    """Check valid bodies of which a few parts are changed, removed, moved or added."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        there = places(body)
        if not there:
            break
        node, key = there[data.draw(st.integers(0, len(there) - 1))]
        match data.draw(st.sampled_from(["change", "remove", "move", "add"])):
            case "change":
                node[key] = data.draw(TREES)
            case "remove":
                del node[key]
            case "move":
                other, at = there[data.draw(st.integers(0, len(there) - 1))]
                node[key] = copy.deepcopy(other[at])
            case _ if isinstance(node, dict):
                node[data.draw(st.sampled_from(sorted(dialect.parameters)))] = data.draw(TREES)
    try:
        request, style = dialect.read(body, {"X-Stainless-Retry-Count": "1"})
    except Refused as refused:
        assert refused.code.status == 400
        json.dumps(dialect.error(refused), ensure_ascii=False).encode()
        dialect.error_event(refused)
        return
    assert isinstance(request, ChatRequest) and request.messages
    whole = dialect.answer(REPLIES["all"], style)
    json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()
    assert b"".join(dialect.events(REPLIES["all"], style)).endswith(b"\n\n")


@settings(max_examples=50)
@given(body=TREES)
def test_any_json_that_is_not_a_request_is_refused(body: object) -> None:
    for dialect in DIALECTS:
        with pytest.raises(Refused):
            dialect.read(body, {})


def test_a_dialect_accepts_and_refuses_parameters_as_its_table_says() -> None:
    """Check that values are accepted only if the table calls them harmless or without effect."""
    for dialect, body in BODIES:
        assert set(body) <= {
            name for name, each in dialect.parameters.items() if each.effect == "read"
        }
        for name, parameter in dialect.parameters.items():
            assert parameter.note and not parameter.note.endswith(".")
            if parameter.effect == "none":
                assert dialect.read({**body, name: {"any": [1]}}, {}) == dialect.read(body, {})
            elif parameter.effect in ("refused", "ignorable"):
                for value in (None, *parameter.harmless):
                    assert dialect.read({**body, name: value}, {}) == dialect.read(body, {})
                with pytest.raises(Refused) as caught:
                    dialect.read({**body, name: {"any": [1]}}, {})
                found = caught.value.code, caught.value.param
                assert found == (RefusalCode.UNSUPPORTED_PARAMETER, name)
            else:
                assert parameter.harmless == ()


def test_ignorable_parameters_are_noted_by_name_and_others_are_refused() -> None:
    for dialect, body in BODIES:
        plain, _ = dialect.read(body, {})
        assert plain.ignored == ()
        for name, parameter in dialect.parameters.items():
            if parameter.effect not in ("refused", "ignorable"):
                continue
            asked = {**body, name: {"any": [1]}}
            if parameter.effect == "refused":
                with pytest.raises(Refused) as caught:
                    dialect.read(asked, {}, ignores=True)
                assert caught.value.param == name
                continue
            request, _ = dialect.read(asked, {}, ignores=True)
            assert request == replace(plain, ignored=(name,))
            for harmless in parameter.harmless:
                assert dialect.read({**body, name: harmless}, {}, ignores=True)[0] == plain


def test_forms_and_forced_calls_can_be_ignored_in_each_dialect() -> None:
    schema = {"type": "json_schema", "name": "o", "schema": {"type": "object"}}
    asked: list[tuple[Dialect, dict[str, Any], set[str]]] = [
        (OPENAI_CHAT, {**CHAT, "tool_choice": "required", "response_format": schema},
         {"tool_choice", "response_format"}),
        (OPENAI_CHAT, {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}},
                       "beam_width": 4, "stream_options": {"rate": 1}},
         {"tool_choice", "beam_width", "stream_options.rate"}),
        (ANTHROPIC_MESSAGES, {**MESSAGES, "tool_choice": {"type": "any"},
                              "output_config": {"effort": "low", "format": schema}},
         {"tool_choice", "output_config.format"}),
        (OPENAI_RESPONSES, {**RESPONSES, "tool_choice": {"type": "function", "name": "look_up"},
                            "text": {"format": schema, "verbosity": "low"}},
         {"tool_choice", "text.format"}),
    ]  # fmt: skip
    plain, _ = OPENAI_CHAT.read(CHAT, {})
    for dialect, body, names in asked:
        request, _ = dialect.read(body, {}, ignores=True)
        assert set(request.ignored) == names
        assert replace(request, ignored=(), instructions=None) == plain


def test_the_number_of_ignored_parameters_of_a_request_is_bounded() -> None:
    unknown = {f"x{number}": 1 for number in range(MAX_IGNORED)}
    request, _ = OPENAI_CHAT.read({**CHAT, **unknown}, {}, ignores=True)
    assert request.ignored == tuple(unknown)
    with pytest.raises(Refused):
        OPENAI_CHAT.read({**CHAT, **unknown, "one": 1}, {}, ignores=True)


def test_parameters_that_change_the_form_or_content_of_an_answer_are_never_ignored() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    for param, changed in (
        ("n", {"n": 2}),
        ("logprobs", {"logprobs": True}),
        ("chat_template", {"chat_template": "x"}),
        ("documents", {"documents": [{"text": "x"}]}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ("functions", {"functions": [{}]}),
        ("messages[0].content[0].type", {"messages": [image]}),
        ("messages[0].mood", {"messages": [{"role": "user", "content": "", "mood": "glad"}]}),
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ):
        with pytest.raises(Refused) as caught:
            OPENAI_CHAT.read({**CHAT, **changed}, {}, ignores=True)
        assert caught.value.param == param


def test_only_refusals_for_a_temporary_reason_ask_for_a_retry() -> None:
    for code in RefusalCode:
        headers = error_headers(Refused(code, "", retry_after_s=5))
        if code.status in (429, 503):
            assert headers == {"retry-after": "5"}
        else:
            assert headers == {"x-should-retry": "false"}
    assert error_headers(Refused(RefusalCode.NOT_AVAILABLE, "")) == {}


SCHEMA = FUNCTION["parameters"]
NAMED = {"name": "look_up"}
FUNCTION_TOOL = {"type": "function", "function": FUNCTION}


def asking(content: list[Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("dialect", "body", "words"),
    [
        (
            OPENAI_CHAT,
            {**CHAT, "tools": [{"type": "function", "function": {**NAMED, "params": SCHEMA}}]},
            "tools[0].function.params: got an object, expected the schema of the arguments as "
            "`parameters`",
        ),
        (
            OPENAI_CHAT,
            {**CHAT, "tools": [{"type": "function", "function": NAMED, "parameters": SCHEMA}]},
            "tools[0].parameters: got an object, expected the schema of the arguments as "
            "`function.parameters`",
        ),
        (
            ANTHROPIC_MESSAGES,
            {**MESSAGES, "tools": [FUNCTION]},
            "tools[0].parameters: got an object, expected the schema of the arguments as "
            "`input_schema`",
        ),
        (
            OPENAI_RESPONSES,
            {**RESPONSES, "tools": [{"type": "function", **NAMED, "inputSchema": SCHEMA}]},
            "tools[0].inputSchema: got an object",
        ),
        *(
            (
                OPENAI_CHAT,
                {**CHAT, "tools": [{**FUNCTION_TOOL, "function": {**FUNCTION, name: value}}]},
                f"tools[0].function.{name}: got an unknown field with a text, which no prompt "
                "would show; put it into `description` or `parameters`",
            )
            for name, value in (
                ("examples", ["look_up(Rome)"]),
                ("returns", "a page"),
                ("return", {"type": "string"}),
            )
        ),
        (
            OPENAI_CHAT,
            {**CHAT, "tools": [{**FUNCTION_TOOL, "usage": "often"}]},
            "tools[0].usage: got an unknown field with a text, which no prompt would show; put it "
            "into `function.description`",
        ),
        (
            ANTHROPIC_MESSAGES,
            {**MESSAGES, "tools": [{**MESSAGES["tools"][0], "input_examples": [{"n": 1}]}]},
            "tools[0].input_examples: got an unknown field with a text",
        ),
        (
            OPENAI_RESPONSES,
            {**RESPONSES, "tools": [{"type": "function", **FUNCTION, "output_schema": SCHEMA}]},
            "tools[0].output_schema: got an unknown field with a text",
        ),
        (
            OPENAI_RESPONSES,
            {**RESPONSES, "tools": [{"type": "namespace", "name": "n", "hint": "h", "tools": []}]},
            "tools[0].hint: got an unknown field with a text",
        ),
        (
            OPENAI_CHAT,
            asking([{"type": "text", "text": "a", "title": "A"}]),
            "messages[0].content[0].title: got an unknown field with a text, which no prompt would "
            "show; put it into `text`",
        ),
        (
            ANTHROPIC_MESSAGES,
            asking([{"type": "text", "text": "a", "context": "b"}]),
            "messages[0].content[0].context: got an unknown field with a text",
        ),
        (OPENAI_CHAT, {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content: got null"),
        (
            OPENAI_CHAT,
            {**CHAT, "messages": [{"role": "developer", "content": None}, *CHAT["messages"]]},
            "messages[0].content: got null, expected text",
        ),
        (
            ANTHROPIC_MESSAGES,
            {**MESSAGES, "messages": [{"role": "user", "content": None}]},
            "messages[0].content: got null",
        ),
        (OPENAI_RESPONSES, {**RESPONSES, "input": [{"role": "user"}]}, "input[0].content: got nu"),
        (
            OPENAI_RESPONSES,
            {**RESPONSES, "include": ["x", "message.output_text.logprobs"]},
            "include[1]: sessions do not support message.output_text.logprobs: create the session "
            "with shows_tokens",
        ),
        (OPENAI_RESPONSES, {**RESPONSES, "include": "x"}, "include: got text, expected a list"),
    ],
)
def test_content_that_the_prompt_or_answer_would_lack_is_refused(
    dialect: Dialect, body: dict[str, Any], words: str
) -> None:
    for ignores in (False, True):
        with pytest.raises(Refused) as refused:
            dialect.read(body, {}, ignores=ignores)
        assert words in refused.value.message


def test_a_tool_without_arguments_needs_no_schema() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request, _ = ANTHROPIC_MESSAGES.read({**MESSAGES, "tools": [{**NAMED, **cached}]}, {})
    assert request.tools[0].parameters == {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": NAMED, **cached}]
    request, _ = OPENAI_CHAT.read({**CHAT, "tools": tools}, {})
    assert request.tools[0].parameters == {"type": "object", "properties": {}}


def test_only_the_value_1_marks_an_auxiliary_call() -> None:
    for value, is_auxiliary in (("1", True), ("0", False)):
        request, _ = OPENAI_CHAT.read(CHAT, {"X-Rayloom-Auxiliary": value})
        assert request.is_auxiliary == is_auxiliary
    for value in ("true", "yes", "", " 1"):
        with pytest.raises(Refused, match="X-Rayloom-Auxiliary: got"):
            OPENAI_CHAT.read(CHAT, {"X-Rayloom-Auxiliary": value})


def test_fields_that_are_not_for_the_policy_are_accepted_in_texts_and_tools() -> None:
    part = {
        "type": "text", "text": "a", "citations": [{"cited_text": "b"}], "annotations": [],
        "cache_control": {"type": "ephemeral"}, "id": "p", "index": 3, "title": " ", "context": {},
    }  # fmt: skip
    tool = {
        **MESSAGES["tools"][0], "type": "custom", "strict": True, "defer_loading": True,
        "allowed_callers": ["direct"], "input_examples": [], "title": None,
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    for dialect, tools in (
        (ANTHROPIC_MESSAGES, [tool]),
        (OPENAI_CHAT, [{**FUNCTION_TOOL, "cache_control": {"type": "ephemeral"}, "index": 0}]),
    ):
        request, _ = dialect.read({**asking([part]), "tools": tools}, {})
        assert [message.content for message in request.messages] == ["a"]
        (found,) = request.tools
        assert (found.name, found.description) == ("look_up", "Reads a page.")
