"""Where a stranger's error was raised, and its traceback once for each place that raises it.

A user's environment fails a thousand times a minute when it fails; every trajectory carries the
error's one line, and this keeps the traceback in the process's log without flooding it. Called by
the turn loop, and for the place alone by the configuration's checks.
"""

from __future__ import annotations

import logging
import traceback

_MAX_PLACES = 100


def origin(error: BaseException) -> BaseException:
    """The error at the root of a chain of explicit causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def place(error: BaseException) -> str:
    """Where an error was raised: `/path/game.py:12 in reset`; empty where nothing is known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


class FaultLog:
    """Tells each fault once, by its kind and place; at most _MAX_PLACES of them."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told: set[tuple[str, str]] = set()

    def tell(self, summary: str, error: BaseException) -> None:
        """Log summary and the whole traceback, unless this place has been told already."""
        root = origin(error)
        key = (type(root).__name__, place(root))
        if key in self._told or len(self._told) >= _MAX_PLACES:
            return
        self._told.add(key)
        self._logger.warning("%s; further ones from there are only counted", summary, exc_info=root)
