"""Make text of models and environments safe to show: escape every unprintable character.

Such text may contain control characters that move a terminal's cursor, or may be invalid UTF-8. All
code that writes to a terminal or a page uses this module.
"""

from __future__ import annotations

NEWLINE = "⏎"


def visible(piece: bytes) -> str:
    r"""Return text on one line, with a sign for each newline, and other control characters escaped.

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
    """Return a string as `visible` does, with lone surrogates, which cannot be encoded, escaped."""
    return "".join(_shown(character) for character in text)


def visible_lines(text: str) -> str:
    """Return a string of several lines, each escaped as `visible_text` does it, tabs included."""
    return "\n".join(map(visible_text, text.split("\n")))
