"""How many examples a property is tried with: its usual number, or a multiple in a proof."""

from __future__ import annotations

import os

from hypothesis import settings

VARIABLE = "RAYLOOM_TEST_EXAMPLES"
"""The environment variable with the factor; unset: 1."""


def examples(number: int) -> settings:
    """Decorate a property; number: examples without a factor."""
    return settings(max_examples=number * int(os.environ.get(VARIABLE, "1")))
