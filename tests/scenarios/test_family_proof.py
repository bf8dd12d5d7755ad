"""Test that engine and trainer agree for each family of models, or that it is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "families.md"

pytestmark = [pytest.mark.proof, pytest.mark.families]


@pytest.mark.timeout(3600)
def test_each_family_agrees_with_the_trainer_or_is_refused() -> None:
    done = subprocess.run([sys.executable, ROOT / "tests" / "families.py"], check=False)
    assert done.returncode == 0
    rows = [line for line in PAGE.read_text().splitlines() if line.count("|") >= 4]
    assert sum("| passes |" in row for row in rows) >= 50
    assert len(rows) >= 100
