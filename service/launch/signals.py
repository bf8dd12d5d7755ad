"""Ctrl-C, SIGTERM, Ctrl-Z and a closed terminal: what the first signal does, and the second one.

While nothing is running that must be ended in order, the first signal raises KeyboardInterrupt.
Once something is (`hold`), it only asks, and the second one raises. While everything is being ended
already (`ignore`), none does. A closed terminal's SIGHUP counts unless it was ignored from the
start, as under nohup. Ctrl-Z stops what is shown, and not the run. Used by `rayloom train`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# 128 + SIGINT, as shells have it; what a run that was stopped by a signal exits with.
EXIT_INTERRUPTED = 130
# A byte for each signal: more of them than anybody sends while something starts.
_NOTED_BYTES = 4096


class _Mode(Enum):
    RAISE = "raise"
    HOLD = "hold"
    IGNORE = "ignore"


class StopSignals:
    """Belongs to the main thread, which alone runs signal handlers."""

    def __init__(self) -> None:
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._taken = tuple(
            number for number in NUMBERS if not (is_detached and number == signal.SIGHUP)
        )
        self._mode = _Mode.RAISE
        self._num_seen = 0

    @property
    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._num_seen > 0

    def check(self) -> None:
        """Raises: KeyboardInterrupt when a signal came, also where its own was swallowed.

        Python drops what a handler raises within a finaliser or a callback from C, of which the
        imports of large packages are full.
        """
        if self.is_asked:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on the first signal only asks. Raises: KeyboardInterrupt when one came."""
        self._mode = _Mode.HOLD
        self.check()

    def ignore(self) -> None:
        """From here on everything is being ended."""
        self._mode = _Mode.IGNORE

    def install(self) -> None:
        """Take the signals; again after something else took them (Ray takes SIGTERM)."""
        for number in self._taken:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: Any) -> None:
        self._num_seen += 1
        is_first = self._num_seen == 1
        if self._mode is _Mode.IGNORE or (self._mode is _Mode.HOLD and is_first):
            return
        raise KeyboardInterrupt


@contextmanager
def signals_noted() -> Iterator[set[int]]:
    """The numbers of the signals that come within, whatever their handlers do; known at the end.

    A thread other than the main one handles none and notes none.
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
    """Children that are started within, and theirs, never get a closed terminal's SIGHUP, nor the
    SIGTSTP of Ctrl-Z.

    A terminal sends them to all its processes at once. An orderly end needs the children, and a
    run whose control store stands still for a minute loses its actors. What comes to this process
    within is delivered at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stopped_in_order(*, tell: Callable[[], None]) -> Iterator[None]:
    """Ctrl-Z stops this process alone, once `tell` has said what goes on without it.

    Where a shell without job control has it ignored, it stays ignored.
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
    """Take the signals, and give them back at the end."""
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
    """Python shows a traceback of what it drops; that a signal came is known without it."""
    before = sys.unraisablehook

    def show(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            before(dropped)

    sys.unraisablehook = show
    try:
        yield
    finally:
        sys.unraisablehook = before
