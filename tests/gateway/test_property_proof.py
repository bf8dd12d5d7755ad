"""Proof that runs the property tests of sessions with twenty times their usual examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.checks.examples import VARIABLE

HERE = Path(__file__).parent
FACTOR = 20

pytestmark = [pytest.mark.proof, pytest.mark.fuzz]


# Together they take eight minutes on one core, too long for the tests before each commit.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "properties",
    [
        "test_tree_properties.py::test_every_sampled_token_is_trained_once_in_any_form_of_a_client",
        "test_tree_properties.py::test_replies_of_equal_text_are_distinguished_by_their_ids",
        "test_tree_properties.py::"
        "test_with_many_agents_a_turn_is_trained_once_or_left_out_and_no_reward_is_lost",
        "test_nothing_vanishes.py::test_every_text_is_in_the_prompt_or_the_request_is_refused",
    ],
)
def test_the_properties_of_sessions_hold_for_many_examples(properties: str) -> None:
    options = ("-n", "0", "--timeout", "3600", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, HERE / properties],
        env={**os.environ, VARIABLE: str(FACTOR)},
        check=False,
    )
    assert done.returncode == 0
