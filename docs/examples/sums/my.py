"""docs/tools.md: a tool, a class of tools, and what the answers are scored by."""

from __future__ import annotations

from typing import Any


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return sum(int(number) for number in expression.split("+"))


def score(completion: str, answer: str, messages: list[dict[str, Any]]) -> dict[str, float]:
    """1 for the right number, and a little for a call that worked."""
    answers = [each["content"] for each in messages if each["role"] == "tool"]
    worked = [each for each in answers if not each.startswith("error")]
    return {"right": float(completion.strip() == answer), "called": 0.2 * bool(worked)}


class Notebook:
    """One for each episode; its public methods are tools."""

    def reset(self, answer: str, **columns: Any) -> str:
        """Begin an episode, with the row's columns; what it gives is added to the prompt."""
        self.answer, self.sums = answer, 0
        return " Use the calculator."

    def calculator(self, expression: str) -> int:
        """Evaluate an arithmetic expression."""
        self.sums += 1
        return calculator(expression)


def from_notebook(environments: list[Notebook], completions: list[Any]) -> list[float]:
    """As TRL calls it: lists, one entry long."""
    return [
        float(str(text).strip() == notebook.answer) + 0.2 * min(1, notebook.sums)
        for notebook, text in zip(environments, completions, strict=True)
    ]
