"""Tests of the data set and the reward function of `make demo`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "docs" / "examples" / "addition"


def right(completion: str, answer: str) -> float:
    spec = importlib.util.spec_from_file_location("addition_example", DIRECTORY / "my.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score: float = module.right(completion, answer)
    return score


def test_each_pair_of_numbers_is_asked_once_and_the_answer_is_their_sum() -> None:
    lines = (DIRECTORY / "addition.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    numbers = [tuple(map(int, re.findall(r"\d+", row["prompt"]))) for row in rows]
    assert all(int(row["answer"]) == sum(pair) for row, pair in zip(rows, numbers, strict=True))
    # No pair occurs twice in two orders, so that a held-out sum is not trained as b + a.
    pairs = {tuple(sorted(pair)) for pair in numbers}
    assert len(rows) == len(pairs) == 59 * 60 // 2
    assert {number for pair in pairs for number in pair} == set(range(2, 61))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("42", 1.0),
        ("17 + 25 = 42.", 1.0),
        ("The answer is **42**.", 1.0),
        ("17 + 25 = 42 and that is 1 more than 41", 0.0),
        ("17 + 25 = 4", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_number_of_an_answer_counts(completion: str, expected: float) -> None:
    assert right(completion, "42") == expected
