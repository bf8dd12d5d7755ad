"""Functions that run command lines of `rayloom`, several in one process to save its start.

A package that one line imports is also counted for the lines after it. Lines that must not import
large packages therefore need a process without lines that do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from worlds.runs.run_driver import ROOT

LIMIT_S = 120
HEAVY = ("torch", "ray", "transformers", "vllm")

# Any exception other than SystemExit ends the program, and the test fails.
_PROGRAM = f"""
import contextlib, io, json, sys
from service.cli.main import main

answers = []
for line in json.load(sys.stdin):
    sys.argv = ["rayloom", *line]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    heavy = [name for name in {HEAVY} if name in sys.modules]
    answers.append(dict(code=code, out=out.getvalue(), err=err.getvalue(), heavy=heavy))
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The exit code and output of a command line.

    heavy: the large packages that were imported when it ended.
    """

    code: int
    out: str
    err: str
    heavy: Sequence[str]


def as_a_user(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command line in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def rayloom(*lines: Sequence[str]) -> list[Answer]:
    """Run the command lines in turn in one process. Return the answer of each."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([list(line) for line in lines]),
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Answer(**fields) for fields in json.loads(done.stdout)]
