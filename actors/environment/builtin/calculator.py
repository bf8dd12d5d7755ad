"""Arithmetic questions with a calculator tool: the policy must learn to call it in the right form.

The question depends only on the task's seed. A turn is either tool calls, each answered by a tool
message, or the final answer, a plain number. Anything else is malformed: it is answered with one
short sentence about the fault, and ends the episode only after `max_malformed` malformed turns in a
row. Everything that a player reads is one of the constants below.

Rewards by name: `correct` 1 for the right final answer; `malformed` minus `malformed_penalty` for
each malformed turn; `used_tool` plus `tool_bonus` at the final answer, right or wrong, if a call
had computed the right value before (0 by default: only correctness is then rewarded).
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping

from actors.environment.malformed import ERROR, MalformedTurns
from actors.environment.protocol import (
    Action,
    MalformedCall,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.settings import playing
from actors.environment.task_data import NO_DATA
from actors.environment.tool_calls import visible_text
from actors.types import Task

QUESTION = "What is {expression}?"
NOT_A_NUMBER = "Answer with a number."
CALCULATOR = ToolSchema(
    name="calculator",
    description="Evaluate an arithmetic expression.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
)

_FINAL_ANSWER = re.compile(r"[-+]?[0-9]{1,15}(\.[0-9]{1,9})?\.?")
MAX_EXPRESSION_CHARS = 120
MAX_MAGNITUDE = 1e12

_ALLOWED = re.compile(rf"[0-9+\-*/(). ]{{1,{MAX_EXPRESSION_CHARS}}}")
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorEnvironment:
    """Questions of `num_operands` numbers from low to high, joined by random `operators`."""

    data_schema = NO_DATA

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 9,
        num_operands: int = 2,
        operators: str = "+",
        max_malformed: int = 3,
        malformed_penalty: float = 0.1,
        tool_bonus: float = 0.0,
    ) -> None:
        if not 0 <= low <= high <= 999:
            raise ValueError(
                f"calculator: got low={low}, high={high}; expected 0 <= low <= high <= 999"
            )
        if not 2 <= num_operands <= 4:
            raise ValueError(f"calculator: got num_operands={num_operands}; expected 2 to 4")
        if not operators or not set(operators) <= set("+-*"):
            raise ValueError(
                f"calculator: got operators={operators!r}; expected one or more of + - *, such as "
                "'+-'"
            )
        if max_malformed < 0:
            raise ValueError(f"calculator: got max_malformed={max_malformed}; expected 0 or more")
        if not (0 <= malformed_penalty < 10 and 0 <= tool_bonus < 10):
            raise ValueError(
                f"calculator: got malformed_penalty={malformed_penalty}, tool_bonus={tool_bonus}; "
                "expected both from 0 to 10"
            )
        self._operands = range(low, high + 1)
        self._num_operands = num_operands
        self._operators = operators
        self._malformed = MalformedTurns(at_most=max_malformed, penalty=malformed_penalty)
        self._tool_bonus = tool_bonus
        self._truth = 0.0
        self._has_computed_truth = False

    async def reset(self, task: Task) -> Observation:
        dice = random.Random(task.seed)
        expression = str(dice.choice(self._operands))
        for _ in range(self._num_operands - 1):
            expression += dice.choice(self._operators) + str(dice.choice(self._operands))
        self._truth = evaluate(expression)
        self._malformed.begin_anew()
        self._has_computed_truth = False
        question = Message(role=Role.USER, content=QUESTION.format(expression=expression))
        return Observation(
            messages=(question,), tools=(CALCULATOR,), best_return=1.0 + self._tool_bonus
        )

    async def step(self, action: Action) -> StepResult:
        if action.calls:
            return self._answer_calls(action.calls)
        answer = visible_text(action.text)
        if not _FINAL_ANSWER.fullmatch(answer):
            return self._malformed.result((Message(role=Role.USER, content=NOT_A_NUMBER),))
        return self._grade(float(answer))

    async def close(self) -> None:
        return None

    def _answer_calls(self, calls: tuple[ToolCall | MalformedCall, ...]) -> StepResult:
        answers = []
        num_malformed = max(0, len(calls) - playing.get().max_calls_per_turn)
        for call in calls[: playing.get().max_calls_per_turn]:
            try:
                content = self._compute(call)
            except BadExpression as error:
                num_malformed += 1
                content = ERROR.format(message=error)
            answers.append(
                Message(
                    role=Role.TOOL,
                    content=content,
                    name=CALCULATOR.name,
                    tool_call_id=call.id if isinstance(call, ToolCall) else None,
                )
            )
        if num_malformed:
            return self._malformed.result(tuple(answers))
        self._malformed.begin_anew()
        return StepResult(messages=tuple(answers))

    def _compute(self, call: ToolCall | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            raise BadExpression(call.message)
        value = evaluate(call.arguments["expression"])
        self._has_computed_truth |= self._is_truth(value)
        return format_number(value)

    def _grade(self, answer: float) -> StepResult:
        correct = float(self._is_truth(answer))
        used_tool = self._tool_bonus if self._has_computed_truth else 0.0
        return StepResult(
            reward=correct + used_tool,
            reward_components={"correct": correct, "used_tool": used_tool},
            terminated=True,
            answer=format_number(answer),
        )

    def _is_truth(self, value: float) -> bool:
        return abs(value - self._truth) < 1e-6


class BadExpression(Exception):
    """The expression cannot be evaluated; the message is one short sentence for the policy."""


def evaluate(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Safe on any text of a policy: its length and characters are checked before it is parsed, so that
    it cannot contain names, take long or cause warnings.

    Raises: BadExpression for anything but numbers, + - * / and parentheses, for a division by
    zero, and if a number exceeds MAX_MAGNITUDE.
    Example: evaluate("2*(3+4)") -> 14
    """
    if not _ALLOWED.fullmatch(expression):
        raise BadExpression("Use numbers, + - * / and parentheses only.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise BadExpression("The expression is not complete.") from None
    return _value(tree.body)


def format_number(value: float) -> str:
    """Write a number as a person would: no trailing zeros, at most six decimals.

    Example: format_number(7.0) -> "7"; format_number(0.1 + 0.2) -> "0.3"
    """
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Div) and second == 0:
                raise BadExpression("Division by zero.")
            return _bounded(_OPERATIONS[type(op)](first, second))
        case _:
            raise BadExpression("Use numbers, + - * / and parentheses only.")


def _bounded(number: float) -> float:
    if abs(number) > MAX_MAGNITUDE:
        raise BadExpression("The number is too large.")
    return number
