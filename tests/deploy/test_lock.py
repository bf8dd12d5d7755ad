"""The lock file installs without a compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution

from worlds.run_driver import ROOT

LOCKED = set(re.findall(r"^([\w.-]+)==", (ROOT / "locks" / "cpu.txt").read_text(), re.MULTILINE))
ZEBRA = """
import sys
sys.modules["pycosat"] = None  # an import of it raises
from actors.environment.builtin.reasoning_gym_env import import_reasoning_gym
puzzles = import_reasoning_gym().create_dataset("zebra_puzzles", size=3, seed=3)
print(*(puzzle["answer"] for puzzle in puzzles))
"""


def test_packages_without_wheels_are_named_and_hold_no_c_source() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^SOURCE_ONLY := (.*)$", makefile, re.MULTILINE)
    assert named == ["cellpylib,zss"]
    assert "--only-binary :all: --no-binary $(SOURCE_ONLY)" in makefile
    for name in named[0].split(","):
        assert name in LOCKED
        assert "Root-Is-Purelib: true" in (distribution(name).read_text("WHEEL") or "")


def test_zebra_puzzles_need_no_package_that_is_c_source_alone() -> None:
    assert "pycosat" not in LOCKED and "python-sat" in LOCKED
    done = subprocess.run(
        [sys.executable, "-c", ZEBRA], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # What pycosat 0.6.6 makes of this seed.
    assert done.stdout.split() == ["arnold", "carol", "carol"]
