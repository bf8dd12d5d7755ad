"""Text of models and environments made safe to show: every unprintable character as an escape.

Such text may contain control characters that move a terminal's cursor, or be no UTF-8 at all. Used
by everything that writes to a terminal or a page.
"""

from __future__ import annotations

NEWLINE = "⏎"


def visible(piece: bytes) -> str:
    r"""Text on one line: newlines as a sign, other controls and what is no UTF-8 as escapes.

    Example: visible(b"a\n\xe4\x1b") -> "a⏎\xe4\x1b", the last two as four characters each.
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
    """The same of a text; lone surrogates, which no terminal or file takes, are escaped too."""
    return "".join(_shown(character) for character in text)


def visible_lines(text: str) -> str:
    """The same of a text of several lines, which it stays; a tab is a control character."""
    return "\n".join(map(visible_text, text.split("\n")))
