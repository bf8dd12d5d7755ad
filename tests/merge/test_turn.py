"""Tests of the types and shapes of a turn's columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds.builders.trajectory_builders import make_turn

TURN = make_turn([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("prompt_token_ids", np.array([1, 2], np.int64), "prompt_token_ids of type int64"),
        ("sampled_token_ids", np.array([[3, 4]], np.int32), r"shape \(1, 2\), expected one row"),
        ("logprobs", np.array([-1, -2], np.float64), "logprobs of type float64"),
        ("token_rewards", np.array([0, 1], np.int32), "token_rewards of type int32"),
        ("expert_indices", np.zeros((2, 1, 2), np.int64), "expert_indices of type int64"),
        ("expert_indices", np.zeros((2, 2), np.uint8), r"expected \[tokens, layers, experts\]"),
    ],
)
def test_a_column_of_another_type_is_refused(
    column: str, values: np.ndarray[Any, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        replace(TURN, **{column: values})
    assert "convert" in str(refusal.value)
