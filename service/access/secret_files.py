"""A secret in a file that may be replaced while the process runs, for example by Kubernetes.

Invariants: `SecretFile.value()` never raises. If the file is missing, empty or invalid, the last
valid value stays in use. No message contains the file's text. Every failure is counted, and the
first of several in a row is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger("rayloom.secrets")

# Least time between two readings of a file, in seconds.
FRESH_S = 2.0
# Largest size of a file; larger than any key or URL.
MAX_BYTES = 64 << 10

Value = TypeVar("Value")


class SecretFile(Generic[Value]):
    """A file and the newest valid value that was read from it. Threads may share it."""

    def __init__(
        self,
        file: Path,
        parse: Callable[[str], Value],
        *,
        value: Value,
        count_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Start with the given value; the first call of the method `value` reads the file.

        Args: parse: converts the file's text, without the spaces around it, into a value. It
        raises ValueError if the text is invalid; its message must not contain the text.
        count_failure: called each time that the file cannot be read or is invalid.
        """
        self._file, self._parse = file, parse
        self._value, self._count_failure = value, count_failure
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._is_failing = False

    def value(self) -> Value:
        """Return the newest valid value. Read the file first if the last read is FRESH_S old."""
        with self._lock:
            now = time.monotonic()
            if self._read_at is None or now - self._read_at >= FRESH_S:
                self._read_at = now
                self._read()
            return self._value

    def _read(self) -> None:
        try:
            value = self._parse(read_secret(self._file))
        except (OSError, ValueError) as error:
            self._count_failure()
            if not self._is_failing:
                reason = error.strerror if isinstance(error, OSError) else error
                log.error("%s: %s; the last value stays in use", self._file, reason)
            self._is_failing = True
            return
        if value != self._value:
            log.warning("%s has changed, its new value is in use", self._file)
        elif self._is_failing:
            log.warning("%s can be read again", self._file)
        self._value, self._is_failing = value, False


def read_secret(file: Path) -> str:
    """Return a file's text without the spaces and line ends around it.

    Raises: OSError; ValueError if the file is empty, larger than MAX_BYTES or not text in UTF-8.
    """
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"got more than {MAX_BYTES} bytes, expected one key or URL")
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        # The error's own text would show a part of the secret.
        raise ValueError("got bytes that are not UTF-8, expected text") from None
    if not text:
        raise ValueError("got an empty file, expected a key or URL")
    return text
