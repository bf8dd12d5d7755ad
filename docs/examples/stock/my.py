"""A tool that returns numbers which the policy cannot know, and a function that scores answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = [json.loads(line) for line in Path(__file__).with_name("stock.jsonl").open()]
STOCK = {row["item"]: int(row["answer"]) for row in ROWS}


def stock(item: str) -> int:
    """Look up how many of an item are in stock."""
    if item not in STOCK:
        raise ValueError(f"there is no item {item}")
    return STOCK[item]


def score(completion: str, answer: str, messages: Sequence[Any] = ()) -> dict[str, float]:
    """Return score 1 if the completion's last number is right, and whether a call worked."""
    numbers = re.findall(r"\d+", completion)
    results = [each["content"] for each in messages if each["role"] == "tool"]
    called = any(not result.startswith("error") for result in results)
    return {"score": float(numbers[-1:] == [answer]), "called": float(called)}
