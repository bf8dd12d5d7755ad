"""Finds a stop string, or the one group of a user's regular expression, in a model's text.

Called for the shown part of a reply, the score in a judge's reply and the answer in a completion.
The package `regex` is used because Python's own `re` cannot be stopped: a pattern that never ends
would block the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

from actors.environment.protocol import RewardError

LIMIT_S = 1.0


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop string, and that string.

    If several stop strings begin at the same place, the one that comes first in `stop` is taken. If
    the text has no stop string, return the whole text and "".

    Example: before_stop("a b c", ("c", "b")) -> ("a ", "b")
    """
    places = [(place, each) for each in stop if (place := text.find(each)) >= 0]
    if not places:
        return text, ""
    place, found = min(places, key=lambda each: each[0])
    return text[:place], found


def problem_of(pattern: object) -> str | None:
    """Why it cannot be used; None: it can."""
    if not isinstance(pattern, str):
        return f"got {pattern!r}, expected a text"
    try:
        if regex.compile(pattern).groups == 1:
            return None
    except regex.error as error:
        return f"{pattern!r} is no regular expression ({error})"
    return f"got {pattern!r}, expected one group, in parentheses"


def last_of(pattern: str, text: str, *, what: str) -> str | None:
    """The group of the last match that has anything in it, stripped; None: there is none.

    what: whose pattern it is, for the error. Raises: RewardError, where it is not done in time.
    """
    found = None
    try:
        for match in regex.finditer(pattern, text, timeout=LIMIT_S):
            found = (match[1] or "").strip() or found
    except TimeoutError as error:
        raise RewardError(
            f"{what}: the pattern {pattern!r} was not done within {LIMIT_S:g} s with a text of "
            f"{len(text)} characters; write one without a repetition within a repetition, such as "
            "(a+)+"
        ) from error
    return found
