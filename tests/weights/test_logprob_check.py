"""Tests of the log-probability check: its text, the trainer's rows, and the comparison."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from actors.types import Dtype
from actors.weights.board import NUM_CHECK_TOKENS, check_tokens
from actors.weights.logprob_check import (
    ALONE,
    CPU_CHECK_TOKENS,
    FAR_TOKENS,
    MAX_SAMPLED,
    PACKED,
    SHORT_TOKENS,
    CheckSample,
    CheckText,
    Comparison,
    LogprobCheck,
    bounds_dtype,
    compare,
    far_end,
    join_prompts,
    packed_row,
    published_text,
    sampled_name,
    sampled_row,
    short,
    start_text,
    text_row,
)

PROMPTS = [np.arange(10, 40, dtype=np.int32), np.arange(50, 75, dtype=np.int32)]
TEXT = CheckText(token_ids=np.arange(100, 108, dtype=np.int32))


def sample(*token_ids: int, temperature: float = 1.0) -> CheckSample:
    tokens = np.array(token_ids, np.int32)
    return CheckSample(
        temperature=temperature, token_ids=tokens, logprobs=np.zeros(tokens.size, np.float32)
    )


def differing(*differences: float, name: str = ALONE, dtype: Dtype = Dtype.FLOAT32) -> LogprobCheck:
    return LogprobCheck(
        num_tokens=4096, dtype=dtype, comparisons=(compared(*differences, name=name),)
    )


def compared(*differences: float, name: str = ALONE) -> Comparison:
    own = np.linspace(-3.0, -1.0, len(differences)).astype(np.float32)
    return compare(name, own, own + np.array(differences, np.float32))


@pytest.mark.parametrize("vocab_size", [5, 300, 151_936])
def test_the_fixed_text_is_within_the_vocabulary_and_always_the_same(vocab_size: int) -> None:
    text = check_tokens(vocab_size)
    assert text.shape == (NUM_CHECK_TOKENS,)
    assert text.min() >= 0 and text.max() < vocab_size
    np.testing.assert_array_equal(text, check_tokens(vocab_size))
    assert len(set(text.tolist())) == min(vocab_size, NUM_CHECK_TOKENS)


def test_a_text_consists_of_pieces_of_the_prompts_without_a_period() -> None:
    text = join_prompts(PROMPTS, num_tokens=2000, vocab_size=100)
    assert text.shape == (2000,) and text.dtype == np.int32
    np.testing.assert_array_equal(text[:30], PROMPTS[0])
    assert set(text.tolist()) == {*range(10, 40), *range(50, 75)}
    follow = np.diff(text)
    # Except at the seams, a token is followed by the same one as in its prompt.
    assert 0.8 < (follow == 1).mean() < 1
    for period in range(1, 200):
        assert not np.array_equal(text[:-period], text[period:])
    np.testing.assert_array_equal(text, join_prompts(PROMPTS, num_tokens=2000, vocab_size=100))


@pytest.mark.parametrize("prompts", [[], [np.array([7, 100], np.int32)], [np.empty(0, np.int32)]])
def test_without_a_usable_prompt_the_tokens_are_drawn_from_the_vocabulary(
    prompts: list[np.ndarray],
) -> None:
    text = join_prompts(prompts, num_tokens=500, vocab_size=100)
    assert text.shape == (500,) and 0 <= text.min() and text.max() < 100
    assert len(set(text.tolist())) > 50


@pytest.mark.parametrize(
    ("context", "limit", "is_on_cpu", "total"),
    [
        (256, None, True, 256),
        (32_768, None, True, CPU_CHECK_TOKENS),
        (32_768, None, False, 32_768),
        (32_768, 6000, True, 6000),
        (2048, 6000, False, 2048),
        (32, None, True, 32),
    ],
)
def test_text_and_continuations_are_as_long_as_context_and_limit_allow(
    context: int, limit: int | None, is_on_cpu: bool, total: int
) -> None:
    text = start_text(
        PROMPTS,
        max_context_tokens=context,
        limit=limit,
        is_on_cpu=is_on_cpu,
        vocab_size=100,
        temperatures=[0.8, 1.0],
    )
    assert text.token_ids.size + text.num_sampled == total
    assert text.temperatures == (1.0, 0.7, 0.8)
    assert 1 <= text.num_sampled and 3 * text.num_sampled <= MAX_SAMPLED
    later = published_text(text, [sample(*range(text.num_sampled))], most=context - 1)
    assert later.token_ids.size == min(total, context - 1) and later.num_sampled == 0


def test_far_end_and_short_text() -> None:
    text = CheckText(token_ids=np.arange(3000, dtype=np.int32))
    far = far_end(text)
    assert text_row(far).targets.tolist() == list(range(3000 - FAR_TOKENS, 3000))
    assert text_row(short(text)).targets.tolist() == list(range(1, SHORT_TOKENS))
    assert far_end(TEXT) is TEXT


def test_the_rows_score_the_text_alone_and_between_others() -> None:
    alone, packed = text_row(TEXT), packed_row(TEXT)
    for row in (alone, packed):
        assert row.targets.tolist() == list(range(101, 108))
        np.testing.assert_array_equal(row.token_ids[row.loss_positions], row.targets - 1)
        assert row.temperatures.tolist() == [1.0] * 7
        assert row.segment_lengths.sum() == row.num_tokens
    assert packed.token_ids.tolist() == [100, 101, *range(100, 108), 102, 103]
    assert packed.position_ids.tolist() == [0, 1, *range(8), 0, 1]
    assert packed.segment_parents.tolist() == [-1, -1, -1]


def test_a_row_scores_each_continuation_after_the_text_at_its_temperature() -> None:
    row = sampled_row(TEXT, [sample(1, 2, 3), sample(4, 5, temperature=0.7)])
    assert row.token_ids.tolist() == [*range(100, 108), 1, 2, 3, 4, 5]
    assert row.position_ids.tolist() == [*range(8), 8, 9, 10, 8, 9]
    assert row.segment_parents.tolist() == [-1, 0, 0]
    assert row.targets.tolist() == [1, 2, 3, 4, 5]
    # The last token of the text predicts the first one of each continuation.
    assert row.loss_positions.tolist() == [7, 8, 9, 7, 11]
    np.testing.assert_allclose(row.temperatures, [1, 1, 1, 0.7, 0.7])


def test_a_comparison_has_the_mean_of_each_quarter() -> None:
    found = compared(*[0.0] * 4, *[0.5] * 4, *[0.25] * 4, *[1.0] * 4)
    assert found.num_scores == 16 and found.largest == 1.0
    assert found.mean == pytest.approx(1.75 / 4)
    assert found.quarters == pytest.approx((0.0, 0.375, 1.0))


def test_a_score_that_is_not_finite_is_beyond_every_bound() -> None:
    for value in (math.nan, math.inf, -math.inf):
        check = differing(*[0.0] * 63, value)
        assert check.is_beyond and math.isfinite(check.statistics["logprob_check_max"])


def test_an_engine_that_scored_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 log-probabilities of an engine, expected 2"):
        compare(ALONE, np.zeros(2, np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("dtype", "differences", "ratio"),
    [
        (Dtype.FLOAT32, [5e-5] * 400, 0.5),
        (Dtype.FLOAT32, [3e-4] * 400, 3.0),
        (Dtype.FLOAT32, [0.0] * 399 + [0.02], 2.0),
        (Dtype.BFLOAT16, [0.05] * 400, 0.5),
        (Dtype.BFLOAT16, [0.0] * 399 + [5.0], 0.5),
        (Dtype.BFLOAT16, [0.15] * 400, 1.5),
        # The mean of all scores is within the bound, but that of the last quarter is not.
        (Dtype.BFLOAT16, [0.0] * 300 + [0.3] * 100, 3.0),
    ],
)
def test_the_bounds_depend_on_the_dtype(
    dtype: Dtype, differences: list[float], ratio: float
) -> None:
    check = differing(*differences, dtype=dtype)
    assert check.ratio == pytest.approx(ratio, rel=0.02)
    assert check.is_beyond == (ratio > 1)


def test_the_coarser_dtype_of_trainer_and_engine_determines_the_bound() -> None:
    assert bounds_dtype(Dtype.FLOAT32, Dtype.FLOAT32) is Dtype.FLOAT32
    assert bounds_dtype(Dtype.FLOAT32, Dtype.BFLOAT16) is Dtype.BFLOAT16


def test_the_fixed_text_has_no_bound() -> None:
    check = LogprobCheck(
        num_tokens=NUM_CHECK_TOKENS, dtype=Dtype.BFLOAT16, comparisons=(compared(*[0.5] * 16),)
    )
    assert not check.is_beyond and "logprob_check_ratio" not in check.statistics
    assert check.statistics["logprob_check_max"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("check", "cause"),
    [
        (differing(*[0.5] * 400), "the engine holds other weights than the trainer"),
        (differing(*[0.0] * 300, *[0.5] * 100), "shorten model.max_context_tokens"),
        (differing(*[0.5] * 400, name=PACKED), "mix the samples of a packed row"),
        (differing(*[0.5] * 64, name=sampled_name(0.7)), "different temperatures"),
    ],
)
def test_a_check_reports_numbers_bounds_and_a_likely_cause(check: LogprobCheck, cause: str) -> None:
    text = str(check)
    assert cause in text and "a text of 4096 tokens" in text
    assert "a mean of at most 0.0001 and a largest of at most 0.01" in text
    assert "largest 0.5" in text and "first quarter" in text
    assert "rounding" not in text
    rounded = replace(check, dtype=Dtype.BFLOAT16)
    assert str(rounded).endswith("float32, where it is below 1e-4 nats")


def test_the_record_of_a_step_combines_the_start_and_its_own_publication() -> None:
    start = differing(*[2e-5] * 64)
    later = LogprobCheck(
        num_tokens=255, dtype=Dtype.FLOAT32, comparisons=(compared(*[1e-5] * 64),), seconds=0.25
    )
    assert later.after(None) is later
    statistics = later.after(start).statistics
    assert statistics["logprob_check_tokens"] == 4096
    assert statistics["logprob_check_seconds"] == 0.25
    assert statistics["logprob_check_max"] == pytest.approx(2e-5, rel=0.05)
