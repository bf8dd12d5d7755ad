"""What a user's regular expression, with one group, finds in a text of a model.

Called for the score in a judge's reply and the answer in a completion.
"""

from __future__ import annotations

import re


def problem_of(pattern: object) -> str | None:
    """Why it cannot be used; None: it can."""
    if not isinstance(pattern, str):
        return f"got {pattern!r}, expected a text"
    try:
        if re.compile(pattern).groups == 1:
            return None
    except re.error as error:
        return f"{pattern!r} is no regular expression ({error})"
    return f"got {pattern!r}, expected one group, in parentheses"


def last_of(pattern: str, text: str) -> str | None:
    """The group of the last match that has anything in it, stripped; None: there is none."""
    found = None
    for match in re.finditer(pattern, text):
        found = (match[1] or "").strip() or found
    return found
