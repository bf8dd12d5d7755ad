"""Handle Ctrl-C, SIGTERM, Ctrl-Z and a closed terminal, for the first and the second signal.

Before `hold`, the first signal raises KeyboardInterrupt, because no part needs an orderly end yet.
After `hold`, the first signal only sets a flag, and the second one raises. After `ignore`, during
the end, no signal raises. SIGHUP of a closed terminal is handled unless it was ignored at the
start, as under nohup. Ctrl-Z stops the display but not the run. `rayloom train` uses this module.
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
    """The handlers of stop signals, which Python runs only in the main thread."""

    def __init__(self) -> None:
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._taken = tuple(
            number for number in NUMBERS if not (is_detached and number == signal.SIGHUP)
        )
        self._mode: Literal["raise", "hold", "ignore"] = "raise"
        self._num_seen = 0

    @property
    def is_asked(self) -> bool:
        """Whether a signal has arrived."""
        return self._num_seen > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived, even if Python dropped its exception.

        Python drops the exceptions of a handler that runs within a finaliser or a callback from C,
        which is frequent during imports of large packages.
        """
        if self.is_asked:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Let the first signal only set a flag from now on.

        Raises: KeyboardInterrupt if a signal has arrived already.
        """
        self._mode = "hold"
        self.check()

    def ignore(self) -> None:
        """Ignore all signals from now on, while the run's parts are ended."""
        self._mode = "ignore"

    def install(self) -> None:
        """Install the handlers; call it again after a library has replaced them, as Ray does for
        SIGTERM.
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
    """Yield a set that receives the numbers of the signals that arrive within the block.

    The handlers of the signals are not changed. The set is filled at the end of the block; in a
    thread other than the main one it stays empty.
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
    """Keep SIGHUP and SIGTSTP from all processes that are started within the block.

    A closed terminal sends SIGHUP, and Ctrl-Z sends SIGTSTP, to all processes of the terminal at
    once. The children must not receive them: the run needs them to end in order, and it loses its
    actors if Ray's control store is suspended for a minute. Signals to this process are delivered
    at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stopped_in_order(*, tell: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-Z stop only this process, after a call of `tell`, which reports what still runs.

    If SIGTSTP is ignored already, as in a shell without job control, it stays ignored.
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
    """Install the handlers of stop signals, and restore the previous ones at the end."""
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
    """Hide the tracebacks of interrupts that Python dropped, because `StopSignals` has recorded
    the signal.
    """
    before = sys.unraisablehook

    def show(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            before(dropped)

    sys.unraisablehook = show
    try:
        yield
    finally:
        sys.unraisablehook = before
