"""Tests that prompts of later turns are appended to, or rendered again with a stated reason."""

import copy
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from worlds.models.chatml import chatml_tokenizer

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chat_template import ChatTemplate, RenderError
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import BreakReason, ChatRenderer, Extension
from actors.types import TokenIds

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen's template: consecutive tool results share one user turn, old thoughts are left out.
GROUPED_TOOLS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Like Qwen3's template: a reply is shown with an empty thought only if it is the last message.
THINKS_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEAVES_LAST_OPEN = PLAIN.replace(
    "<|im_end|>\n", "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
)
COUNTS_TURNS = PLAIN.replace("<|im_start|>{{", "<|im_start|>{{ loop.index }} {{", 1)
REFUSES_TOOLS = PLAIN.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' and loop.length < 6 %}"
    "{{ raise_exception('no tools') }}{% endif %}",
)
REFUSES_ALL = "{{ raise_exception('never') }}"
REWRITES_REPLY = PLAIN.replace("{{ m.content }}", "{{ m.content | replace('dummy', 'x') }}")
REPEATS_REPLY = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")


@cache
def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    if template is None:
        return chatml_tokenizer()
    tokenizer = copy.copy(_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def _ids(text: str, tokenizer: PreTrainedTokenizerFast | None = None) -> TokenIds:
    ids = (tokenizer or _tokenizer()).encode(text, add_special_tokens=False)
    return np.array(ids, dtype=np.int32)


def _user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def _reply(content: str) -> Message:
    return Message(role=Role.ASSISTANT, content=content)


def _tool(content: str) -> Message:
    return Message(role=Role.TOOL, content=content, name="calculator")


def test_the_first_prompt_ends_with_the_generation_prompt() -> None:
    prompt = ChatRenderer(_tokenizer()).first_prompt([_user("hi")], ())
    text = _tokenizer().decode(prompt.tolist())
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.dtype == np.int32 and not prompt.flags.writeable


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("m.content[:8]", "short"),
        ("m.content | capitalize", "Short"),
        ("m.content[:8] | tojson", '"short"'),
    ],
)
def test_a_template_that_would_print_a_list_of_parts_is_given_a_text(
    content: str, shown: str
) -> None:
    """Check templates that change the text by which the renderer detects the form they expect."""
    tokenizer = _tokenizer(PLAIN.replace("m.content", content))
    text = ChatTemplate(tokenizer, options={}).text([_user("short")])
    assert text == f"<|im_start|>user\n{shown}<|im_end|>\n"


def test_the_first_prompt_shows_the_declared_tools() -> None:
    prompt = ChatRenderer(_tokenizer()).first_prompt([_user("hi")], (CALCULATOR,))
    assert '"name": "calculator"' in _tokenizer().decode(prompt.tolist())


def test_the_next_prompt_is_the_prompt_the_reply_a_newline_and_the_delta() -> None:
    renderer = ChatRenderer(_tokenizer())
    prompt = renderer.first_prompt([_user("hi")], ())
    sampled = _ids("4<|im_end|>")
    history = [_user("hi"), _reply("4")]
    extension = renderer.extend(
        prompt, sampled, history=history, new_messages=[_user("lower")], tools=()
    )
    delta = _ids("\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n")
    expected = np.concatenate((prompt, sampled, delta))
    np.testing.assert_array_equal(extension.prompt_token_ids, expected)
    assert extension.num_inserted == 1  # the template's newline
    assert extension.break_reason is None


def test_the_end_tokens_added_to_a_cut_off_reply_are_counted_as_inserted() -> None:
    renderer = ChatRenderer(_tokenizer())
    prompt = renderer.first_prompt([_user("hi")], ())
    extension = renderer.extend(
        prompt, _ids("4"), history=[], new_messages=[_user("lower")], tools=()
    )
    tail = extension.prompt_token_ids[len(prompt) :]
    expected = _ids("4<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n")
    np.testing.assert_array_equal(tail, expected)
    assert extension.num_inserted == 2


def test_a_template_that_leaves_the_last_reply_open_gets_no_second_end_token() -> None:
    renderer = ChatRenderer(_tokenizer(LEAVES_LAST_OPEN))
    prompt = renderer.first_prompt([_user("hi")], ())
    for sampled, num_inserted in (("4<|im_end|>", 0), ("4", 1)):
        extension = renderer.extend(
            prompt, _ids(sampled), history=[], new_messages=[_user("x")], tools=()
        )
        tail = _ids("4<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
        np.testing.assert_array_equal(extension.prompt_token_ids[len(prompt) :], tail)
        assert extension.num_inserted == num_inserted


@pytest.mark.parametrize("space", [" ", "\n", " \n"])
def test_a_template_with_white_space_before_the_end_gets_no_second_end_token(space: str) -> None:
    template = PLAIN.replace("<|im_end|>", f"{{{{ {space!r} }}}}<|im_end|>")
    renderer = ChatRenderer(_tokenizer(template))
    prompt = renderer.first_prompt([_user("hi")], ())
    closing = len(_ids(f"{space}<|im_end|>\n"))
    for sampled, end, count in (("4<|im_end|>", "\n", 1), ("4", f"{space}<|im_end|>\n", closing)):
        history = [_user("hi"), _reply("4")]
        extension = renderer.extend(
            prompt, _ids(sampled), history=history, new_messages=[_user("x")], tools=()
        )
        tail = f"<|im_start|>user\nx{space}<|im_end|>\n<|im_start|>assistant\n"
        expected = np.concatenate((_ids(sampled), _ids(end + tail)))
        np.testing.assert_array_equal(extension.prompt_token_ids[len(prompt) :], expected)
        assert extension.num_inserted == count


def test_another_end_token_of_a_reply_does_not_replace_the_end_of_the_template() -> None:
    renderer = ChatRenderer(_tokenizer(), stop_token_ids=_ids("\n").tolist())
    prompt = renderer.first_prompt([_user("hi")], ())
    extension = renderer.extend(
        prompt, _ids("4\n"), history=[], new_messages=[_user("x")], tools=()
    )
    tail = _ids("4\n<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    np.testing.assert_array_equal(extension.prompt_token_ids[len(prompt) :], tail)


def test_nothing_is_inserted_after_a_reply_that_includes_the_newline() -> None:
    renderer = ChatRenderer(_tokenizer())
    prompt = renderer.first_prompt([_user("hi")], ())
    extension = renderer.extend(
        prompt, _ids("4<|im_end|>\n"), history=[], new_messages=[_user("x")], tools=()
    )
    assert extension.num_inserted == 0


def test_without_new_messages_a_generation_prompt_is_appended() -> None:
    renderer = ChatRenderer(_tokenizer())
    prompt = renderer.first_prompt([_user("hi")], ())
    extension = renderer.extend(prompt, _ids("4<|im_end|>"), history=[], new_messages=[], tools=())
    tail = extension.prompt_token_ids[len(prompt) :]
    np.testing.assert_array_equal(tail, _ids("4<|im_end|>\n<|im_start|>assistant\n"))


_WORDS = st.text(alphabet="aehilorw 0123456789.<|>\n_{}\u00e9\u4e2d", min_size=1, max_size=20)
TEMPLATES = [None, PLAIN, GROUPED_TOOLS, THINKS_LAST, LEAVES_LAST_OPEN]
_TURNS = st.lists(st.tuples(_WORDS, st.lists(st.tuples(st.booleans(), _WORDS), max_size=3)))


@settings(max_examples=100, deadline=None)
@given(turns=_TURNS, template=st.sampled_from(TEMPLATES), tools=st.booleans())
def test_appending_gives_the_same_prompt_as_rendering_the_whole_chat(
    turns: list[tuple[str, list[tuple[bool, str]]]], template: str | None, tools: bool
) -> None:
    tokenizer = _tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    schemas: tuple[ToolSchema, ...] = (CALCULATOR,) if tools else ()
    history = [_user("begin")]
    prompt = renderer.first_prompt(history, schemas)
    for reply, answers in turns:
        sampled = _ids(reply + "<|im_end|>", tokenizer)
        history.append(_reply(reply))
        new = [_tool(text) if is_tool else _user(text) for is_tool, text in answers]
        extension = renderer.extend(
            prompt, sampled, history=history, new_messages=new, tools=schemas
        )
        assert extension.break_reason is None
        previous = np.concatenate((prompt, sampled))
        prompt = extension.prompt_token_ids
        np.testing.assert_array_equal(prompt[: len(previous)], previous)
        history.extend(new)
    # A template may change the last reply of a chat; an appended prompt has it as it was sampled.
    if history[-1].role is not Role.ASSISTANT:
        np.testing.assert_array_equal(prompt, renderer.first_prompt(history, schemas))


def test_history_that_a_template_would_rewrite_stays_as_it_was_sampled() -> None:
    tokenizer = _tokenizer(GROUPED_TOOLS)
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.first_prompt([_user("hi")], ())
    sampled = _ids("<think>hm</think>4<|im_end|>")
    history = [_user("hi"), _reply("<think>hm</think>4")]
    extension = renderer.extend(
        prompt, sampled, history=history, new_messages=[_tool("5")], tools=()
    )
    assert "<think>hm</think>4" in tokenizer.decode(extension.prompt_token_ids.tolist())
    assert extension.break_reason is None


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        (COUNTS_TURNS, _user("lower"), BreakReason.TEMPLATE_LOOKS_BACK),
        (REWRITES_REPLY, _user("lower"), BreakReason.TEMPLATE_LOOKS_BACK),
        (REPEATS_REPLY, _user("lower"), BreakReason.TEMPLATE_LOOKS_BACK),
        (REFUSES_TOOLS, _tool("5"), BreakReason.TEMPLATE_REFUSED),
    ],
)
def test_a_delta_that_depends_on_earlier_messages_is_not_used(
    template: str, message: Message, reason: BreakReason
) -> None:
    renderer = ChatRenderer(_tokenizer(template))
    history = [_user("a"), _reply("1"), _user("b"), _reply("2"), _user("c"), _reply("3")]
    prompt = renderer.first_prompt(history[:-1], ())
    extension = renderer.extend(
        prompt, _ids("3<|im_end|>"), history=history, new_messages=[message], tools=()
    )
    assert extension.break_reason is reason
    assert extension.num_inserted == 0
    whole = renderer.first_prompt([*history, message], ())
    np.testing.assert_array_equal(extension.prompt_token_ids, whole)


# Like SmolLM3's template: a marker in the system text chooses the mode of every reply.
MODE_IN_SYSTEM_TEXT = (
    "{% set quiet = messages[0].role == 'system' and '/no_think' in messages[0].content %}"
    "{% set begun = '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if quiet else '') %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ begun + m.content }}{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ begun }}{% endif %}"
)
# Like Nemotron Nano v2's template: the newest marker in a text of system or user chooses the mode
# of the next reply, and earlier replies are shown without a mode.
MODE_IN_ANY_TEXT = (
    "{% set ns = namespace(quiet=false) %}"
    "{% for m in messages if m.role in ('system', 'user') %}"
    "{% if '/no_think' in m.content %}{% set ns.quiet = true %}"
    "{% elif '/think' in m.content %}{% set ns.quiet = false %}{% endif %}{% endfor %}"
    + PLAIN.replace(
        "assistant\n{% endif",
        "assistant\n{% if ns.quiet %}<think></think>{% else %}<think>\n{% endif %}{% endif",
    )
)
REMINDS = PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{% if loop.index0 == 5 %} Hurry.{% endif %}"
)
REMINDS_BETWEEN = PLAIN.replace(
    "<|im_start|>{{",
    "{% if loop.index0 == 5 %}<|im_start|>system\nHurry.<|im_end|>\n{% endif %}<|im_start|>{{",
    1,
)
READS_THE_REPLY = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if loop.index0 and '1' in messages[loop.index0 - 1].content %} (1)"
    "{% endif %}",
)
READS_THE_LENGTH = PLAIN.replace(
    "assistant\n{% endif", "assistant\n{% if messages | length > 5 %}Again: {% endif %}{% endif"
)


# Like Mistral Nemo's template: the newest message of the user shows the system text.
MOVES_SYSTEM_TEXT = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The new message has an even index in both dummy chats and an odd one in the chat of the test.
READS_THE_PARITY = PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.role == 'user' and loop.index0 % 2 %} odd{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "system", "reasons"),
    [
        # The template shows the earlier replies as they were sampled, so that nothing breaks.
        (MODE_IN_SYSTEM_TEXT, "/no_think", [None, None]),
        (MODE_IN_ANY_TEXT, "/no_think", [BreakReason.TEMPLATE_LOOKS_BACK] * 2),
        (MODE_IN_ANY_TEXT, "Be terse.", [None, None]),
        (REMINDS, "Be terse.", [None, None]),
        (REMINDS_BETWEEN, "Be terse.", [None, None]),
        (READS_THE_REPLY, "Be terse.", [None, None]),
        (READS_THE_PARITY, "Be terse.", [None, None]),
        (READS_THE_LENGTH, "Be terse.", [None, None, BreakReason.TEMPLATE_LOOKS_BACK]),
    ],
)
def test_a_template_that_reads_earlier_messages_is_given_the_real_ones(
    template: str, system: str, reasons: list[BreakReason | None]
) -> None:
    """Check templates with which both dummy chats give one delta and the real chat another."""
    tokenizer = _tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    history = [Message(role=Role.SYSTEM, content=system), _user("a")]
    prompt = renderer.first_prompt(history, ())
    for number, reason in enumerate(reasons):
        history.append(_reply(str(number)))
        extension = renderer.extend(
            prompt,
            _ids(f"{number}<|im_end|>", tokenizer),
            history=history,
            new_messages=[_user("b")],
            tools=(),
        )
        history.append(_user("b"))
        prompt = extension.prompt_token_ids
        assert extension.break_reason is reason
        begun = tokenizer.decode(prompt.tolist()).rpartition(f"{number}<|im_end|>")[2]
        whole = ChatTemplate(tokenizer, options={}).text(history, add_generation_prompt=True)
        assert begun == whole.rpartition(f"{number}<|im_end|>")[2]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_mode_is_kept_after_a_call(is_quiet: bool) -> None:
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    tokenizer = _tokenizer(
        MODE_IN_ANY_TEXT.replace("{{ m.content }}", "{{ m.content }}" + calls + "{% endfor %}")
    )
    renderer = ChatRenderer(tokenizer)
    call = ToolCall(id="call00001", name="calculator", arguments={"expression": 7})
    begun = [_user("a /no_think" if is_quiet else "a")]
    reply = Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
    result = Message(role=Role.TOOL, content="5", name="calculator", tool_call_id=call.id)
    said = '<tool_call>{"name": "calculator", "arguments": {"expression": 7}}</tool_call><|im_end|>'
    extension = renderer.extend(
        renderer.first_prompt(begun, (CALCULATOR,)),
        _ids(said, tokenizer),
        history=[*begun, reply],
        new_messages=[result],
        tools=(CALCULATOR,),
    )
    assert extension.break_reason is (BreakReason.TEMPLATE_LOOKS_BACK if is_quiet else None)
    text = tokenizer.decode(extension.prompt_token_ids.tolist())
    assert text.endswith("<think></think>" if is_quiet else "<think>\n")


def test_a_switch_that_the_template_removes_is_refused_with_the_option() -> None:
    """Check a template that, like SmolLM3's, removes the marker from the system text."""
    removes = "{{ m.content.replace('/no_think', '').rstrip() }}"
    renderer = ChatRenderer(_tokenizer(PLAIN.replace("{{ m.content }}", removes)))
    system = Message(role=Role.SYSTEM, content="You are a pirate. /no_think")
    with pytest.raises(RenderError) as refused:
        renderer.first_prompt([system, _user("a")], ())
    assert str(refused.value) == (
        "chat template: it does not show the content of message 0 (system): 'You are a pirate. "
        "/no_think'; it reads /no_think as a switch and removes it; remove /no_think from the "
        "text, and set an option of the template instead: rollouts.template_options for a run, "
        'chat_template_kwargs for a request (for example {"enable_thinking": false})'
    )
    plain = ChatRenderer(_tokenizer(PLAIN.replace("{{ m.content }}", "{{ m.content[:4] }}")))
    with pytest.raises(RenderError, match="put the text into a user's message"):
        plain.first_prompt([system, _user("a")], ())


def _second_turn(tokenizer: PreTrainedTokenizerFast, systems: list[str]) -> Extension:
    """Extend a prompt of system texts and the question "a" by the reply "1" and the message "b"."""
    renderer = ChatRenderer(tokenizer)
    history = [*(Message(role=Role.SYSTEM, content=each) for each in systems), _user("a")]
    return renderer.extend(
        renderer.first_prompt(history, ()),
        _ids("1<|im_end|>", tokenizer),
        history=[*history, _reply("1")],
        new_messages=[_user("b")],
        tools=(),
    )


def test_a_system_text_that_moves_to_the_newest_message_is_left_in_the_prompt() -> None:
    tokenizer = _tokenizer(MOVES_SYSTEM_TEXT)
    extension = _second_turn(tokenizer, ["Be terse."])
    assert extension.break_reason is None
    assert tokenizer.decode(extension.prompt_token_ids.tolist()) == (
        "<|im_start|>user\nBe terse.\n\na<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("shown", "systems", "reason"),
    [
        ("'<<SYS>>' ~ texts | join(' ') ~ '<</SYS>>'", ["Be terse."], None),
        ("texts | join(' ') | replace('\n', ' ')", ["Be\nterse."], None),
        ("'<<SYS>>' ~ texts | join(' ') ~ '<</SYS>>'", ["Be terse.", "Be kind."], None),
        # Here the system texts also choose the mode of the next reply.
        (
            "'<<SYS>>' ~ texts | join(' ') ~ '<</SYS>>'",
            ["Be terse. /no_think"],
            BreakReason.TEMPLATE_LOOKS_BACK,
        ),
        (
            "texts | join(' ')",
            ["Be terse.", "Be kind.", "Be quiet."],
            BreakReason.TEMPLATE_LOOKS_BACK,
        ),
    ],
)
def test_a_system_text_that_moves_in_a_wrapper_is_left_in_the_prompt(
    shown: str, systems: list[str], reason: BreakReason | None
) -> None:
    moves = MOVES_SYSTEM_TEXT.replace("messages[0].content }}\n\n", f"{shown} }}}}")
    texts = (
        "{% set texts = messages | selectattr('role', 'eq', 'system') "
        "| map(attribute='content') | list %}"
    )
    mode = (
        "{% if '/no_think' in messages[0].content or texts | length > 2 %}<think></think>"
        "{% endif %}{% endif %}"
    )
    tokenizer = _tokenizer(texts + moves.removesuffix("{% endif %}") + mode)
    extension = _second_turn(tokenizer, systems)
    assert extension.break_reason is reason
    delta = "1<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.decode(extension.prompt_token_ids.tolist())
    assert text.endswith(delta if reason is None else "assistant\n<think></think>")


def test_a_real_chat_that_the_template_refuses_is_continued() -> None:
    """Check a reply of the policy that the template refuses, so that no rendering contains it."""
    refuses = "{% if 'bad' in m.content %}{{ raise_exception('bad') }}{% endif %}<|im_start|>{{"
    renderer = ChatRenderer(_tokenizer(PLAIN.replace("<|im_start|>{{", refuses, 1)))
    prompt = renderer.first_prompt([_user("a")], ())
    extension = renderer.extend(
        prompt,
        _ids("bad<|im_end|>"),
        history=[_user("a"), _reply("bad")],
        new_messages=[_user("b")],
        tools=(),
    )
    assert extension.break_reason is None


def test_an_end_token_that_would_merge_with_the_reply_is_not_used() -> None:
    extension = ChatRenderer(_WholeWords(_tokenizer())).extend(
        _ids("x"), _ids("4"), history=[_user("a"), _reply("4")], new_messages=[], tools=()
    )
    assert extension.break_reason is BreakReason.RETOKENISED


class _WholeWords:
    """A tokenizer with one token for each word: text next to a reply changes its last token."""

    eos_token_id = None
    pad_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.apply_chat_template = tokenizer.apply_chat_template
        self.decode = tokenizer.decode

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [hash(word) % 2**31 for word in text.split(" ")]


def test_a_template_that_refuses_the_chat_is_a_render_error() -> None:
    renderer = ChatRenderer(_tokenizer(REFUSES_ALL))
    with pytest.raises(RenderError, match="never"):
        renderer.first_prompt([_user("hi")], ())


def test_template_options_reach_the_template() -> None:
    tokenizer = _tokenizer(PLAIN + "{% if loud %}!{% endif %}")
    prompt = ChatRenderer(tokenizer, template_options={"loud": True}).first_prompt([_user("x")], ())
    assert tokenizer.decode(prompt.tolist()).endswith("!")


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("4<|im_end|>", "4"),
        ("4", "4"),
        ("4<|im_end|><|endoftext|>", "4"),
        ("<|im_end|>", ""),
        ("4<|im_start|>user", "4<|im_start|>user"),
        ("<tool_call>{}</tool_call><|im_end|>", "<tool_call>{}</tool_call>"),
        ("4 " * 80 + "<|im_end|>", "4 " * 80),
    ],
)
def test_decoding_drops_only_the_end_of_the_reply(sampled: str, text: str) -> None:
    assert ChatRenderer(_tokenizer()).decode(_ids(sampled)) == text


def test_repeated_answers_are_rendered_once() -> None:
    calls = 0
    tokenizer = copy.copy(_tokenizer())

    class Counting(_WholeWords):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            nonlocal calls
            calls += 1
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    renderer = ChatRenderer(Counting(tokenizer))
    prompt = renderer.first_prompt([_user("hi")], ())
    for _ in range(50):
        renderer.extend(prompt, _ids("4"), history=[], new_messages=[_user("lower")], tools=())
    # The prompt once; each of two dummy chats four times: whole and closed, each with its head.
    assert calls == 9
