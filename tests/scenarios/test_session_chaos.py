"""Test of sessions under faults, each kind once; `tests/session_chaos.py` plays longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from session_chaos import KEY, prove

pytestmark = [pytest.mark.proof, pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_no_turn_that_a_client_saw_is_lost_and_none_is_trained_twice(
    tmp_path: Path, small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    prove(tmp_path, seed=1, num_points=7, model=small_model)
