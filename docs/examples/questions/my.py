"""docs/coming-from.md: what a rubric's function becomes."""


async def correct_answer(completion: str, answer: str) -> float:
    """1 where the answer is in it."""
    return float(answer in completion)
