"""The properties of sessions, with twenty times their usual number of sessions and chats."""

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


# Eight minutes together on one core, which a test before each commit must not take.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "properties",
    [
        "test_tree_properties.py::test_every_sampled_token_is_trained_once_however_clients_write_it",
        "test_tree_properties.py::test_replies_of_one_text_are_told_apart_where_their_ids_come_back",
        "test_tree_properties.py::"
        "test_with_many_agents_a_turn_is_trained_once_or_listed_and_no_reward_is_lost",
        "test_nothing_vanishes.py::test_every_text_is_in_the_prompt_or_the_request_is_refused",
    ],
)
def test_no_example_is_found_against_a_property_of_sessions(properties: str) -> None:
    options = ("-n", "0", "--timeout", "3600", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, HERE / properties],
        env={**os.environ, VARIABLE: str(FACTOR)},
        check=False,
    )
    assert done.returncode == 0
