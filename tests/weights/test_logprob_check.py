"""The fixed text of the log-probability check, and the comparison."""

from __future__ import annotations

import numpy as np
import pytest

from actors.weights.board import NUM_CHECK_TOKENS, check_tokens, largest_difference


@pytest.mark.parametrize("vocab_size", [5, 300, 151_936])
def test_the_text_is_within_the_vocabulary_and_always_the_same(vocab_size: int) -> None:
    text = check_tokens(vocab_size)
    assert text.shape == (NUM_CHECK_TOKENS,)
    assert text.min() >= 0 and text.max() < vocab_size
    np.testing.assert_array_equal(text, check_tokens(vocab_size))
    assert len(set(text.tolist())) == min(vocab_size, NUM_CHECK_TOKENS)


def test_the_engine_that_is_farthest_off_decides() -> None:
    own = np.array([-1.0, -2.0], np.float32)
    near, far = np.array([-1.0, -2.25], np.float32), np.array([-1.5, -2.0], np.float32)
    assert largest_difference(own, [near, far]) == 0.5
    assert largest_difference(own, [own]) == 0.0


def test_without_an_answer_nothing_is_known() -> None:
    assert largest_difference(np.zeros(2, np.float32), []) is None


def test_an_engine_that_scored_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 log-probabilities of an engine, expected 2"):
        largest_difference(np.zeros(2, np.float32), [np.zeros(3, np.float32)])
