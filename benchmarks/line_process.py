"""Run a child process that answers each line with a line.

A benchmark can thus run code in another Python environment. The child's standard output contains
only answers. A child that waits uses no processor time.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

END_S = 60.0


class LineProcess:
    """The parent's handle of a child process that answers each line with a line.

    The child's first line says that the child is ready.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], remedy: str = ""
    ) -> None:
        """Start the child and wait until it is ready.

        remedy: text that is shown if the child ends instead.

        Raises: SystemExit with the text that the child printed to its standard error.
        """
        self._command = command
        self._remedy = remedy
        self._errors = tempfile.TemporaryFile("w+")  # closed when the process ends
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def ask(self, command: str) -> str:
        """Send one line, and return the answer. Raises: SystemExit if the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            code = self._process.wait(timeout=END_S)
            self._errors.seek(0)
            raise SystemExit(
                f"benchmark: {' '.join(self._command[:3])} ended with code {code}{self._remedy}:\n"
                + self._errors.read()[-2000:]
            )
        return answer
