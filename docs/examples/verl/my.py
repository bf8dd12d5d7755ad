"""docs/coming-from.md: a grader of verl, and the function that calls it for Rayloom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Return the score, and the accuracy, which is only reported."""
    is_right = float(solution_str.strip() == ground_truth)
    return {"score": is_right + 0.1 * solution_str.strip().isdigit(), "acc": is_right}


def score(
    completion: str,
    data_source: str,
    reward_model: Mapping[str, Any],
    extra_info: Mapping[str, Any],
) -> dict[str, float]:
    """Call the grader with the columns of a row of verl."""
    return compute_score(data_source, completion, reward_model["ground_truth"], extra_info)
