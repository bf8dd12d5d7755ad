"""Write stock.jsonl: questions about a shop's stock, which need a lookup."""

from __future__ import annotations

import json
import random
from typing import Any

COLOURS = "red blue green white black brown yellow silver".split()
THINGS = "lamp chair table clock mirror kettle basket blanket drawer ladder".split()
EXAMPLES = {"pink sofa": 58, "purple desk": 23}


def question(item: str) -> dict[str, Any]:
    return {"role": "user", "content": f"How many {item}s are in stock?"}


def answer(item: str, number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"There are {number} {item}s in stock."}


def look_up(item: str, number: int) -> list[dict[str, Any]]:
    """Return a call of the tool, and its result."""
    function = {"name": "stock", "arguments": {"item": item}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": str(number)},
    ]


def chat(item: str, *, calls: bool) -> list[dict[str, Any]]:
    """Return two examples and the question, with or without the calls in the examples."""
    messages = []
    for example, number in EXAMPLES.items():
        messages.append(question(example))
        if calls:
            messages += look_up(example, number)
        messages.append(answer(example, number))
    return [*messages, question(item)]


def main() -> None:
    dice = random.Random(0)
    items = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    dice.shuffle(items)
    with open("stock.jsonl", "w") as file:
        for item in items:
            row = {
                "prompt": chat(item, calls=True),
                "without_tool": chat(item, calls=False),
                "item": item,
                "answer": str(dice.randint(11, 99)),
            }
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
