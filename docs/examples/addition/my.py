"""The reward of `make demo`: only the last number of an answer is right or wrong."""

from __future__ import annotations

import re


def right(completion: str, answer: str) -> float:
    """Return 1 if the last number of the answer is the sum."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [answer])
