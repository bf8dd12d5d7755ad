"""The number of examples of a property test: its usual number, or a multiple in a proof."""

from __future__ import annotations

import os

from hypothesis import settings

VARIABLE = "RAYLOOM_TEST_EXAMPLES"
"""Environment variable with the factor by which proofs multiply the number; unset: 1."""


def examples(number: int) -> settings:
    """Return the Hypothesis settings of a property test.

    number: examples if the factor is 1.
    """
    return settings(max_examples=number * int(os.environ.get(VARIABLE, "1")))
