"""Tests that run the commands of the introductory pages in order, as they are printed.

A page's trainings and services start one after another, a minute each, so that these are proofs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.checks.page_commands import (
    Terminal,
    blocks_of,
    num_steps_of,
    pages_of_start,
    project,
    reason_not_to_run,
)
from worlds.runs.run_driver import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.pages, pytest.mark.timeout(3600)]
WITH_COMMANDS = [
    page for page in pages_of_start() if any(each.commands for each in blocks_of(page))
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_printed(page: Path, tmp_path: Path) -> None:
    with project(tmp_path) as root:
        terminal = Terminal(root=root, num_steps=num_steps_of(page), directory=root)
        try:
            for block in blocks_of(page):
                terminal.start_block(block)
                for command in block.commands:
                    if reason_not_to_run(command) is None:
                        terminal.type(command)
        finally:
            terminal.close()


def test_the_script_of_the_page_about_python_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with project(tmp_path) as root:
        (root / "script.py").write_text("\n".join(code), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=root, text=True, capture_output=True, timeout=3000,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
