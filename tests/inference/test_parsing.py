"""Tests of parsing replies with vLLM's parsers, which one process imports for all tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.models import reply_parsing
from worlds.models.written_calls import WRITTEN, Written

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.policy import ParsedCall, ParsedReply
from actors.environment.protocol import MalformedCall, ToolCall, ToolSchema
from actors.environment.template_traits import CALL_FORMS, CallForm, form_of
from actors.environment.tool_calls import check_calls, parse_tool_calls
from actors.types import Dtype
from service.config.preflight import registered_parsers
from service.inference.settings import EngineSettings, InferenceSettings

SUM = ToolSchema(
    name="sum",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a"],
    },
)
TOOLS = (CALCULATOR, SUM)

Child = Callable[..., Any]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with reply_parsing.parser_process() as call:
        yield call


def parse(
    child: Child,
    text: str,
    family: str = "tiny",
    *,
    tools: tuple[ToolSchema, ...] = TOOLS,
    prompt: str = "<|assistant|>",
) -> ParsedReply:
    parsed: ParsedReply = child(reply_parsing.parse, family, prompt, text, tools)
    return parsed


def outcome(parsed: ParsedReply, tools: tuple[ToolSchema, ...] = TOOLS) -> list[Any]:
    """Return the arguments of each call, or the reason why the call is malformed."""
    return [
        call.reason if isinstance(call, MalformedCall) else dict(call.arguments)
        for call in check_calls(parsed.calls, tools)
    ]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("tiny", ("hermes", None)),
        ("qwen3", ("hermes", "deepseek_r1")),
        ("qwen3_coder", ("qwen3_xml", None)),
        ("glm", ("glm47", None)),
        ("llama", ("llama3_json", None)),
        ("mistral", ("mistral", None)),
        # The template of this family has no calls, so there is no parser for them.
        ("none", (None, None)),
    ],
)
def test_the_chat_template_decides_the_parsers(
    child: Child, family: str, names: tuple[str | None, str | None]
) -> None:
    assert child(reply_parsing.found_parsers, family) == names


HERMES_SUM = '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>'
CODER_SUM = "<tool_call>\n<function=sum>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_SUM = "<tool_call>sum\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LLAMA_SUM = '{"name": "sum", "parameters": {"a": 1}}'
MISTRAL_SUM = '[TOOL_CALLS]sum[ARGS]{"a": 1}'
UNREADABLE = "unreadable"
UNOPENED = "unopened"
INVALID_JSON = "invalid_json"
UNKNOWN_TOOL = "unknown_tool"
MISSING = "missing_argument"
ILL_TYPED = "ill_typed_argument"


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("qwen3", "no call", []),
        ("qwen3", HERMES_SUM, [{"a": 1}]),
        ("qwen3", f"well:{HERMES_SUM}\n{HERMES_SUM}", [{"a": 1}, {"a": 1}]),
        ("qwen3", "<tool_call>{oops}</tool_call>", [INVALID_JSON]),
        ("qwen3", HERMES_SUM.replace("sum", "product"), [UNKNOWN_TOOL]),
        ("qwen3", HERMES_SUM.replace("1", '"one"'), [ILL_TYPED]),
        ("qwen3", HERMES_SUM[:40], ["unclosed"]),
        ("qwen3", HERMES_SUM.replace('{"a": 1}', '"{\\"a\\": 1}"'), [{"a": 1}]),
        ("qwen3", HERMES_SUM.replace('{"a": 1}', "3"), ["not_an_object"]),
        # One call contains two objects.
        ("qwen3", HERMES_SUM.replace("}}", "}}{}"), [INVALID_JSON]),
        # One broken call makes the other calls of its turn unreadable.
        ("qwen3", HERMES_SUM + "<tool_call>{oops}</tool_call>", [INVALID_JSON]),
        ("qwen3", f"<think>{HERMES_SUM}</think>4", []),
        ("qwen3", f"<think>hm</think>{HERMES_SUM}", [{"a": 1}]),
        # The thought is not closed.
        ("qwen3", f"<think>hm {HERMES_SUM}", [UNREADABLE]),
        # vLLM's hermes parser ends a call at the first closing tag, even inside a string.
        ("qwen3", HERMES_SUM.replace("1", '1, "note": "</tool_call>"'), [INVALID_JSON, UNOPENED]),
        ("qwen3_coder", CODER_SUM, [{"a": 1}]),
        ("qwen3_coder", f"{CODER_SUM}\n{CODER_SUM}", [{"a": 1}, {"a": 1}]),
        ("qwen3_coder", "<tool_call>\noops\n</tool_call>", [UNREADABLE]),
        ("qwen3_coder", HERMES_SUM, [UNREADABLE]),
        ("qwen3_coder", CODER_SUM.replace("sum", "product"), [UNKNOWN_TOOL]),
        ("qwen3_coder", CODER_SUM.replace("\n1\n", "\none\n"), [ILL_TYPED]),
        ("qwen3_coder", CODER_SUM[:40], [MISSING]),
        (
            "qwen3_coder",
            CODER_SUM.replace("</function>", "<parameter=note></tool_call></parameter></function>"),
            [{"a": 1, "note": "</tool_call>"}],
        ),
        ("glm", GLM_SUM, [{"a": 1}]),
        ("glm", f"{GLM_SUM}\n{GLM_SUM}", [{"a": 1}, {"a": 1}]),
        ("glm", "<tool_call></tool_call>", [UNREADABLE]),
        # vLLM does not read a call of an undeclared tool.
        ("glm", GLM_SUM.replace("sum", "product"), [UNREADABLE]),
        ("glm", GLM_SUM[:25], [MISSING]),
        ("llama", LLAMA_SUM, [{"a": 1}]),
        ("llama", f"{LLAMA_SUM}; {LLAMA_SUM}", [{"a": 1}, {"a": 1}]),
        ("llama", "<|python_tag|>{oops}", [UNREADABLE]),
        ("llama", LLAMA_SUM.replace("sum", "product"), [UNKNOWN_TOOL]),
        ("llama", "<|python_tag|>" + LLAMA_SUM[:30], [UNREADABLE]),
        # An object without the tag may be the answer.
        ("llama", '{"a": 1}', []),
        (
            "llama",
            LLAMA_SUM.replace("1", '1, "note": "<|python_tag|>"'),
            [{"a": 1, "note": "<|python_tag|>"}],
        ),
        ("mistral", MISTRAL_SUM, [{"a": 1}]),
        ("mistral", MISTRAL_SUM * 2, [{"a": 1}, {"a": 1}]),
        ("mistral", "[TOOL_CALLS]sum[ARGS]{oops}", [INVALID_JSON]),
        ("mistral", MISTRAL_SUM.replace("sum", "product"), [UNKNOWN_TOOL]),
        ("mistral", MISTRAL_SUM[:-3], [INVALID_JSON]),
        ("mistral", "[TOOL_CALLS]", [UNREADABLE]),
    ],
)
def test_calls_are_parsed_or_the_turn_is_malformed(
    child: Child, family: str, text: str, expected: list[Any]
) -> None:
    assert outcome(parse(child, text, family)) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", "<tool_call>{oops}</tool_call> and more"),
        ("qwen3_coder", "<tool_call>\noops\n</tool_call> and more"),
        ("llama", "<|python_tag|>{oops}"),
        ("mistral", "[TOOL_CALLS]"),
    ],
)
def test_a_reply_that_cannot_be_parsed_stays_content(child: Child, family: str, text: str) -> None:
    assert parse(child, text, family).content == text


# Templates played with another model's vocabulary, which decodes a letter of the marks to a space.
BORROWED = {"deepseek-r1:8b", "deepseek-v3.1:latest"}
# Has the name of each published template.
BASELINE = Path(__file__).parents[1] / "environment" / "template_baseline.json"
PUBLISHED = sorted(set(json.loads(BASELINE.read_text())) - BORROWED)
WEATHER, POPULATION = (
    ToolSchema(
        name=name,
        description="Look it up.",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}},
    )
    for name in ("weather", "population")
)


def check_parser(written: Written, parse_all: Callable[[list[str]], list[ParsedReply]]) -> None:
    """Check that all calls of a reply are read, or none of them."""
    one, two = written.weather("Oslo"), written.weather("Rome")
    marked = f"see {written.mark} here"
    good = {
        written.reply(one): ["Oslo"],
        written.reply(one, two, one): ["Oslo", "Rome", "Oslo"],
        written.reply(written.weather(marked), two): [marked, "Rome"],
    }
    start = written.start
    proses = [f"see {start} here", *([f"{start}</{start[1:]}"] if start[1].isalpha() else [])]
    for prose in proses:
        if "thought" in written.mentions:
            good[f"<think>{prose}</think>{written.reply(one)}"] = ["Oslo"]
        if "before" in written.mentions:
            good[f"{prose}\n{written.reply(one)}"] = ["Oslo"]
        if "after" in written.mentions:
            good[f"{written.reply(one)}\n{prose}"] = ["Oslo"]
    for parsed, cities in zip(parse_all(list(good)), good.values(), strict=True):
        found = [
            json.loads(call.arguments) for call in parsed.calls if isinstance(call, ParsedCall)
        ]
        # The tokenizers add spaces around special tokens.
        assert ["".join(each["city"].split()) for each in found] == [
            "".join(each.split()) for each in cities
        ]
    # A call in a thought may be made, but not instead of the call after it.
    [parsed] = parse_all([f"<think>maybe {written.reply(one)}</think>\n{written.reply(two)}"])
    last = parsed.calls[-1]
    assert isinstance(last, MalformedCall) or "Rome" in last.arguments
    bad = [
        written.reply(*calls)
        for each in written.unread
        for calls in ((one, each), (each, one), (one, two, each), (one, each, two))
    ]
    for text, parsed in zip(bad, parse_all(bad), strict=True):
        assert [type(call) for call in parsed.calls] == [MalformedCall], text
        assert "".join(parsed.content.split()) == "".join(text.split())


@pytest.mark.parametrize(
    "parser", ["qwen3_xml", "seed_oss", "glm47", "minimax_m2", "gemma4", "functiongemma"]
)
def test_a_list_after_a_start_in_an_argument_begins_no_calls(parser: str) -> None:
    written, form = WRITTEN[parser], form_of(parser)
    city = f'see {written.start}["a", "b"] here'
    text = written.reply(written.weather(city))
    assert form is not None and not form.has_unread(text, [json.dumps({"city": city})])


def seconds_of_search(form: CallForm, text: str) -> float:
    """Return the CPU time of a search for calls in a text, as a reply and as an argument."""
    begun = time.process_time()
    form.has_unread(text, ["{}", text])
    return time.process_time() - begun


@pytest.mark.parametrize(
    "form", [each for each in CALL_FORMS if each.start], ids=lambda form: form.parser
)
def test_the_time_of_a_search_for_calls_grows_with_the_length_of_the_reply(form: CallForm) -> None:
    """Check it because one long reply would otherwise hold up all replies of its engine."""
    starts = {form.start or "", form.call_start or form.start or ""}
    ends = ("", "\\n", " x", "x ", "x\\n", "{", "[1,", "<")
    for lead in (*starts, *(f"{each}x" for each in starts)):
        for piece in ("\\n", "\n", "x", *(start + end for start in starts for end in ends)):
            short, long = (seconds_of_search(form, lead + piece * n) for n in (250, 1000))
            # A cubic search would take 64 times as long.
            assert long < 12 * max(short, 0.02), (lead, piece)


def test_every_form_of_calls_that_a_start_begins_is_written() -> None:
    forms = {form.parser for form in CALL_FORMS if form.start is not None}
    # vLLM reads Cohere's calls with a package that is not installed here.
    assert forms - {"cohere_command3"} <= set(WRITTEN)


@pytest.mark.parametrize("parser", sorted(WRITTEN))
def test_one_call_that_cannot_be_read_keeps_the_others_from_being_made(
    child: Child, parser: str
) -> None:
    """Check it because the policy would read the only result as that of its first call."""

    def parse_all(texts: list[str]) -> list[ParsedReply]:
        name, tools = parser.partition(" ")[0], (WEATHER, POPULATION)
        return [child(reply_parsing.parse_by, name, text, tools) for text in texts]

    check_parser(WRITTEN[parser], parse_all)


@pytest.mark.proof
@pytest.mark.templates
def test_written_parsers_fit_twenty_seven_published_templates(child: Child) -> None:
    """Check it because the next test checks nothing for a template without such a parser."""
    found = [child(reply_parsing.published_parser, name) for name in PUBLISHED]
    assert sum(parser in WRITTEN for parser in found) == 27


@pytest.mark.proof
@pytest.mark.templates
@pytest.mark.parametrize("name", PUBLISHED)
def test_one_unread_call_keeps_the_others_from_being_made_over_published_templates(
    child: Child, name: str
) -> None:
    parser = child(reply_parsing.published_parser, name)
    # No parser of calls fits the other templates, or nothing begins their calls.
    if parser in WRITTEN:
        check_parser(
            WRITTEN[parser],
            lambda texts: child(reply_parsing.parse_published, name, texts, (WEATHER, POPULATION)),
        )


def test_thinking_content_and_calls_are_separated_and_calls_have_ids(child: Child) -> None:
    parsed = parse(child, f"<think>hm</think>Well:{HERMES_SUM * 2}", "qwen3")
    assert (parsed.reasoning, parsed.content) == ("hm", "Well:")
    first, second = check_calls(parsed.calls, TOOLS)
    assert isinstance(first, ToolCall) and isinstance(second, ToolCall)
    assert first.id and second.id and first.id != second.id


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("<|assistant|>", "4", None, "4"),
        ("<|assistant|><think>\n", "hm</think>4", "hm", "4"),
        ("<|assistant|><think>\n", "hm, and cut off", "hm, and cut off", ""),
        ("<|assistant|><think>\n\n</think>\n\n", "4", None, "4"),
        ("<|assistant|>", "<think>hm, and cut off", "hm, and cut off", ""),
    ],
)
def test_a_thought_may_begin_in_the_reply_or_in_its_prompt(
    child: Child, prompt: str, text: str, reasoning: str | None, content: str
) -> None:
    parsed = parse(child, text, "qwen3", prompt=prompt)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_without_tools_markup_is_content(child: Child) -> None:
    parsed = parse(child, f"<think>hm</think>{HERMES_SUM}", "qwen3", tools=())
    assert parsed == ParsedReply(content=HERMES_SUM, reasoning="hm")


# The two readers differ for a second object, a missing end, and half a call next to a whole one, as
# the cases above show. For the replies below, the fake engine of the environment tests gives the
# result of a real engine.
@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{",
        "}</tool_call>",
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"name": "sum", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": 3}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1", "x": 1}}</tool_call>',
        "<tool_call>" + "[" * 15_000 + "</tool_call>",
        "<tool_call>" + "1" * 9_000 + "</tool_call>",
        '<tool_call>{"name": NaN}</tool_call>',
    ],
)
def test_the_engine_and_the_reader_without_vllm_agree_on_the_common_form(
    child: Child, text: str
) -> None:
    tools = (CALCULATOR,)
    parsed = parse(child, text, tools=tools)
    by_reader = [
        call.reason if isinstance(call, MalformedCall) else dict(call.arguments)
        for call in parse_tool_calls(text, tools)
    ]
    assert outcome(parsed, tools) == by_reader


PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<function=sum>",
    "<parameter=a>",
    "<arg_key>",
    '{"name": "sum", ',
    '"arguments": ',
    '"parameters": ',
    '{"a": 1}}',
    "}",
    '"\\ud800"',
    HERMES_SUM,
)


@settings(max_examples=60)
@given(
    family=st.sampled_from(sorted(reply_parsing.TEMPLATES)),
    parts=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12),
)
def test_no_reply_breaks_the_parser(child: Child, family: str, parts: list[str]) -> None:
    parsed = parse(child, "".join(parts), family)
    for call in parsed.calls:
        if not isinstance(call, MalformedCall):
            (call.name + call.arguments + call.id).encode()
    check_calls(parsed.calls, TOOLS)


def test_half_a_character_in_an_argument_is_replaced(child: Child) -> None:
    text = HERMES_SUM.replace("1", '1, "note": "\\ud800"')
    assert outcome(parse(child, text)) == [{"a": 1, "note": "?"}]


def _engine(model: Path, **chosen: str) -> EngineSettings:
    return EngineSettings(
        inference=InferenceSettings(**chosen),
        model=str(model),
        dtype=Dtype.FLOAT32,
        chat_template=None,
        max_context_tokens=64,
        stop_token_ids=(),
        reads_text=False,
        resets_prefix_cache=False,
        seed=0,
    )


def test_parsers_can_be_chosen_by_name(child: Child, tmp_path: Path) -> None:
    reply_parsing.family("qwen3").save_pretrained(tmp_path)
    text = f"<think>hm</think>{CODER_SUM}"
    assert child(reply_parsing.loaded_parsers, _engine(tmp_path)) == ("hermes", "deepseek_r1")
    named = _engine(tmp_path, tool_parser="qwen3_coder", reasoning_parser="none")
    assert child(reply_parsing.loaded_parsers, named) == ("qwen3_coder", None)
    parsed = child(reply_parsing.parse_loaded, named, text, TOOLS)
    assert parsed.content == "<think>hm</think>" and outcome(parsed) == [{"a": 1}]
    silent = _engine(tmp_path, tool_parser="none")
    parsed = child(reply_parsing.parse_loaded, silent, text, TOOLS)
    assert parsed == ParsedReply(content=CODER_SUM, reasoning="hm")


# vLLM reads Cohere's calls with a package that is not installed here.
@pytest.mark.parametrize("name", ["hemes", "llama3_json", "cohere_command3"])
def test_an_unusable_parser_name_is_refused(child: Child, tmp_path: Path, name: str) -> None:
    reply_parsing.family("tiny").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"inference.tool_parser is '{name}'"):
        child(reply_parsing.loaded_parsers, _engine(tmp_path, tool_parser=name))


def test_the_configuration_allows_the_parser_names_of_vllm(child: Child) -> None:
    read = registered_parsers()
    assert read is not None
    tool, reasoning = child(reply_parsing.vllm_names)
    assert read["tool"] == tool - {"openai"}
    assert read["reasoning"] == reasoning - {"openai_gptoss"}
    assert {form.parser for form in CALL_FORMS} <= read["tool"]
