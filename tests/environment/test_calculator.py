"""Tests of the calculator environment, its expressions, and the parser of tool calls."""

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environment.builtin.calculator import (
    CALCULATOR,
    BadExpression,
    CalculatorEnvironment,
    CalculatorOptions,
    evaluate,
    format_number,
)
from actors.environment.policy import ParsedCall
from actors.environment.protocol import (
    Action,
    MalformedCall,
    MalformedReason,
    Role,
    ToolCall,
    ToolSchema,
)
from actors.environment.tool_calls import check_calls, parse_tool_calls, with_integers
from actors.options import BadOptions, read
from actors.types import Task

TASK = Task(task_id="t", environment="calculator", seed=11)


def _call(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _action(text: str) -> Action:
    return Action(text=text, calls=parse_tool_calls(text, (CALCULATOR,)))


async def _start(**options: object) -> tuple[CalculatorEnvironment, str]:
    environment = CalculatorEnvironment(CalculatorOptions(**options))  # type: ignore[arg-type]
    start = await environment.reset(TASK)
    question = start.messages[0].content
    assert question.startswith("What is ") and question.endswith("?")
    return environment, question.removeprefix("What is ").removesuffix("?")


async def test_a_tool_message_answers_a_call_and_the_right_number_is_rewarded() -> None:
    environment, expression = await _start(low=10, high=99)
    answered = await environment.step(_action(_call(expression)))
    assert answered.messages[0].role is Role.TOOL
    assert not (answered.terminated or answered.is_malformed or answered.reward)
    done = await environment.step(_action(answered.messages[0].content))
    assert done.terminated and done.reward == 1.0
    assert done.reward_components == {"correct": 1.0, "used_tool": 0.0}
    assert (answered.answer, done.answer) == (None, answered.messages[0].content)


async def test_a_wrong_number_ends_the_task_without_reward() -> None:
    environment, _ = await _start()
    done = await environment.step(_action("-1.0"))
    assert done.answer == "-1"
    assert done.terminated and done.reward == 0.0 and not done.is_malformed


async def test_the_tool_bonus_is_paid_once_and_only_with_the_final_answer() -> None:
    environment, expression = await _start(tool_bonus=0.5)
    for _ in range(3):
        assert (await environment.step(_action(_call(expression)))).reward == 0.0
    assert (await environment.step(_action("-1"))).reward == 0.5
    fresh, expression = await _start(tool_bonus=0.5)
    assert (await fresh.step(_action(str(int(evaluate(expression)))))).reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>{oops}</tool_call>", "error: The tool call is not valid JSON."),
        ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>', "error: No such tool."),
        ('<tool_call>{"name": "calculator"}</tool_call>', "error: Missing argument expression."),
        (_call("1/0"), "error: Division by zero."),
        (_call("import os"), "error: Use numbers"),
        ("the answer", "Answer with a number."),
        ("", "Answer with a number."),
        ("1 2", "Answer with a number."),
        ("9" * 5000, "Answer with a number."),
    ],
)
async def test_a_malformed_turn_is_answered_and_does_not_end_the_task(
    text: str, answer: str
) -> None:
    environment, _ = await _start(malformed_penalty=0.25)
    result = await environment.step(_action(text))
    assert result.is_malformed and not result.terminated and not result.ended_by_malformed
    assert result.reward == -0.25 and result.reward_components == {"malformed": -0.25}
    assert result.messages[0].content.startswith(answer)


async def test_only_too_many_malformed_turns_in_a_row_end_the_task() -> None:
    environment, expression = await _start(max_malformed=2)
    for text in ("x", "x", _call(expression), "x", "x"):
        assert not (await environment.step(_action(text))).terminated
    last = await environment.step(_action("x"))
    assert last.terminated and last.ended_by_malformed and last.messages == ()
    assert last.reward < 0


async def test_calls_of_a_turn_are_answered_in_order_and_a_bad_call_makes_it_malformed() -> None:
    environment, _ = await _start()
    result = await environment.step(_action(_call("1+1") + _call("1+") + _call("2*3")))
    contents = [message.content for message in result.messages]
    assert (contents[0], contents[2]) == ("2", "6") and contents[1].startswith("error")
    assert result.is_malformed


async def test_a_turn_with_too_many_calls_is_malformed_and_only_the_first_are_answered() -> None:
    environment, _ = await _start()
    result = await environment.step(_action(_call("1+1") * 500))
    assert result.is_malformed and len(result.messages) == 8


async def test_questions_depend_on_the_seed_and_follow_the_options() -> None:
    environment = CalculatorEnvironment(
        CalculatorOptions(low=3, high=5, num_operands=3, operators="*-")
    )
    questions = set()
    for seed in range(50):
        start = await environment.reset(Task(task_id="t", environment="calculator", seed=seed))
        again = await environment.reset(Task(task_id="t", environment="calculator", seed=seed))
        assert start == again
        questions.add(start.messages[0].content)
    assert len(questions) > 20
    letters = set("".join(q.removeprefix("What is ") for q in questions))
    assert letters == set("345*-?")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*(3+4)", 14), ("-3--4", 1), ("7/2", 3.5), (".5+1.", 1.5), (" 1 + 1 ", 2), ("+--2", 2)],
)
def test_expressions_have_values_computed_by_hand(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "()",
        "1,2",
        "2**9",
        "7//2",
        "3(4)",
        "...",
        "1_000",
        "9" * 100,
        "1e9",
        "(" * 60,
        "(" * 119 + "1",
        "+-" * 59 + "1" + "*",
        "__import__('os')",
        "\u0663+\u0661",
        "1\x00",
        "1\n+1",
        "0777",
        "1" * 121,
        "1 if 1 else 2",
        "True",
        "[1]",
        "0/0",
    ],
)
@pytest.mark.filterwarnings("error")
def test_invalid_expressions_are_refused_without_a_warning(expression: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(expression)


@settings(deadline=None)
@given(text=st.text(alphabet="0123456789+-*/(). ", max_size=130) | st.text())
def test_any_text_gives_a_bounded_number_or_is_refused(text: str) -> None:
    try:
        value = evaluate(text)
    except BadExpression:
        return
    assert abs(value) <= 1e12
    assert evaluate(format_number(value)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.0, "7"), (0.1 + 0.2, "0.3"), (-0.0, "0"), (1e12, "1000000000000"), (1 / 3, "0.333333")],
)
def test_numbers_are_written_without_rounding_errors(value: float, text: str) -> None:
    assert format_number(value) == text


def _reasons(text: str) -> list[MalformedReason | None]:
    calls = parse_tool_calls(text, (CALCULATOR,))
    return [call.reason if isinstance(call, MalformedCall) else None for call in calls]


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("no call", []),
        (_call("1+1"), [None]),
        ("well:" + _call("1") + _call("2"), [None, None]),
        (f"<think>{_call('1')}</think>4", []),
        ("<tool_call>[1]</tool_call>", ["not_an_object"]),
        ("<tool_call></tool_call>", ["invalid_json"]),
        ("<tool_call>{", ["unclosed"]),
        ("}</tool_call>", ["unopened"]),
        (_call("1") + "</tool_call>", [None, "unopened"]),
        ('<tool_call>{"name": 7}</tool_call>', ["unknown_tool"]),
        (
            '<tool_call>{"name": "calculator", "arguments": 3}</tool_call>',
            ["not_an_object"],
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": 3}}</tool_call>',
            ["ill_typed_argument"],
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1", "x": 1}}'
            "</tool_call>",
            ["unknown_argument"],
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1\\"}"}'
            "</tool_call>",
            [None],
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ["invalid_json"]),
        ("<tool_call>" + "[" * 15_000 + "</tool_call>", ["invalid_json"]),
        ("<tool_call>" + "1" * 9_000 + "</tool_call>", ["invalid_json"]),
        ('<tool_call>{"name": NaN}</tool_call>', ["invalid_json"]),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud800"}}</tool_call>',
            ["invalid_json"],
        ),
    ],
)
def test_each_call_is_parsed_or_has_the_reason_why_it_is_malformed(
    text: str, reasons: list[MalformedReason | None]
) -> None:
    assert _reasons(text) == reasons


def test_schema_true_accepts_any_value_and_false_accepts_none() -> None:
    """Check the schemas `true`, which Rust's schemars writes for any type, `{}` and `false`."""
    schema = {"type": "object", "properties": {"value": True, "never": False, "n": {}}}
    tool = ToolSchema(name="f", description="", parameters=schema)
    assert tool.for_template()["function"]["parameters"] == schema

    def read(arguments: str) -> list[MalformedReason | None]:
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        calls = parse_tool_calls(text, (tool,))
        return [call.reason if isinstance(call, MalformedCall) else None for call in calls]

    for value in ("1", '"x"', "[true]", "null", '{"a": 1}'):
        assert read(f'{{"value": {value}, "n": {value}}}') == [None]
    assert read('{"never": 1}') == read('{"other": 1}') == ["unknown_argument"]


@settings(deadline=None)
@given(text=st.text() | st.text(alphabet='<>/tool_ca{}":,[]1e').map(lambda s: f"<tool_call>{s}"))
def test_parsing_calls_never_raises(text: str) -> None:
    for call in parse_tool_calls(text, (CALCULATOR,)):
        assert isinstance(call, ToolCall | MalformedCall)


def test_a_boolean_is_not_an_integer() -> None:
    schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = type(CALCULATOR)(name="f", description="", parameters=schema)
    text = '<tool_call>{"name": "f", "arguments": {"n": true}}</tool_call>'
    (call,) = parse_tool_calls(text, (tool,))
    assert isinstance(call, MalformedCall) and call.reason == "ill_typed_argument"


@pytest.mark.parametrize(
    "options", [{"low": 9, "high": 1}, {"operators": "/"}, {"operators": ""}, {"num_operands": 1}]
)
def test_invalid_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadOptions, match="expected"):
        read(CalculatorOptions, options, where="options")


STRING, INTEGER = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "arguments", "found"),
    [
        ({"properties": {"a": STRING}}, {"b": 1}, "unknown_argument"),
        (
            {"properties": {"a": STRING}, "additionalProperties": False},
            {"b": 1},
            "unknown_argument",
        ),
        ({"properties": {"a": STRING}, "additionalProperties": True}, {"a": "x", "b": 1}, None),
        ({"properties": {"a": STRING}, "additionalProperties": STRING}, {"b": "x"}, None),
        ({"additionalProperties": STRING}, {"b": 1}, "ill_typed_argument"),
        ({"additionalProperties": False}, {"b": 1}, "unknown_argument"),
        ({}, {"b": 1}, None),
        ({"additionalProperties": None, "patternProperties": None}, {"b": 1}, None),
        ({"properties": {"a": STRING}, "additionalProperties": None}, {"b": 1}, "unknown_argument"),
        ({"properties": {"a": STRING}, "patternProperties": {"^x-": STRING}}, {"x-b": "1"}, None),
        (
            {"properties": {"a": STRING}, "patternProperties": {"^x-": STRING}},
            {"b": "1"},
            "unknown",
        ),
        ({"patternProperties": {"^x-": STRING}}, {"x-b": 1}, "ill_typed_argument"),
        ({"properties": {"a": STRING}, "patternProperties": {"(?<n>": INTEGER}}, {"b": "1"}, None),
        (
            {"properties": {"a": STRING}, "patternProperties": {"a{99999999999999}": STRING}},
            {"b": 1},
            None,
        ),
        ({"patternProperties": {"(?:" * 5000 + ")" * 5000: STRING}}, {"b": 1}, None),
        # Only the arguments themselves are checked, not what is inside them.
        ({"properties": {"a": {"type": "object", "properties": {}}}}, {"a": {"b": 1}}, None),
        ({"properties": {"a": {**STRING, "nullable": True}}}, {"a": None}, None),
        ({"properties": {"a": STRING}}, {"a": None}, "ill_typed_argument"),
        ({"properties": {"a": INTEGER}}, {"a": 5.5}, "ill_typed_argument"),
    ],
)
def test_arguments_beyond_the_properties_and_nulls_are_allowed_where_the_schema_says_so(
    schema: dict[str, Any], arguments: dict[str, Any], found: str | None
) -> None:
    tool = ToolSchema(name="f", description="", parameters={"type": "object", **schema})
    [call] = check_calls([ParsedCall(name="f", arguments=json.dumps(arguments), id="1")], [tool])
    if found is None:
        assert call == ToolCall(name="f", arguments=arguments, id="1")
    else:
        assert isinstance(call, MalformedCall) and call.reason.startswith(found)


@pytest.mark.parametrize(
    ("schema", "value", "given"),
    [
        (INTEGER, "5.0", "5"),
        ({"type": ["integer", "null"]}, "5e0", "5"),
        ({"type": "number"}, "5.0", "5.0"),
        ({"type": ["integer", "number"]}, "5.0", "5.0"),
        # As pydantic writes `int | None`, `list[int]`, `float | int` and `list[list[int] | None]`.
        ({"anyOf": [INTEGER, {"type": "null"}]}, "5.0", "5"),
        ({"type": "array", "items": INTEGER}, '[5.0, 2.5, "a"]', '[5, 2.5, "a"]'),
        ({"anyOf": [{"type": "number"}, INTEGER]}, "5.0", "5.0"),
        (
            {"items": {"anyOf": [{"items": INTEGER}, {"type": "null"}]}},
            "[[5.0], null]",
            "[[5], null]",
        ),
        ({"oneOf": [{"items": INTEGER}, {"items": {"type": "number"}}]}, "[5.0]", "[5.0]"),
        ({"type": "array", "items": True, "anyOf": 3}, "[5.0]", "[5.0]"),
        ({"items": {"type": 3, "anyOf": [INTEGER, 7]}}, "[5.0]", "[5]"),
    ],
)
def test_a_whole_number_is_an_integer(schema: dict[str, Any], value: str, given: str) -> None:
    tool = ToolSchema(name="f", description="", parameters={"properties": {"n": schema}})
    [call] = check_calls([ParsedCall(name="f", arguments=f'{{"n": {value}}}', id="1")], [tool])
    assert isinstance(call, ToolCall) and json.dumps(call.arguments) == json.dumps(
        json.loads(f'{{"n": {value}}}')
    )
    [received] = with_integers([call], [tool])
    assert isinstance(received, ToolCall)
    assert json.dumps(received.arguments) == f'{{"n": {given}}}'


@pytest.mark.parametrize(
    "parameters",
    [{"additionalProperties": 3}, {"patternProperties": {"x": 3}}, {"patternProperties": []}],
)
def test_schemas_of_other_arguments_that_are_none_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"tool f: .* JSON schema"):
        ToolSchema(name="f", description="", parameters=parameters)


@pytest.mark.parametrize(("depth", "is_taken"), [(150, True), (300, False), (500, False)])
def test_a_call_that_is_nested_too_deeply_is_malformed(depth: int, is_taken: bool) -> None:
    tool = ToolSchema(name="f", description="", parameters={"type": "object"})
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    [call] = check_calls([ParsedCall(name="f", arguments=arguments, id="1")], [tool])
    if is_taken:
        assert Action(text="", calls=(call,)).own_copy().calls == (call,)
    else:
        assert isinstance(call, MalformedCall) and "nested too deeply" in call.message


def test_arguments_that_are_not_json_are_copied_too() -> None:
    action = Action(text="", calls=(ToolCall(name="f", arguments={"days": [date(2020, 1, 1)]}),))
    [call] = action.own_copy().calls
    assert isinstance(call, ToolCall)
    call.arguments["days"].clear()
    assert action.calls == (ToolCall(name="f", arguments={"days": [date(2020, 1, 1)]}),)
