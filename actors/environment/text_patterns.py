"""Search a model's text for stop strings, or for a user's regular expression with one group.

Callers use it to cut a reply at a stop string, to find the score in a judge's reply, and to find
the answer in a completion. The package `regex` is used because Python's `re` has no time limit: a
search that takes too long would block the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

from actors.environment.protocol import RewardError

LIMIT_S = 1.0


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop string, and that string.

    If several stop strings begin at the same position, the first of `stop` is taken. If the text
    has no stop string, return the whole text and "".

    Example: before_stop("a b c", ("c", "b")) -> ("a ", "b")
    """
    places = [(place, each) for each in stop if (place := text.find(each)) >= 0]
    if not places:
        return text, ""
    place, found = min(places, key=lambda each: each[0])
    return text[:place], found


def problem_of(pattern: object) -> str | None:
    """Return the reason why a pattern cannot be used; None if it can be used."""
    if not isinstance(pattern, str):
        return f"got {pattern!r}, expected a text"
    try:
        if regex.compile(pattern).groups == 1:
            return None
    except regex.error as error:
        return f"{pattern!r} is not a regular expression ({error})"
    return f"got {pattern!r}, expected one group, in parentheses"


def last_of(pattern: str, text: str, *, what: str) -> str | None:
    """Search a text for a pattern with one group; return the group's text in the last match.

    The group's text is stripped. A match whose group has no text is ignored. Return None if no
    match is left.
    Args: what: name of the pattern's owner, for the error.
    Raises: RewardError if the search exceeds LIMIT_S.
    """
    found = None
    try:
        for match in regex.finditer(pattern, text, timeout=LIMIT_S):
            found = (match[1] or "").strip() or found
    except TimeoutError as error:
        raise RewardError(
            f"{what}: the pattern {pattern!r} did not finish within {LIMIT_S:g} s on a text of "
            f"{len(text)} characters; remove a repetition within a repetition, such as (a+)+"
        ) from error
    return found
