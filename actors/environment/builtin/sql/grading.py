"""When two results of a query are equal: pure.

Stated choices. Rows are compared as a multiset; in their order where the true query orders them at
its top level. Names of columns do not count, their number and order do. A whole number and a float
of the same value are equal; floats are equal where 12 significant digits are. A text is never a
number, upper and lower case differ, NULL equals NULL alone. An empty truth, which has no rows or
NULLs alone, cannot tell a right query from a wrong one: nothing is correct then, whatever is found.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

Row = Sequence[Any]
"""Of None, numbers, texts, and {"blob": hexadecimal}."""

_DIGITS = 12
_MAX_ANSWER_CHARS = 2_000
# Comments, texts and quoted names, which may hold anything.
_OPAQUE = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]", re.DOTALL
)
# What stands behind the fence is a language where the line ends there, or where it is sql.
_FENCE = re.compile(r"```(?:sql\b|[\w+-]*[ \t]*\n)?(.*?)```", re.DOTALL | re.IGNORECASE)


def is_correct(found: Sequence[Row], truth: Sequence[Row], *, is_ordered: bool) -> bool:
    """Whether a result is the true one, and that says something.

    Example: is_correct([[1.0], [2]], [[2], [1]], is_ordered=False) -> True
    """
    return not is_empty(truth) and result_key(found, is_ordered=is_ordered) == result_key(
        truth, is_ordered=is_ordered
    )


def is_empty(rows: Sequence[Row]) -> bool:
    """Whether there are no rows, or NULLs alone."""
    return all(cell is None for row in rows for cell in row)


def result_key(rows: Sequence[Row], *, is_ordered: bool) -> tuple[Any, ...]:
    """Equal for equal results."""
    keys = [tuple(_cell_key(cell) for cell in row) for row in rows]
    return tuple(keys) if is_ordered else tuple(sorted(Counter(keys).items()))


def shown_result(rows: Sequence[Row], *, is_ordered: bool) -> str:
    """A text that is equal for equal results, up to its length: for a majority vote."""
    keys = [[text for _, text in map(_cell_key, row)] for row in rows]
    return json.dumps(keys if is_ordered else sorted(keys))[:_MAX_ANSWER_CHARS]


def _cell_key(cell: Any) -> tuple[str, str]:
    if cell is None:
        return ("null", "")
    if isinstance(cell, dict):
        return ("blob", str(cell["blob"]))
    if isinstance(cell, str):
        return ("text", cell)
    return ("number", _number_key(cell))


def _number_key(number: float) -> str:
    if isinstance(number, float) and math.isfinite(number):
        exact = number.is_integer() and abs(number) < 2**53
        rounded = number if exact else float(f"{number:.{_DIGITS}g}")
        number = int(rounded) if rounded.is_integer() else rounded
    return repr(number)


def orders_rows(query: str) -> bool:
    """Whether a query has ORDER BY at its top level.

    Example: orders_rows("SELECT a FROM t ORDER BY a") -> True;
    orders_rows("SELECT * FROM (SELECT a FROM t ORDER BY a)") -> False
    """
    depth, top = 0, []
    for character in _OPAQUE.sub(" ", query):
        depth += (character == "(") - (character == ")")
        top.append(character if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(top), re.IGNORECASE) is not None


def query_of(text: str) -> str:
    """The last fenced block of an answer, else all of it; without white space around it.

    Example: query_of("So:\\n```sql\\nSELECT 1\\n```") -> "SELECT 1"
    """
    fenced = _FENCE.findall(text)
    return (fenced[-1] if fenced else text).strip()
