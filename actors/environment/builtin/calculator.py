"""Arithmetic questions with a calculator tool: the policy must learn to call it in the right form.

The question depends only on the task's seed. A turn is either tool calls, each answered by a tool
message, or the final answer, a plain number. Any other turn is malformed and is answered with one
short sentence about the fault. More than `max_malformed` such turns in a row end the episode.

Components of the reward: `correct` is 1 for the right final answer. `malformed` is minus
`malformed_penalty` for each malformed turn. `used_tool` is `tool_bonus` (by default 0) in the turn
of the final answer if an earlier call has computed the right value, even if the answer is wrong.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.task_data import NO_DATA
from actors.environment.tool_calls import visible_text
from actors.environment.tool_turns import BadArguments, Penalty, ToolTurns, TurnOptions
from actors.limits import STRICT
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


Operand = Annotated[int, Ge(0), Le(999)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorOptions(TurnOptions):
    """Options of `calculator`: the expressions, and the reward for a call."""

    __pydantic_config__ = STRICT

    low: Operand = 1
    """The smallest number."""
    high: Operand = 9
    """The largest number."""
    num_operands: Annotated[int, Ge(2), Le(4)] = 2
    """How many numbers an expression has."""
    operators: str = "+"
    """The operators to draw from: one or more of + - *."""
    tool_bonus: Penalty = 0.0
    """Reward for an answer after a call that computed the right value."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low: got {self.low}, expected at most high, which is {self.high}")
        if not self.operators or not set(self.operators) <= set("+-*"):
            raise ValueError(
                f"operators: got {self.operators!r}, expected one or more of + - *, such as '+-'"
            )


class CalculatorEnvironment:
    """An environment that asks for the value of one random expression.

    The expression has `num_operands` numbers from low to high, joined by random `operators`.
    """

    data_schema = NO_DATA

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options
        self._turns = ToolTurns(
            self._compute,
            at_most=options.max_malformed,
            penalty=options.malformed_penalty,
            name=CALCULATOR.name,
        )
        self._truth = 0.0
        self._has_computed_truth = False

    async def reset(self, task: Task) -> Observation:
        dice = random.Random(task.seed)
        operands = range(self._options.low, self._options.high + 1)
        expression = str(dice.choice(operands))
        for _ in range(self._options.num_operands - 1):
            expression += dice.choice(self._options.operators) + str(dice.choice(operands))
        self._truth = evaluate(expression)
        self._turns.begin_episode()
        self._has_computed_truth = False
        question = Message(role=Role.USER, content=QUESTION.format(expression=expression))
        return Observation(
            messages=(question,), tools=(CALCULATOR,), best_return=1.0 + self._options.tool_bonus
        )

    async def step(self, action: Action) -> StepResult:
        if action.calls:
            return await self._turns.result_of(action.calls)
        answer = visible_text(action.text)
        if not _FINAL_ANSWER.fullmatch(answer):
            return self._turns.malformed_result((Message(role=Role.USER, content=NOT_A_NUMBER),))
        return self._grade(float(answer))

    async def close(self) -> None:
        return None

    async def _compute(self, call: ToolCall) -> str:
        value = evaluate(call.arguments["expression"])
        self._has_computed_truth |= self._is_truth(value)
        return format_number(value)

    def _grade(self, answer: float) -> StepResult:
        correct = float(self._is_truth(answer))
        used_tool = self._options.tool_bonus if self._has_computed_truth else 0.0
        return StepResult(
            reward=correct + used_tool,
            reward_components={"correct": correct, "used_tool": used_tool},
            terminated=True,
            answer=format_number(answer),
        )

    def _is_truth(self, value: float) -> bool:
        return abs(value - self._truth) < 1e-6


class BadExpression(BadArguments):
    """Raised if an expression cannot be evaluated; the text is a short sentence for the policy."""


def evaluate(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Any text of a policy is safe: its length and its characters are checked before it is parsed. A
    text that passes this check contains no names, is parsed quickly and causes no warnings.

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
    """Write a number with at most six decimals and without trailing zeros.

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
