"""Functions that score a number, for docs/reward-functions.md."""

from __future__ import annotations


def score(completion: str, answer: str) -> dict[str, float]:
    """Return 1 for the right number and 0.1 for any number."""
    said = completion.strip()
    return {"right": float(said == answer), "number": 0.1 * said.isdigit()}


def as_trl_has_it(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return the same scores for TRL's trainers, without named parts."""
    said = [completion.strip() for completion in completions]
    return [
        (text == right) + 0.1 * text.isdigit() for text, right in zip(said, answer, strict=True)
    ]


def rarest(completions: list[str], **columns: object) -> list[float]:
    """Score the answers of a group together: a rare answer gets a slightly higher reward."""
    said = [text.strip() for text in completions]
    return [0.1 / said.count(text) for text in said]
