"""Test of the notebook of the documentation in a real kernel.

It starts two trainings and an evaluation, which take some five minutes.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from worlds.checks.notebook import execute, read_notebook, text_of

pytestmark = [pytest.mark.proof, pytest.mark.pages, pytest.mark.timeout(3000)]
# This cell follows the last one, and shows that an event loop runs while cells do.
LOOP = "import asyncio\nasyncio.get_running_loop().is_running()"


def test_each_cell_runs_in_one_kernel_and_the_policy_learns(tmp_path: Path) -> None:
    notebook = read_notebook()
    notebook.cells.append(nbformat.v4.new_code_cell(LOOP))
    execute(notebook, tmp_path)
    cells = {cell.id: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert cells.pop(notebook.cells[-1].id) == "True"
    assert "step 25/25" in cells["train"] and "step 50/50" in cells["continue"]
    means = [float(value) for value in re.findall(r"^\d+ +(\S+)$", cells["continue"], re.MULTILINE)]
    assert len(means) == 13 and means[-1] > means[0] + 0.2
    stored = list((tmp_path / "next-number" / "functions").glob("given_*.py"))
    assert len(stored) == 1 and "def score(completion: str" in stored[0].read_text()
