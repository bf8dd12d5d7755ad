"""docs/coming-from.md: a function of a rubric as a reward function."""


async def correct_answer(completion: str, answer: str) -> float:
    """Return 1 if the completion contains the answer."""
    return float(answer in completion)
