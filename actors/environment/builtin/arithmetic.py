"""A calculator that is safe to hand to a policy: numbers, + - * /, parentheses, nothing else.

Pure. The text is bounded and checked character by character before it is parsed, so that no text
can name anything, take long or warn. Called by the calculator environment.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

MAX_EXPRESSION_CHARS = 120
MAX_MAGNITUDE = 1e12

_ALLOWED = re.compile(rf"[0-9+\-*/(). ]{{1,{MAX_EXPRESSION_CHARS}}}")
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class BadExpression(Exception):
    """The expression has no value here; the message is one short sentence for the policy."""


def evaluate(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Raises: BadExpression for anything but numbers, + - * / and parentheses, for a division by
    zero, and where a number exceeds MAX_MAGNITUDE.
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
