"""Test that the checks of `rayloom train` accept the starts that `make bench-start` measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.start import ROOT, smollm2_start, tiny_start
from service.cli.main import app


def test_both_starts_pass_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for start in (tiny_start(), smollm2_start(Path("models/smollm2"))):
        # The checks of the prompts and the reward are the same with the tiny model.
        words = [word for word in start.arguments if word not in ("--model", "models/smollm2")]
        done = CliRunner().invoke(app, ["check", *words])
        assert done.exit_code == 0, (start.name, done.output, done.exception)
