"""Tests that each text of a chat is in the prompt, or that the request is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from worlds.builders.episode_builders import reply
from worlds.checks.examples import examples
from worlds.models.trait_templates import TEMPLATES, renderer, tokenizer
from worlds.parts.gateway_world import Gateway, Policy

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role, ToolCall
from actors.environment.rendering import BreakReason, ChatRenderer
from actors.environment.shown_text import holds
from actors.types import FinishReason, VersionSpan
from service.config.sections import SessionSettings, SystemMessages
from service.gateway.chat import ChatRequest, RefusalCode, Refused
from service.gateway.sampling import Prompt, next_prompt
from service.gateway.tree import SessionTree
from service.intake.session import SessionTurn


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def says(content: str = "", *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls)


def result(call: ToolCall, content: str) -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call.id, name=call.name)


CALL = ToolCall(id="call00001", name="calculator", arguments={"expression": "sum"})


class Chat:
    """A session with one chat template, whose policy writes calls in the form of the templates."""

    def __init__(self, trait: str, *, merges: bool = True) -> None:
        self.tree, self.merges = SessionTree("s-0"), merges
        self.renderer, self.tokenizer = renderer(trait), tokenizer(trait)

    def ask(self, messages: Sequence[Message], answer: Message) -> tuple[Prompt, str]:
        """Play a turn and return its prompt and the text of the prompt."""
        place = self.tree.find(ChatRequest(messages=tuple(messages), tools=(CALCULATOR,)))
        prompt = next_prompt(place, self.renderer, merges_system=self.merges)
        calls = [
            f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>"
            for c in answer.tool_calls
        ]
        sampled = np.array(
            self.tokenizer.encode(
                f"{answer.content}{''.join(calls)}<|im_end|>", add_special_tokens=False
            ),
            np.int32,
        )
        number = self.tree.num_turns
        self.tree.add(
            SessionTurn(
                number=number,
                parent=place.parent,
                tools=place.tools if place.parent is None else (),
                new_messages=place.new_messages,
                reply=answer,
                extends_parent=prompt.extends_parent,
                new_token_ids=prompt.new_token_ids,
                sampled_token_ids=sampled,
                logprobs=np.zeros(len(sampled), np.float32),
                version_spans=(VersionSpan(version=0, start=0, end=len(sampled)),),
                finish_reason=FinishReason.STOP,
                num_inserted=prompt.num_inserted,
                break_reason=prompt.break_reason,
            )
        )
        text = self.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return prompt, text


def second(trait: str, reply: Message, *new: Message, merges: bool = True) -> tuple[Prompt, str]:
    """Return the prompt of the turn after a reply, and its text."""
    chat = Chat(trait, merges=merges)
    begun = [system("Be terse."), user("Hi")]
    chat.ask(begun, reply)
    return chat.ask([*begun, reply, *new], says("Yes."))


@pytest.mark.parametrize(
    ("trait", "reason"),
    [
        ("plain", None),
        ("escapes and trims", None),
        ("strips thoughts", None),
        ("wants contents in parts", None),
        ("hoists system texts", BreakReason.TEMPLATE_LOOKS_BACK),
        ("shows the first system text", BreakReason.SYSTEM_MERGED),
        ("shows the last system text", BreakReason.SYSTEM_MERGED),
        ("wants system first and once", BreakReason.SYSTEM_MERGED),
    ],
)
# "Be terse." occurs twice, and "e" is a part of other texts.
@pytest.mark.parametrize("text", ["Only blue.", "Be terse.", "e"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_system_message_in_mid_conversation_is_in_the_prompt(
    trait: str, reason: BreakReason | None, text: str, is_last: bool
) -> None:
    new = [user("Colour?"), system(text)] if is_last else [system(text), user("Colour?")]
    prompt, shown = second(trait, says("Hello."), *new)
    assert prompt.break_reason is reason and prompt.extends_parent is (reason is None)
    plain, _ = second(trait, says("Hello."), user("Colour?"))
    without = tokenizer(trait).decode(plain.token_ids.tolist(), skip_special_tokens=False)
    assert shown.count(text) > without.count(text)
    if reason is BreakReason.SYSTEM_MERGED:
        assert shown.startswith(
            without[: without.index("<|im_start|>system\nBe")]
            + f"<|im_start|>system\nBe terse.\n\n{text}<|im_end|>\n<|im_start|>user\nHi"
        )


@pytest.mark.parametrize(
    "trait",
    ["shows the first system text", "shows the last system text", "wants system first and once"],
)
def test_without_merging_a_system_text_that_would_vanish_is_refused(trait: str) -> None:
    for begun in (
        [system("a"), system("b"), user("c")],
        [system("a"), user("b"), system("c"), user("d")],
    ):
        chat = Chat(trait, merges=False)
        with pytest.raises(RenderError, match=r"message 1 \(system\)|message 0|only come first|2"):
            chat.ask(begun, says("x"))
        assert chat.tree.num_turns == 0
        _, text = Chat(trait).ask(begun, says("x"))
        assert all(f"\n{each}" in text for each in "abc")


@pytest.mark.parametrize("said", ["", "Let me see."])
@pytest.mark.parametrize("trait", sorted(TEMPLATES))
def test_a_call_and_its_result_are_in_the_prompt_or_refused(trait: str, said: str) -> None:
    if trait == "knows no tools":
        with pytest.raises(RenderError, match="shows no tools and no calls: calculator") as refused:
            Chat(trait).ask([user("Hi")], says("x"))
        assert refused.value.param == "tools"
        return
    prompt, text = second(trait, says(said, CALL), result(CALL, "seven"))
    is_numbered = trait == "numbers results"
    assert prompt.break_reason is (BreakReason.TEMPLATE_LOOKS_BACK if is_numbered else None)
    for part in (said, '"expression": "sum"', "seven"):
        assert part in text
    # The same holds for a history that another client played.
    history = [user("Hi"), says(said, CALL), result(CALL, "seven"), user("And?")]
    _, text = Chat(trait).ask(history, says("x"))
    for part in (said, '"expression": "sum"', "seven"):
        assert part in text


def test_the_remedy_in_the_error_for_a_hidden_system_text_works() -> None:
    """Check a template like Mistral Nemo's: only a last user message shows the system text."""
    template = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' }}"
        "{%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + ' ' }}"
        "{%- endif %}{{- m.content + '[/INST]' }}{%- elif m.role != 'system' %}"
        "{{- '[' + m.role + ']' + m.content + (m.tool_calls | default([]) | string) }}"
        "{%- endif %}{%- endfor %}"
    )
    nemo = ChatRenderer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer("plain").backend_tokenizer, chat_template=template
        )
    )
    called = [user("Hi"), says("", CALL), result(CALL, "7")]
    words = r"content of message 0 \(system\).*; put the text into a user's message"
    with pytest.raises(RenderError, match=words) as no:
        nemo.first_prompt([system("Be terse."), *called], ())
    assert "first message" not in str(no.value)
    assert len(nemo.first_prompt([user("Be terse. Hi"), *called[1:]], ()))
    with pytest.raises(RenderError, match="send system texts as the first message, or put the"):
        nemo.first_prompt([user("Hi"), system("Be terse."), user("And?")], ())


def test_a_text_that_occurs_twice_is_in_the_prompt_twice() -> None:
    begun = [system("Be terse."), user("Hi"), system("Be terse."), user("Yes?")]
    _, text = Chat("says a system text once").ask(begun, says("x"))
    assert text.count("Be terse.") == 2
    with pytest.raises(RenderError, match=r"content of message 2 \(system\): 'Be terse\.'"):
        Chat("says a system text once", merges=False).ask(begun, says("x"))


def test_numbered_results_have_the_right_numbers() -> None:
    chat, messages = Chat("numbers results"), [user("Hi")]
    for number in (1, 2, 3):
        reply = says("", ToolCall(id=f"call0000{number}", name="calculator", arguments={}))
        chat.ask(messages, reply)
        messages += [reply, result(reply.tool_calls[0], "same")]
    _, text = chat.ask(messages, says("x"))
    assert [text.count(f"<|im_start|>tool {number}\nsame") for number in range(5)] == [
        0,
        1,
        1,
        1,
        0,
    ]


def test_a_users_text_that_the_template_strips_as_a_thought_is_refused() -> None:
    chat = Chat("strips thoughts")
    with pytest.raises(RenderError, match=r"content of message 0 \(user\): 'secret</think>open'"):
        chat.ask([user("secret</think>open")], says("x"))
    _, text = chat.ask([user("q"), says("secret</think>open"), user("u")], says("x"))
    assert "secret" not in text and "open" in text


OTHER = ToolCall(id="call00002", name="calculator", arguments={"expression": "other"})


async def test_each_result_is_shown_with_its_call_or_refused(tmp_path: Path) -> None:
    calls = "".join(LOOK_UP.replace('"1"', each) for each in ('"a"', '"b"'))
    policy = Policy(answers=lambda _: reply(f"{calls}<|im_end|>"))
    gateway = await Gateway(tmp_path, policy=policy, chat_renderer=renderer("plain")).opened()
    begun = [user("Hi")]
    said = (await gateway.ask(*begun, tools=(CALCULATOR,))).message
    first, second = (result(call, f"result {call.arguments}") for call in said.tool_calls)
    stray = Message(role=Role.TOOL, content="stray", tool_call_id="unknown")
    # The calls of this history were played by another client.
    played = [user("Before"), says("", CALL, OTHER)]
    theirs = result(OTHER, "theirs")
    for sent in (
        [*begun, said, second],
        [*begun, said, second, user("note")],
        [*begun, said, first, stray],
        [*played, theirs, user("note")],
    ):
        with pytest.raises(Refused, match="shows no ids of calls, so the policy") as refused:
            await gateway.ask(*sent, tools=(CALCULATOR,))
        assert (refused.value.code, refused.value.param) == (
            RefusalCode.INVALID_REQUEST,
            "messages",
        )
    await gateway.ask(*begun, said, second, user("note"), first, tools=(CALCULATOR,))
    prompt = tokenizer("plain").decode(policy.requests[-1].prompt_token_ids.tolist())
    places = [prompt.rindex(text) for text in ("result {'expression': 'a'}", "result {", "note")]
    assert places == sorted(places)


LOOK_UP = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'


async def test_after_a_last_message_of_the_assistant_the_policy_begins_its_own_turn(
    tmp_path: Path,
) -> None:
    """Check a last message of the assistant, as graphs of several agents send it."""
    policy = Policy()
    gateway = await Gateway(tmp_path, policy=policy, chat_renderer=renderer("plain")).opened()
    first = (await gateway.ask(user("Hi"))).message
    await gateway.ask(user("Hi"), first)
    await gateway.ask(user("Hi"), says("So:"))
    own, foreign = (
        tokenizer("plain").decode(request.prompt_token_ids.tolist())
        for request in policy.requests[1:]
    )
    begun = "<|im_end|>\n<|im_start|>assistant\n"
    assert own.endswith(f"assistant\n0{begun}") and foreign.endswith(f"assistant\nSo:{begun}")


NAMING = TEMPLATES["plain"].replace("m.role", "(m.name or m.role)")


def naming() -> ChatRenderer:
    """Return a renderer whose template, like Kimi K2's, shows names in place of roles."""
    backend = tokenizer("plain").backend_tokenizer
    return ChatRenderer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=NAMING, eos_token="<|im_end|>"
        )
    )


@pytest.mark.parametrize(("shows", "num_samples"), [(False, 1), (True, 3)])
async def test_a_name_added_to_a_reply_is_ignored_if_the_template_shows_no_names(
    tmp_path: Path, shows: bool, num_samples: int
) -> None:
    """Check earlier replies with the name of the agent, as LangGraph sends them."""
    policy = Policy(
        answers=lambda number: reply(f"{LOOK_UP if number == 0 else 'Seven.'}<|im_end|>")
    )
    chat_renderer = naming() if shows else renderer("plain")
    gateway = await Gateway(tmp_path, policy=policy, chat_renderer=chat_renderer).opened()
    chat: list[Message] = [user("Hi")]
    for _ in range(3):
        answer = (await gateway.ask(*chat, tools=(CALCULATOR,))).message
        news = [result(each, "7") for each in answer.tool_calls] or [user("And?")]
        chat += [replace(answer, name="worker"), *news]
    prompt = tokenizer("plain").decode(policy.requests[-1].prompt_token_ids.tolist())
    assert ("worker" in prompt) is shows
    await gateway.finish(1.0)
    assert len((await gateway.trajectory()).samples) == num_samples


@pytest.mark.parametrize("message", [user("Hi"), system("Be terse.")], ids=["user", "system"])
async def test_the_names_of_speakers_are_in_the_prompt_or_the_request_is_refused(
    tmp_path: Path, message: Message
) -> None:
    alice, bob = replace(message, name="Alice"), replace(message, name="Bob")
    place, role = tmp_path / "refuses", message.role
    place.mkdir()
    gateway = await Gateway(place, chat_renderer=renderer("plain")).opened()
    with pytest.raises(Refused) as refused:
        await gateway.ask(user("a"), alice, user("b"), bob)
    assert refused.value.code is RefusalCode.UNSUPPORTED_PARAMETER
    assert str(refused.value) == (
        "messages[1].name: got 'Alice' and another speaker, but the model's chat template does not "
        f"show the names of messages of role {role}; write the names into the texts, remove them, "
        "or set sessions.unsupported: ignore"
    )
    # A name that equals the role adds nothing and is accepted. A single speaker's name tells nobody
    # apart: Semantic Kernel gives each system message the name of its agent.
    await gateway.ask(replace(message, name=role.value), user("b"))
    await gateway.ask(alice, replace(user("b"), name=None if role is Role.SYSTEM else "alice"))
    mixed = gateway.ask(replace(message, content="c"), alice, user("d"))
    # An agent's name may be on one of its system messages; a user without a name is another user.
    with nullcontext() if role is Role.SYSTEM else pytest.raises(Refused, match="another speaker"):
        await mixed
    ended = await gateway.finish(1.0)
    assert ended.end is not None and ended.end.totals.ignored["messages.name"] == 1 + (
        role is Role.SYSTEM
    )
    place = tmp_path / "shows"
    place.mkdir()
    policy = Policy()
    await (await Gateway(place, policy=policy, chat_renderer=naming()).opened()).ask(alice)
    prompt = tokenizer("plain").decode(policy.requests[-1].prompt_token_ids.tolist())
    assert f"Alice\n{message.content}" in prompt


async def test_an_ignored_name_is_counted_and_does_not_begin_another_chat(tmp_path: Path) -> None:
    gateway = await Gateway(
        tmp_path, settings=SessionSettings(unsupported="ignore"), chat_renderer=renderer("plain")
    ).opened()
    answer = (await gateway.ask(replace(user("Hi"), name="Alice"))).message
    await gateway.ask(user("Hi"), answer, replace(user("And?"), name="Bob"))
    ended = await gateway.finish(1.0)
    assert ended.end is not None and ended.end.totals.ignored == {"messages.name": 2}
    assert len((await gateway.trajectory()).samples) == 1


async def test_with_tool_choice_none_tools_are_shown_and_calls_are_not_parsed(
    tmp_path: Path,
) -> None:
    policy = Policy(answers=lambda _: reply(f"{LOOK_UP}<|im_end|>"))
    gateway = await Gateway(tmp_path, policy=policy, chat_renderer=renderer("plain")).opened()
    begun = [user("Hi")]
    first = await gateway.ask(*begun, tools=(CALCULATOR,))
    assert [name for _, name, _ in first.message.call_texts] == ["calculator"]
    (called,) = first.message.tool_calls
    begun += [first.message, result(called, "7"), user("Say it.")]
    second = await gateway.ask(*begun, tools=(CALCULATOR,), may_call=False)
    assert second.message.call_texts == () and "<tool_call>" in second.message.content
    assert [request.tools for request in policy.requests] == [(CALCULATOR,), ()]
    await gateway.ask(*begun, second.message, user("Go on."), tools=(CALCULATOR,))
    await gateway.finish(1.0)
    trajectory = await gateway.trajectory()
    assert len(trajectory.samples) == 1 and len(trajectory.turns) == 3


async def test_tools_are_refused_if_no_parser_of_calls_is_known(tmp_path: Path) -> None:
    unknown = tokenizer("plain").__class__(
        tokenizer_object=tokenizer("plain").backend_tokenizer,
        chat_template=TEMPLATES["plain"].replace("tool_call>", "calling>"),
    )
    gateway = await Gateway(
        tmp_path, finds_parser=True, chat_renderer=ChatRenderer(unknown)
    ).opened()
    with pytest.raises(Refused, match=r"inference\.tool_parser is auto") as refused:
        await gateway.ask(user("Hi"), tools=(CALCULATOR,))
    assert (refused.value.code, refused.value.param) == (RefusalCode.INVALID_REQUEST, "tools")
    assert (await gateway.ask(user("Hi"))).message.content == "0"


@pytest.mark.parametrize("system_messages", get_args(SystemMessages))
async def test_the_setting_decides_whether_system_texts_are_merged(
    tmp_path: Path, system_messages: SystemMessages
) -> None:
    gateway = await Gateway(
        tmp_path,
        settings=SessionSettings(system_messages=system_messages),
        chat_renderer=renderer("wants system first and once"),
    ).opened()
    chat = [system("a"), user("b"), system("c")]
    if system_messages == "merge":
        assert (await gateway.ask(*chat)).message.content == "0"
        return
    with pytest.raises(Refused, match=r"only come first; sessions\.system_messages: merge") as no:
        await gateway.ask(*chat)
    assert (no.value.code, no.value.param) == (RefusalCode.INVALID_REQUEST, "messages")


def test_a_text_is_counted_in_all_forms_that_a_template_gives_it() -> None:
    shown = 'tool: "a \\"b\\" caf\\u00e9" user: a "b" caf\u00e9 html: a &quot;b&quot; caf\u00e9'
    assert holds(shown, 'a "b" caf\u00e9', times=3)
    assert not holds(shown, 'a "b" caf\u00e9', times=4)


_TEXTS = st.sampled_from(
    [
        "red",
        "redder",
        "r",
        'a "quoted" word',
        "two\nlines",
        " trimmed ",
        "",
        "caf\u00e9 \u4e2d",
        "?!",
    ]
)


@st.composite
def chats(draw: st.DrawFn) -> list[tuple[list[Message], Message]]:
    """Draw turns: the new messages of each turn and the reply to them."""
    turns: list[tuple[list[Message], Message]] = []
    calls: list[ToolCall] = []
    for turn in range(draw(st.integers(1, 3))):
        new = [result(each, draw(_TEXTS)) for each in calls]
        if not turn and draw(st.booleans()):
            new.append(system(draw(_TEXTS)))
        if not new or draw(st.booleans()):
            new += [
                Message(role=draw(st.sampled_from([Role.USER, Role.SYSTEM])), content=draw(_TEXTS))
                for _ in range(draw(st.integers(1, 2)))
            ]
        calls = [
            ToolCall(
                id=f"call{turn}000{index}",
                name="calculator",
                arguments=draw(st.sampled_from([{}, {"expression": "red"}, {"n": [5, "r"]}])),
            )
            for index in range(draw(st.integers(0, 2)))
        ]
        turns.append((new, says(draw(_TEXTS).strip(), *calls)))
    return turns


def texts_of(messages: Sequence[Message]) -> list[str]:
    contents = [message.content.strip() for message in messages]
    return [*contents, *(text for m in messages for _, _, text in m.call_texts)]


@pytest.mark.parametrize("trait", sorted(TEMPLATES))
@examples(30)
@given(turns=chats())
def test_every_text_is_in_the_prompt_or_the_request_is_refused(
    trait: str, turns: list[tuple[list[Message], Message]]
) -> None:
    chat, messages = Chat(trait), list[Message]()
    for new, answer in turns:
        messages += new
        try:
            prompt, text = chat.ask(messages, answer)
        except RenderError:
            assert trait == "knows no tools"
            return
        was_first = len(messages) == len(new)
        assert (prompt.break_reason is not None) is not (was_first or prompt.extends_parent)
        # A text may be in the prompt as it is or with JSON escapes.
        shown = text + "\n" + text.replace('\\"', '"').replace("\\n", "\n")
        said = texts_of(messages)
        for part in {each for each in said if each}:
            assert shown.count(part) >= sum(each.count(part) for each in said), (part, text)
        messages.append(answer)
