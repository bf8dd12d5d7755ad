"""The tasks of both sides of `end_to_end`: rewards and a class of tools in TRL's form."""

from __future__ import annotations

import re
from typing import Any


def _said(completion: list[dict[str, Any]]) -> str:
    return str(completion[-1].get("content") or "").strip()


def after(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for the right number, plus a tenth for any number."""
    said = [_said(completion) for completion in completions]
    return [
        (text == right) + 0.1 * text.isdigit() for text, right in zip(said, answer, strict=True)
    ]


def count(completions: list[Any], upto: list[int], **columns: Any) -> list[float]:
    """Return the share of the numbers, counted from 1, that are at their position."""
    shares = []
    for completion, last in zip(completions, upto, strict=True):
        words = _said(completion).split()
        right = sum(word == str(place) for place, word in enumerate(words[:last], start=1))
        shares.append(right / max(last, len(words)))
    return shares


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 if the last number of the answer is the sum."""
    numbers = [re.findall(r"\d+", _said(completion)) for completion in completions]
    return [float(found[-1:] == [sum_]) for found, sum_ in zip(numbers, answer, strict=True)]


class Game:
    """A game of finding a number, with an object for each episode.

    The tools are its public methods except `reset`.
    """

    def reset(self, secret: int, **columns: Any) -> None:
        """Begin an episode."""
        self.secret, self.found = secret, False

    # Without a return type: transformers would show it to the policy, Rayloom would not.
    def guess(self, number: int):  # type: ignore[no-untyped-def]
        """Guess the number.

        Args:
            number: a guess
        """
        self.found = self.found or number == self.secret
        if self.found:
            return "correct"
        return "higher" if number < self.secret else "lower"


def found(environments: list[Game], **columns: Any) -> list[float]:
    """Return 1 if the number was found."""
    return [float(game.found) for game in environments]
