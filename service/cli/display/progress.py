"""What a user sees during a run: a live display on a terminal, plain lines everywhere else.

The command line opens a display, gives it every RunStatus, and closes it. Neither display reads a
clock of its own but the one it is given, and neither asks anything of the run. One whose terminal
or pipe is gone shows nothing from then on, and raises nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live

from service.cli.display.outlet import OutletConsole, outlet
from service.cli.display.progress_state import Line, ProgressState
from service.cli.display.progress_view import picture
from service.cli.display.step_line import step_line
from service.run.health import RunStatus

__all__ = ["Display", "LineDisplay", "LiveDisplay", "open_display", "step_line"]

MAX_LINES = 8
ROWS_BESIDE_LINES = 15

Clock = Callable[[], float]


class Display(Protocol):
    """How a run is shown."""

    def update(self, status: RunStatus) -> None:
        """Show the next status; statuses come in order."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, the last picture standing."""
        ...


def open_display(*, environ: Mapping[str, str], console: Console | None = None) -> Display:
    """Live where a person looks at a terminal that can show it; lines in a pipe, in CI, or with
    NO_COLOR set."""
    shown_on = console or OutletConsole()
    is_plain = bool(environ.get("NO_COLOR") or environ.get("CI")) or not shown_on.is_terminal
    # Escapes in place of its bars would not keep their places.
    if is_plain or shown_on.is_dumb_terminal or shown_on.options.ascii_only:
        return LineDisplay(shown_on)
    return LiveDisplay(shown_on)


class LineDisplay:
    """One line a step, a phase, an evaluation, a notice; no escape codes, no wrapping."""

    def __init__(self, console: Console, *, clock: Clock = time.time) -> None:
        self._console = console
        self._clock = clock
        self._state = ProgressState()

    def update(self, status: RunStatus) -> None:
        lines = self._state.absorb(status, now=self._clock())
        with outlet(self._console.file):
            for line in lines:
                text = f"warning: {line.text}" if line.is_notice else line.text
                self._console.out(text, highlight=False)
                self._console.file.flush()

    def close(self) -> None:
        with outlet(self._console.file):
            self._console.file.flush()


class LiveDisplay:
    """A picture that is redrawn with every status; notices also stay above it."""

    def __init__(self, console: Console, *, clock: Clock = time.time) -> None:
        self._console = console
        self._clock = clock
        self._state = ProgressState()
        self._lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._has_started = False
        with outlet(console.file):
            self._live.start()
            self._has_started = True

    def update(self, status: RunStatus) -> None:
        lines = self._state.absorb(status, now=self._clock())
        with outlet(self._console.file):
            self._show(lines)

    def _show(self, lines: list[Line]) -> None:
        for line in lines:
            if line.is_notice:
                self._console.print(f"! {line.text}", style="yellow", markup=False, highlight=False)
            else:
                self._lines.append(line)
        width, height = self._console.size
        frame = picture(
            self._state,
            lines=self._lines,
            width=width,
            num_lines=min(MAX_LINES, height - ROWS_BESIDE_LINES),
        )
        self._live.update(frame, refresh=True)

    def close(self) -> None:
        if self._has_started:
            with outlet(self._console.file):
                self._live.stop()
