"""Format durations, counts and other numbers for people, and make foreign text safe to show. Pure.

An unknown value is shown as an en dash, never as zero. Text of models and environments may be
invalid UTF-8, or contain control characters that move a terminal's cursor. All code that writes
such text to a terminal or a page escapes the text with `visible_text` or `visible_lines`.
"""

from __future__ import annotations

import math

UNKNOWN = "–"  # noqa: RUF001
_NO_BREAK_SPACES = "\u00a0\u202f"


def duration(seconds: float | None) -> str:
    """Return seconds as text. Example: 252.4 -> '4 min 12 s'; 0.25 -> '0.25 s'; None -> '–'."""  # noqa: RUF002
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:
        return f"{significant(max(seconds, 0.0), digits=2)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def clock(seconds: float) -> str:
    """Return seconds as text with colons, rounded down to whole seconds.

    Example: 252.4 -> '4:12'; 3700 -> '1:01:40'.
    """
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_count(value: float | None) -> str:
    """Return a count with three digits. Example: 3140 -> '3.14k'; 812 -> '812'; 1.2e7 -> '12M'."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{significant(value / limit, digits=3)}{letter}"
    return f"{value:.0f}" if float(value).is_integer() else significant(value, digits=3)


def full_count(value: int) -> str:
    """Return a count with narrow no-break spaces between thousands. Example: 30720 -> '30 720'."""
    return f"{value:,}".replace(",", "\u202f")


def gibibytes(num_bytes: int | None) -> str:
    """Return bytes as text in GiB. Example: 6_657_199_309 -> '6.2 GiB'; None -> '–'."""  # noqa: RUF002
    return UNKNOWN if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def significant(value: float | None, *, digits: int = 3) -> str:
    """Return a number as text, its decimals rounded to `digits` significant digits.

    A number with absolute value below 1e-4, or 1e6 or more, has an exponent and at most two digits.
    Example: 0.98765 -> '0.988'; 123456.7 -> '123457'; 2e-9 -> '2e-9'.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{min(digits, 2) - 1}e}".split("e")
        mantissa = mantissa.removesuffix(".0")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def reward(value: float | None) -> str:
    """Return a reward as text with two decimals. Example: 0.3712 -> '0.37'; 1e300 -> '1e300'."""
    return fixed(value, decimals=2)


def fixed(value: float | None, *, decimals: int, sign: str = "") -> str:
    """Return a number as text with `decimals` decimals, or with an exponent from a million on.

    sign: '+' to begin numbers that are not negative with a plus sign. Example: 0.5 with two
    decimals -> '0.50'
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 1e6:
        return f"{value:{sign}.{decimals}f}"
    return f"{sign if value > 0 else ''}{significant(value)}"


def percent(share: float | None) -> str:
    """Return a share, 0 to 1, in percent. Example: 0.0234 -> '2.3 %'; 0.0002 -> '< 0.1 %'."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    if 0 < share < 0.001:
        return "<\u00a00.1\u00a0%"
    return f"{significant(100 * share, digits=2 if share < 0.995 else 3)}\u00a0%"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun. Example: (1, 'step') -> '1 step'; (2, 'step') -> '2 steps'."""
    return f"{full_count(count)} {noun}" if count == 1 else f"{full_count(count)} {noun}s"


NEWLINE = "⏎"


def visible(piece: bytes) -> str:
    r"""Return bytes as text on one line, in which every character can be seen.

    A newline becomes ⏎. Unprintable characters, and bytes that are not UTF-8, become escape
    sequences. Example: the bytes of 'a', a newline and the escape key (27) -> a⏎\x1b
    """
    text = piece.decode("utf-8", "backslashreplace")
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character == "\n":
        return NEWLINE
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def visible_text(text: str) -> str:
    """Return text on one line, with newlines and control characters shown as in `visible`.

    Lone surrogates, which cannot be encoded, are escaped too. The no-break spaces that this module
    writes into numbers stay.
    """
    return "".join(each if each in _NO_BREAK_SPACES else _shown(each) for each in text)


def visible_lines(text: str) -> str:
    """Return text of several lines, each with control characters escaped as in `visible_text`.

    Tabs are escaped too.
    """
    return "\n".join(map(visible_text, text.split("\n")))
