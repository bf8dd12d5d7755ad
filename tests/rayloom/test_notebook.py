"""Tests of the committed notebook: it has its output, and its calls fit their functions.

`tests/scenarios/test_notebook_proof.py` executes it.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from typing import Any

from worlds.checks.notebook import code_of, read_notebook, text_of

import rayloom
from deploy.reference import notebook_page

SECTIONS = {field.name for field in fields(rayloom.Config)}


def calls() -> list[ast.Call]:
    """Return the calls of Rayloom's functions in the notebook's cells."""
    trees = [ast.parse(code) for code in code_of(read_notebook())]
    return [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "rayloom"
    ]


def test_each_call_fits_the_signature_of_its_function() -> None:
    found = calls()
    assert {ast.unparse(call.func) for call in found} == {"rayloom.train", "rayloom.evaluate"}
    for call in found:
        assert isinstance(call.func, ast.Attribute)
        function = inspect.signature(getattr(rayloom, call.func.attr))
        named = {word.arg: word.value for word in call.keywords if word.arg}
        bound = function.bind(*call.args, **named)
        assert bound.arguments.get("settings", {}).keys() <= SECTIONS


def test_the_notebook_has_the_output_of_one_complete_execution() -> None:
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = "".join(text_of(cell) for cell in cells)
    for words in ("step 25/25", "step 50/50", "avg@8", "'is_balanced': True"):
        assert words in text
    assert "Traceback" not in text and "/tmp/" not in text


def test_the_page_of_the_site_shows_code_tables_and_printed_text() -> None:
    notebook: Any = read_notebook()
    page = notebook_page(notebook)
    for words in (
        "# Train in a notebook",
        "```python\nresult = rayloom.train(",
        "<table",
        "step 50/50",
    ):
        assert words in page
    assert "<style" not in page
