"""Functions that score the answers of a group together, as `group_reward` names them."""

from __future__ import annotations

from typing import Any

calls: list[dict[str, Any]] = []


def places(completions: list[str], prompts: list[str], answer: list[str], **columns: Any) -> Any:
    """A reward by place in the group, with a metric and a column."""
    calls.append({"completions": completions, "prompts": prompts, "answer": answer, **columns})
    columns["log_metric"]("answers", len(completions))
    columns["log_extra"]("place", [f"place {index}" for index in range(len(completions))])
    yield from (float(index) for index in range(len(completions)))


async def longest(completions: list[str], answers: list[str]) -> list[dict[str, float]]:
    """Named as verifiers names a group's lists."""
    most = max(map(len, completions))
    assert answers == [answers[0]] * len(completions)
    return [{"long": float(len(each) == most), "plain": 0.5} for each in completions]


def fails(completions: list[str]) -> list[float]:
    raise KeyError("judge")


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def silent(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def wrong_column(completions: list[str], log_extra: Any) -> list[float]:
    log_extra("word", ["only one"])
    return [1.0] * len(completions)


def of_one(completion: str) -> float:
    return float(completion == "b")


def with_tools(completions: list[str], environments: list[Any]) -> list[float]:
    return [0.0] * len(completions)
