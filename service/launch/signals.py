"""Handle Ctrl-C, SIGTERM, Ctrl-Z and a closed terminal in the command `rayloom train`.

Before `StopSignals.hold`, a signal raises KeyboardInterrupt. After `hold`, the first signal only
sets a flag, which makes the run end in order; the second signal raises. After `StopSignals.ignore`,
while the run ends, no signal raises. A closed terminal (SIGHUP) is handled like Ctrl-C, unless the
command ignored SIGHUP from its start, as under nohup. Ctrl-Z stops the display but not the run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit code of a run that a signal stopped: 128 + SIGINT, as in shells.
EXIT_INTERRUPTED = 130
# One byte for each signal; more signals than this do not arrive during a start.
_NOTED_BYTES = 4096


class StopSignals:
    """The handlers of SIGINT, SIGTERM and SIGHUP; Python runs handlers only in the main thread."""

    def __init__(self) -> None:
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._taken = tuple(
            number for number in NUMBERS if not (is_detached and number == signal.SIGHUP)
        )
        self._mode: Literal["raise", "hold", "ignore"] = "raise"
        self._num_seen = 0

    @property
    def is_asked(self) -> bool:
        """Whether a signal to stop has arrived."""
        return self._num_seen > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived.

        The exception that the handler raises is not enough: Python drops it if the handler runs
        within a finaliser or a callback from C, which is frequent during imports of large packages.
        """
        if self.is_asked:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Change the handlers, so that the first signal only sets `is_asked` and does not raise.

        Raises: KeyboardInterrupt if a signal has arrived already.
        """
        self._mode = "hold"
        self.check()

    def ignore(self) -> None:
        """Ignore all signals from now on; call this once the run has ended and only Ray remains."""
        self._mode = "ignore"

    def install(self) -> None:
        """Install the signal handlers.

        Call this again after a library has replaced a handler, as Ray does for SIGTERM.
        """
        for number in self._taken:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: Any) -> None:
        self._num_seen += 1
        is_first = self._num_seen == 1
        if self._mode == "ignore" or (self._mode == "hold" and is_first):
            return
        raise KeyboardInterrupt


@contextmanager
def signals_noted() -> Iterator[set[int]]:
    """Record the signals that arrive within the `with` block, without changing their handlers.

    Yields: a set, to which the signals' numbers are added at the end of the block. In a thread
    other than the main thread it stays empty.
    """
    noted: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield noted
        finally:
            signal.set_wakeup_fd(before)
            with suppress(BlockingIOError):
                noted.update(reading.recv(_NOTED_BYTES))


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block SIGHUP and SIGTSTP in all processes that are started within the `with` block.

    A closed terminal sends SIGHUP, and Ctrl-Z sends SIGTSTP, to all processes of the terminal at
    once. The child processes must not receive the signals: the run needs these processes in order
    to end properly, and it loses its actors if Ray's control store is suspended for a minute. If
    this process gets such a signal meanwhile, it is delivered at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stopped_in_order(*, tell: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-Z stop only this process during the `with` block.

    If SIGTSTP is ignored already, as in a shell without job control, it stays ignored.
    Args: tell: called before the process stops; it reports what continues to run.
    """

    def stop(_number: int, _frame: Any) -> None:
        tell()
        os.kill(os.getpid(), signal.SIGSTOP)

    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handle stop signals during the `with` block, and restore the previous handlers at its end."""
    signals = StopSignals()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signals.install()
    try:
        with _dropped_interrupts_unshown():
            yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _dropped_interrupts_unshown() -> Iterator[None]:
    """Hide the traceback that Python prints when it drops a KeyboardInterrupt."""
    before = sys.unraisablehook

    def show(dropped: Any) -> None:
        # The signal is not lost: `StopSignals` has counted it, and `check` raises later.
        if not isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            before(dropped)

    sys.unraisablehook = show
    try:
        yield
    finally:
        sys.unraisablehook = before
