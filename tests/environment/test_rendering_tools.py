"""Tests of appending to chats with tool calls and thoughts, with templates of several families."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.models.tool_families import FAMILIES, Family
from worlds.models.trait_templates import TEMPLATES, tokenizer

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role, ToolCall
from actors.environment.rendering import BreakReason, ChatRenderer, Extension
from actors.types import TokenIds

QWEN3 = FAMILIES["qwen3"]
IDS = ("abcdefgh1", "abcdefgh2", "abcdefgh3")
CALLS = tuple(
    ToolCall(id=call_id, name=name, arguments={"expression": "3+4"})
    for call_id, name in zip(IDS, ("calculator", "weather", "search"), strict=True)
)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def reply(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


def result(call: ToolCall, content: str) -> Message:
    return Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)


def ids(family: Family, text: str) -> TokenIds:
    return np.array(family.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def text(family: Family, token_ids: TokenIds) -> str:
    said: str = family.tokenizer.decode(token_ids.tolist())
    return said


def extend(
    family: Family, said: str, history: list[Message], *new: Message, renderer: Any = None
) -> tuple[Extension, int]:
    """Return the prompt after a reply, and the number of ids up to the end of the reply."""
    renderer = renderer or family.renderer
    prompt = renderer.first_prompt(history[:-1], (CALCULATOR,))
    sampled = ids(family, said)
    extension = renderer.extend(
        prompt, sampled, history=history, new_messages=new, tools=(CALCULATOR,)
    )
    return extension, len(prompt) + len(sampled)


def added(family: Family, said: str, history: list[Message], *new: Message) -> str:
    """Return the text that is appended to a reply; the ids of the reply must be unchanged."""
    extension, num_before = extend(family, said, history, *new)
    assert extension.break_reason is None
    sampled = ids(family, said)
    before = extension.prompt_token_ids[num_before - len(sampled) : num_before]
    np.testing.assert_array_equal(before, sampled)
    return text(family, extension.prompt_token_ids[num_before:])


# Templates trim white space at both ends of a text; such texts are not covered here.
_WORDS = st.text(alphabet="aeilow 0123.<|>{}\"'\n_\u00e9\u4e2d\U0001f642", max_size=12).map(
    lambda words: words.strip() or "x"
)
_VALUES = st.recursive(
    _WORDS | st.integers() | st.booleans() | st.none(),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(_WORDS, values, max_size=2),
    max_leaves=3,
)
_ARGUMENTS = st.dictionaries(st.sampled_from(["expression", "city", "n"]), _VALUES, max_size=3)
_NAMES = st.sampled_from(["calculator", "weather", "search"])
_THOUGHTS = st.none() | _WORDS


@st.composite
def turns(draw: st.DrawFn, family: Family) -> list[tuple[Message, list[Message]]]:
    """Draw replies, each with the messages that follow it."""
    drawn = []
    for turn in range(draw(st.integers(min_value=1, max_value=3))):
        num_calls = draw(st.integers(min_value=0, max_value=family.max_calls))
        calls = tuple(
            ToolCall(id=f"t{turn}c{index}wxyz!", name=draw(_NAMES), arguments=draw(_ARGUMENTS))
            for index in range(num_calls)
        )
        says = not calls or (family.can_say_and_call and draw(st.booleans()))
        thought = draw(_THOUGHTS) if family.has_thoughts else None
        said = reply(draw(_WORDS) if says else "", *calls, reasoning=thought)
        answers = [result(call, draw(_WORDS)) for call in draw(st.permutations(calls))]
        drawn.append((said, answers or [user(draw(_WORDS))]))
    return drawn


def without_thoughts(words: str) -> str:
    return re.sub(r"<think>\n.*?\n</think>\n\n", "", words, flags=re.DOTALL)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=50)
@given(data=st.data())
def test_appending_gives_the_same_prompt_as_rendering_the_whole_chat(
    family: Family, data: st.DataObject
) -> None:
    renderer = family.renderer
    history = [user("begin")]
    prompt = renderer.first_prompt(history, (CALCULATOR,))
    for said, answers in data.draw(turns(family)):
        sampled = ids(family, family.say(said))
        history.append(said)
        extension = renderer.extend(
            prompt, sampled, history=history, new_messages=answers, tools=(CALCULATOR,)
        )
        assert extension.break_reason is None
        previous = np.concatenate((prompt, sampled))
        prompt = extension.prompt_token_ids
        np.testing.assert_array_equal(prompt[: len(previous)], previous)
        history.extend(answers)
    whole = renderer.first_prompt(history, (CALCULATOR,))
    appended = text(family, prompt)
    if "<think>" not in appended:
        np.testing.assert_array_equal(prompt, whole)
    # The template leaves out earlier thoughts, also empty ones; appending keeps the sampled ones.
    assert without_thoughts(appended) == without_thoughts(text(family, whole))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_only_tokens_that_a_policy_does_not_sample_are_inserted_after_a_call(
    family: Family,
) -> None:
    call = CALLS[0]
    said = reply("", call)
    extension, _ = extend(family, family.say(said), [user("hi"), said], result(call, "7"))
    assert extension.break_reason is None
    ends_with_newline = family.end == "<|im_end|>"
    assert extension.num_inserted == int(ends_with_newline)


def test_the_text_appended_after_a_call_in_chatml() -> None:
    said = reply("", CALLS[0])
    assert added(QWEN3, QWEN3.say(said), [user("hi"), said], result(CALLS[0], "7")) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_consecutive_results_share_one_turn_of_the_template() -> None:
    said = reply("both", *CALLS[:2])
    answers = [result(CALLS[0], "7"), result(CALLS[1], "sun")]
    assert added(QWEN3, QWEN3.say(said), [user("hi"), said], *answers) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>"
        "\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_are_shown_in_the_order_of_their_calls() -> None:
    """Check a template that shows no ids, so that only the order assigns results to calls."""
    said = reply("both", *CALLS)
    results = [result(call, text) for call, text in zip(CALLS, "789", strict=True)]
    history = [user("hi"), said]
    in_order, _ = extend(QWEN3, QWEN3.say(said), history, *results)
    late, _ = extend(QWEN3, QWEN3.say(said), history, results[2], results[0], results[1])
    np.testing.assert_array_equal(late.prompt_token_ids, in_order.prompt_token_ids)
    whole = QWEN3.renderer.first_prompt([*history, *results[::-1]], (CALCULATOR,))
    np.testing.assert_array_equal(whole, in_order.prompt_token_ids)


def test_a_prompt_after_which_the_template_begins_no_turn_is_refused() -> None:
    """Check Mistral's template, which after a last reply begins no turn in which to sample."""
    mistral, said = FAMILIES["mistral"], reply("4")
    for history in ([user("hi"), said], [user("hi"), said, user("and?"), said]):
        with pytest.raises(RenderError, match=f"no turn after message {len(history) - 1}, which"):
            mistral.renderer.first_prompt(history, (CALCULATOR,))
        with pytest.raises(RenderError, match="begins no turn"):
            extend(mistral, mistral.say(said), history)
        # Other templates begin a second turn of the assistant.
        whole = QWEN3.renderer.first_prompt(history, (CALCULATOR,))
        assert text(QWEN3, whole).endswith("4<|im_end|>\n<|im_start|>assistant\n")
        extension, _ = extend(QWEN3, QWEN3.say(said), history)
        assert extension.break_reason is None


def test_a_call_that_the_template_writes_differently_stays_as_sampled() -> None:
    said = reply("", CALLS[0])
    spelled = '<tool_call>{"arguments":{"expression":"3+4"},"name":"calculator"}</tool_call>'
    tail = added(QWEN3, spelled + "<|im_end|>", [user("hi"), said], result(CALLS[0], "7"))
    assert tail.startswith("\n<|im_start|>user\n<tool_response>\n7")


def test_an_earlier_thought_that_the_template_strips_is_kept() -> None:
    said = reply("4", reasoning="well")
    history = [user("hi"), said]
    extension, _ = extend(QWEN3, QWEN3.say(said), history, user("lower"))
    assert extension.break_reason is None
    assert "<think>\nwell\n</think>\n\n4<|im_end|>" in text(QWEN3, extension.prompt_token_ids)
    whole = QWEN3.renderer.first_prompt([*history, user("lower")], (CALCULATOR,))
    assert "well" not in text(QWEN3, whole)


def test_with_history_as_rendered_the_prompt_is_the_rendered_chat() -> None:
    renderer = ChatRenderer(QWEN3.tokenizer, history="as_rendered")
    for said, reason in (
        (reply("4", reasoning="well"), BreakReason.HISTORY_RENDERED),
        (reply("4"), None),
    ):
        history = [user("hi"), said]
        extension, num_before = extend(
            QWEN3, QWEN3.say(said), history, user("lower"), renderer=renderer
        )
        whole = QWEN3.renderer.first_prompt([*history, user("lower")], (CALCULATOR,))
        np.testing.assert_array_equal(extension.prompt_token_ids, whole)
        assert extension.break_reason is reason and extension.num_inserted == 0
        assert len(whole) > num_before or reason


@pytest.mark.parametrize("echo", [None, "", "hm", " hm\n", "hm, and more"])
def test_reasoning_that_a_client_drops_or_trims_gives_one_prompt(echo: str | None) -> None:
    said = reply("4", CALLS[0], reasoning="hm")
    answer = result(CALLS[0], "7")
    expected, _ = extend(QWEN3, QWEN3.say(said), [user("hi"), said], answer)
    echoed = replace(said, reasoning=echo)
    found, _ = extend(QWEN3, QWEN3.say(said), [user("hi"), echoed], answer)
    assert found.break_reason is None
    np.testing.assert_array_equal(found.prompt_token_ids, expected.prompt_token_ids)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("kept", [0, 1])
def test_only_an_end_token_is_inserted_after_a_reply_cut_off_inside_a_call(
    family: Family, kept: int
) -> None:
    # Only the calls before the cut can be parsed.
    calls = CALLS[: min(2, family.max_calls)]
    whole = family.say(reply("", *calls))
    cut = ids(family, whole[: whole.rindex("3+4") + 1])
    said = reply("" if kept else "cut", *calls[:kept])
    answer = user("go on")
    if family.name == "mistral" and kept:
        answer = result(calls[0], "7")
    renderer = family.renderer
    prompt = renderer.first_prompt([user("hi")], ())
    extension = renderer.extend(
        prompt, cut, history=[user("hi"), said], new_messages=[answer], tools=()
    )
    assert extension.break_reason is None
    tail = extension.prompt_token_ids[len(prompt) :]
    np.testing.assert_array_equal(tail[: len(cut)], cut)
    inserted = tail[len(cut) :][: extension.num_inserted]
    ends = {family.end, *family.stops}
    assert text(family, inserted).rstrip() in ends


def test_the_end_of_a_reply_cut_off_inside_a_thought_is_counted_as_inserted() -> None:
    said = reply("", reasoning="let me")
    history = [user("hi"), said]
    extension, num_before = extend(QWEN3, "<think>\nlet me", history, user("continue"))
    assert extension.break_reason is None
    assert extension.num_inserted == 2
    tail = text(QWEN3, extension.prompt_token_ids[num_before:])
    assert tail == "<|im_end|>\n<|im_start|>user\ncontinue<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("num_ids", [1, 2, 3])
def test_the_bytes_of_half_an_emoji_at_the_end_of_a_reply_are_kept(num_ids: int) -> None:
    cut = ids(QWEN3, "\U0001f642")[:num_ids]
    assert len(ids(QWEN3, "\U0001f642")) == 4
    broken = text(QWEN3, cut)
    renderer = QWEN3.renderer
    prompt = renderer.first_prompt([user("hi")], ())
    answer = user("caf\u00e9 \U0001f642")
    extension = renderer.extend(
        prompt, cut, history=[user("hi"), reply(broken)], new_messages=[answer], tools=()
    )
    assert extension.break_reason is None
    tail = extension.prompt_token_ids[len(prompt) :]
    np.testing.assert_array_equal(tail[:num_ids], cut)
    assert "user\ncaf\u00e9 \U0001f642<|im_end|>" in text(QWEN3, tail[num_ids:])


@pytest.mark.parametrize("num_chars", [10, 30_000])
def test_results_of_any_length_are_appended_whole(num_chars: int) -> None:
    said = reply("", CALLS[0])
    history = [user("hi"), said]
    answer = result(CALLS[0], "7" * num_chars)
    extension, num_before = extend(QWEN3, QWEN3.say(said), history, answer)
    whole = QWEN3.renderer.first_prompt([*history, answer], (CALCULATOR,))
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)
    assert len(whole) > num_before + num_chars


# Finds the call of a result by its id, to show the name of the tool.
NAMES_THE_TOOL = (
    "{%- set ns = namespace(name='unknown') %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- for other in messages %}{%- for call in other.tool_calls or [] %}"
    "{%- if call.id == m.tool_call_id %}{%- set ns.name = call.function.name %}{%- endif %}"
    "{%- endfor %}{%- endfor %}"
    "{{- '<|im_start|>tool ' + ns.name + '\n' + m.content + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Opens a turn for the results after a reply that has calls.
OTHER_GLUE = NAMES_THE_TOOL.replace(
    "{{- '<|im_end|>\n' }}",
    "{{- '<|im_end|>\n\n<tool_response>\n' if m.tool_calls else '<|im_end|>\n' }}",
)
REFUSES_CALLS = NAMES_THE_TOOL.replace(
    "{%- for call in m.tool_calls or [] %}",
    "{%- if m.tool_calls %}{{- raise_exception('no calls') }}{%- endif %}{%- for call in [] %}",
)
HIDES_ARGUMENTS = NAMES_THE_TOOL.replace("call.function | tojson", "call.function.name")
OTHER_LAST_CALL = NAMES_THE_TOOL.replace(
    "'</tool_call>'", "('</tool_call>' if messages[-1] == m else '')"
)
PRINTS_ARGUMENTS = NAMES_THE_TOOL.replace(
    "+ (call.function | tojson) +", "~ call.function.name ~ call.function.arguments ~"
)
GLUE_AFTER_THOUGHT = NAMES_THE_TOOL.replace(
    "{{- '<|im_end|>\n' }}", "{{- '<|im_end|>\n\n' if m.reasoning_content else '<|im_end|>\n' }}"
)
GLUE_AFTER_SILENT_CALL = NAMES_THE_TOOL.replace(
    "{{- '<|im_end|>\n' }}", "{{- '<|im_end|>\n' if m.content else '<|im_end|>\n\n' }}"
)


def like_qwen3(template: str) -> ChatRenderer:
    tokenizer = QWEN3.tokenizer.__class__(
        tokenizer_object=QWEN3.tokenizer.backend_tokenizer,
        eos_token=QWEN3.end,
        chat_template=template,
    )
    return ChatRenderer(tokenizer)


def said_in_json(*calls: ToolCall) -> str:
    made = [f'{{"name": "{call.name}", "arguments": {{"expression": "3+4"}}}}' for call in calls]
    return "".join(f"<tool_call>{call}</tool_call>" for call in made) + "<|im_end|>"


@pytest.mark.parametrize("template", [NAMES_THE_TOOL, OTHER_GLUE])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,)])
def test_a_template_that_looks_up_a_call_is_given_the_real_one(
    template: str, order: tuple[int, ...]
) -> None:
    renderer = like_qwen3(template)
    said = reply("", *CALLS[:2])
    history = [user("hi"), said]
    answers = [result(CALLS[index], "7") for index in order]
    extension, _ = extend(QWEN3, said_in_json(*CALLS[:2]), history, *answers, renderer=renderer)
    assert extension.break_reason is None
    whole = renderer.first_prompt([*history, *answers], (CALCULATOR,))
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)
    assert f"tool {CALLS[order[-1]].name}\n7" in text(QWEN3, whole)


def test_the_text_between_turns_may_differ_after_a_call_and_after_a_text() -> None:
    renderer = like_qwen3(OTHER_GLUE)
    said = reply("", CALLS[0])
    after_call, _ = extend(
        QWEN3, said_in_json(CALLS[0]), [user("hi"), said], user("x"), renderer=renderer
    )
    after_text, _ = extend(
        QWEN3, "4<|im_end|>", [user("hi"), reply("4")], user("x"), renderer=renderer
    )
    assert "<|im_end|>\n\n<tool_response>\n" in text(QWEN3, after_call.prompt_token_ids)
    assert "<tool_response>" not in text(QWEN3, after_text.prompt_token_ids)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (GLUE_AFTER_THOUGHT, reply("4", reasoning="hm")),
        (GLUE_AFTER_THOUGHT, reply("4")),
        (GLUE_AFTER_SILENT_CALL, reply("4", CALLS[0])),
        (GLUE_AFTER_SILENT_CALL, reply("", CALLS[0])),
    ],
)
def test_dummy_chats_have_thoughts_and_texts_if_the_reply_does(
    template: str, said: Message
) -> None:
    renderer = like_qwen3(template)
    history = [user("hi"), said]
    extension, _ = extend(
        QWEN3,
        said.content + said_in_json(*said.tool_calls),
        history,
        user("x"),
        renderer=renderer,
    )
    assert extension.break_reason is None
    whole = renderer.first_prompt([*history, user("x")], (CALCULATOR,))
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)


def test_a_template_that_prints_arguments_is_given_json_text() -> None:
    prompt = like_qwen3(PRINTS_ARGUMENTS).first_prompt([user("hi"), reply("", CALLS[0])], ())
    assert '<tool_call>calculator{"expression": "3+4"}</tool_call>' in text(QWEN3, prompt)


def test_a_result_of_an_earlier_turn_is_not_rendered_after_dummy_messages() -> None:
    renderer = like_qwen3(NAMES_THE_TOOL)
    history = [user("hi"), reply("", CALLS[0]), user("and?"), reply("wait")]
    late = result(CALLS[0], "7")
    extension, _ = extend(QWEN3, "wait<|im_end|>", history, late, renderer=renderer)
    assert extension.break_reason is BreakReason.TEMPLATE_LOOKS_BACK
    whole = renderer.first_prompt([*history, late], (CALCULATOR,))
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)


def test_a_result_of_an_earlier_turn_is_appended_if_the_template_ignores_its_call() -> None:
    history = [user("hi"), reply("", CALLS[0]), user("and?"), reply("wait")]
    tail = added(QWEN3, "wait<|im_end|>", history, result(CALLS[0], "7"))
    assert tail.startswith("\n<|im_start|>user\n<tool_response>\n7")


def test_the_error_of_a_template_that_refuses_calls_is_raised() -> None:
    said = reply("", CALLS[0])
    with pytest.raises(RenderError, match="no calls"):
        extend(
            QWEN3,
            said_in_json(CALLS[0]),
            [user("hi"), said],
            result(CALLS[0], "7"),
            renderer=like_qwen3(REFUSES_CALLS),
        )


def test_the_error_of_a_template_that_refuses_an_id_is_raised() -> None:
    mistral = FAMILIES["mistral"]
    short = ToolCall(id="short", name="calculator", arguments={})
    history = [user("hi"), reply("", short)]
    with pytest.raises(RenderError, match="nine letters"):
        extend(mistral, "[TOOL_CALLS] []</s>", history, result(short, "7"))


def test_a_template_that_hides_the_arguments_of_a_call_is_refused() -> None:
    history = [user("hi"), reply("", CALLS[0])]
    with pytest.raises(RenderError, match=r"does not show a call of message 1 .*3\+4"):
        extend(
            QWEN3,
            said_in_json(CALLS[0]),
            history,
            result(CALLS[0], "7"),
            renderer=like_qwen3(HIDES_ARGUMENTS),
        )


def test_a_chat_is_rendered_again_if_the_end_of_its_calls_cannot_be_found() -> None:
    renderer = like_qwen3(OTHER_LAST_CALL)
    said = reply("", CALLS[0])
    answer = result(CALLS[0], "7")
    history = [user("hi"), said]
    extension, _ = extend(QWEN3, said_in_json(CALLS[0]), history, answer, renderer=renderer)
    assert extension.break_reason is BreakReason.TEMPLATE_LOOKS_BACK
    whole = renderer.first_prompt([*history, answer], (CALCULATOR,))
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("\n<tool_call>calculator\n</tool_call><|endoftext|>", None),
        ("\n<tool_call>calculator", BreakReason.TEMPLATE_LOOKS_BACK),
        ("", BreakReason.TEMPLATE_LOOKS_BACK),
    ],
)
def test_without_a_known_stop_token_only_a_reply_with_an_end_is_appended_to(
    said: str, reason: BreakReason | None
) -> None:
    glm = FAMILIES["glm"]
    renderer = ChatRenderer(glm.tokenizer)  # without stop tokens
    history = [user("hi"), reply("", CALLS[0])]
    extension, _ = extend(glm, said, history, result(CALLS[0], "7"), renderer=renderer)
    assert extension.break_reason is reason


class LongTokens:
    """A tokenizer whose tokens are separated only by white space and end tokens."""

    eos_token_id = 0
    pad_token_id = None
    apply_chat_template = staticmethod(QWEN3.tokenizer.apply_chat_template)
    decode = staticmethod(QWEN3.tokenizer.decode)

    def encode(self, words: str, *, add_special_tokens: bool) -> list[int]:
        parts = re.findall(r"<\|im_end\|>|\s|(?:(?!<\|im_end\|>)\S)+", words)
        return [
            0 if part == "<|im_end|>" else int.from_bytes(part.encode()) % 2**31 for part in parts
        ]


def test_a_token_may_contain_an_argument_and_the_end_of_its_call() -> None:
    tokenizer = LongTokens()
    said = tokenizer.encode('<tool_call>{"n":1}</tool_call><|im_end|>', add_special_tokens=False)
    renderer = ChatRenderer(tokenizer)
    history = [user("hi"), reply("", CALLS[0])]
    answer = result(CALLS[0], "7")
    prompt = renderer.first_prompt(history[:1], ())
    extension = renderer.extend(
        prompt, np.array(said, dtype=np.int32), history=history, new_messages=[answer], tools=()
    )
    assert extension.break_reason is None
    whole = renderer.first_prompt([*history, answer], ()).tolist()
    after = extension.prompt_token_ids[len(prompt) + len(said) :].tolist()
    assert after == whole[-len(after) :]
    assert after[0] == ord("\n")


def test_stop_tokens_after_a_reply_are_not_in_its_text() -> None:
    llama = FAMILIES["llama"]
    said = reply("", CALLS[0])
    decoded = llama.renderer.decode(ids(llama, llama.say(said)))
    assert decoded.endswith("}}")


@pytest.mark.parametrize(
    ("first", "second"),
    [({"n": 1}, {"n": True}), ({"n": 1, "m": 2}, {"m": 2, "n": 1}), ({"n": 1}, {"n": 1.0})],
)
def test_arguments_that_python_compares_as_equal_are_rendered_differently(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    renderer = QWEN3.renderer
    prompts = []
    for arguments in (first, second):
        call = ToolCall(name="calculator", arguments=arguments)
        prompts.append(renderer.first_prompt([user("hi"), reply("", call)], ()))
    assert text(QWEN3, prompts[0]) != text(QWEN3, prompts[1])


def test_arguments_are_rendered_as_they_were_when_the_message_was_made() -> None:
    arguments: dict[str, Any] = {"expression": "3+4"}
    said = reply("", ToolCall(name="calculator", arguments=arguments))
    arguments["expression"] = "changed"
    prompt = QWEN3.renderer.first_prompt([user("hi"), said], ())
    assert '{"expression": "3+4"}' in text(QWEN3, prompt)


@pytest.mark.parametrize(("knows_ids", "num_rendered"), [(False, 1), (True, 20)])
def test_similar_calls_are_rendered_once_if_the_template_ignores_ids(
    knows_ids: bool, num_rendered: int
) -> None:
    num_encoded = 0

    class Counting:
        chat_template = QWEN3.tokenizer.chat_template + ("{# call.id #}" if knows_ids else "")
        eos_token_id = QWEN3.tokenizer.eos_token_id
        pad_token_id = QWEN3.tokenizer.pad_token_id
        apply_chat_template = staticmethod(QWEN3.tokenizer.apply_chat_template)
        decode = staticmethod(QWEN3.tokenizer.decode)

        def encode(self, words: str, *, add_special_tokens: bool) -> list[int]:
            nonlocal num_encoded
            num_encoded += 1
            return list(QWEN3.tokenizer.encode(words, add_special_tokens=add_special_tokens))

    renderer = ChatRenderer(Counting())
    for value in range(20):
        call = ToolCall(id=f"c{value}", name="calculator", arguments={"expression": str(value)})
        said = reply("", call)
        renderer.extend(
            ids(QWEN3, "x"),
            ids(QWEN3, QWEN3.say(said)),
            history=[said],
            new_messages=[Message(role=Role.TOOL, content="7", tool_call_id=f"c{value}")],
            tools=(),
        )
    # Each of two dummy chats four times: whole and closed, each with its head.
    assert num_encoded == 8 * num_rendered


def test_a_result_that_the_template_hides_is_refused() -> None:
    shown = "for m in messages"
    hiding = TEMPLATES["plain"].replace(shown, f"{shown} if m.role != 'tool'")
    renderer = ChatRenderer(tokenizer("plain"), template_options={"chat_template": hiding})
    prompt = renderer.first_prompt([user("q")], (CALCULATOR,))
    with pytest.raises(RenderError, match=r"the content of message 2 \(tool\): 'seven'"):
        renderer.extend(
            prompt,
            ids(QWEN3, "x"),
            history=[user("q"), reply("", CALLS[0])],
            new_messages=[result(CALLS[0], "seven")],
            tools=(CALCULATOR,),
        )
