"""Functions for the setting `group_reward`, which score the answers of a group together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

calls: list[dict[str, Any]] = []


def places(completions: list[str], prompts: list[str], answer: list[str], **columns: Any) -> Any:
    """Reward each answer by its place in the group; log a metric and a column."""
    calls.append({"completions": completions, "prompts": prompts, "answer": answer, **columns})
    columns["log_metric"]("answers", len(completions))
    columns["log_extra"]("place", [f"place {index}" for index in range(len(completions))])
    yield from (float(index) for index in range(len(completions)))


async def longest(completions: list[str], answers: list[str]) -> list[dict[str, float]]:
    """Score the longest answers; the parameters are named as verifiers names a group's lists."""
    most = max(map(len, completions))
    assert answers == [answers[0]] * len(completions)
    return [{"long": float(len(each) == most), "plain": 0.5} for each in completions]


def fails(completions: list[str]) -> list[float]:
    raise KeyError("judge")


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def masked(completions: list[str]) -> list[Any]:
    """Return the mean of the lines that were graded, of which there is none."""
    return [np.ma.array([0.0, 0.0], mask=True).mean() for _ in completions]


def masked_part(completions: list[str]) -> list[Any]:
    return [{"lines": np.ma.array([1.0], mask=True), "form": 1.0} for _ in completions]


def silent(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def wrong_column(completions: list[str], log_extra: Any) -> list[float]:
    log_extra("word", ["only one"])
    return [1.0] * len(completions)


def consumes(completions: list[str], prompts: Any, words: Any, wordss: Any, columns: Any) -> Any:
    """Take a value out of every list that an answer has, as a careless function may."""
    lists = zip(prompts, words, wordss, strict=True)
    used = [[each.pop() for each in of_answer] for of_answer in lists]
    return [float(word == again == columns["words"][-1]) for _, word, again in used]


def of_one(completion: str) -> float:
    return float(completion == "b")


def with_prompt(completions: list[str], prompt: str) -> list[float]:
    return [1.0 for _ in completions]


def with_tools(completions: list[str], environments: list[Any]) -> list[float]:
    return [0.0] * len(completions)


def unordered(completions: list[str]) -> set[float]:
    return {float(index) for index in range(len(completions))}


def only_long(completions: list[str]) -> list[float | None]:
    """Score only the answers of two characters or more."""
    return [1.0 if len(each) > 1 else None for each in completions]


def hangs(completions: list[str]) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


def changes(completions: list[str], words: list[list[str]]) -> list[float]:
    """Change the arguments in place."""
    words[0].append("changed")
    completions.clear()
    return [float(len(words))] * len(words)


def by_place(first: str, /, completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


class Scorer:
    """An instance that is called like a function."""

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float("self" not in columns)] * len(completions)


scorer = Scorer()


def _without_wraps(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


hidden = _without_wraps(only_long)
