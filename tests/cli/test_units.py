"""Tests of the formats of numbers, durations and counts for people."""

from __future__ import annotations

import pytest

from service import units


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, units.UNKNOWN),
        (float("nan"), units.UNKNOWN),
        (0.0, "0 s"),
        (0.25, "0.25 s"),
        (4.24, "4.2 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (252.4, "4 min 12 s"),
        (3780, "1 h 03 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_duration_has_two_units_at_most(seconds: float | None, expected: str) -> None:
    assert units.duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, units.UNKNOWN), (0, "0"), (812, "812"), (999.7, "1k"), (3140, "3.14k"), (1.2e7, "12M")],
)
def test_short_count_has_three_digits(value: float | None, expected: str) -> None:
    assert units.short_count(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, units.UNKNOWN),
        (float("inf"), units.UNKNOWN),
        (0.0, "0"),
        (0.98765, "0.988"),
        (-0.5, "-0.5"),
        (2e-9, "2e-9"),
        (1234.0, "1234"),
        (2.5e7, "2.5e7"),
    ],
)
def test_significant_avoids_exponents_if_possible(value: float | None, expected: str) -> None:
    assert units.significant(value) == expected


def test_no_number_is_longer_than_a_line() -> None:
    assert units.reward(0.3712) == "0.37"
    assert units.reward(-1e300) == "-1e300"
    assert units.fixed(0.012, decimals=4, sign="+") == "+0.0120"
    assert units.fixed(1e300, decimals=4, sign="+") == "+1e300"
    assert units.fixed(float("nan"), decimals=2) == units.UNKNOWN
    assert len(units.short_count(1e300)) < 10


def test_small_shares_are_not_written_as_zero() -> None:
    assert units.percent(0.0002) == "<\u00a00.1\u00a0%"
    assert units.percent(0.0) == "0\u00a0%"
    assert units.percent(1.0) == "100\u00a0%"
    assert units.percent(None) == units.UNKNOWN


def test_clock_has_a_fixed_width() -> None:
    assert units.clock(252.4) == "4:12"
    assert units.clock(3700) == "1:01:40"


def test_plural_adds_an_s_except_for_one() -> None:
    assert units.plural(1, "step") == "1 step"
    assert units.plural(30720, "step") == "30\u202f720 steps"


def test_nonbreaking_spaces_are_shown_and_not_escaped() -> None:
    shown = f"{units.plural(30720, 'step')}, {units.percent(1.0)}"
    assert units.visible_lines(shown) == units.visible_text(shown) == shown
    assert units.visible_text("a\u200bb\x1b") == "a\\u200bb\\x1b"
