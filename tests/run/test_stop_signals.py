"""Tests of stop signals: raised at once, held for an orderly end, ignored, and restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from service.launch.signals import NUMBERS, kept_from_children, signals_noted, stop_signals


@pytest.fixture(autouse=True)
def with_a_terminal() -> Iterator[None]:
    """Restore the default for SIGHUP, because the tests may run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_the_first_signal_raises_before_it_is_held(number: signal.Signals) -> None:
    with stop_signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signals.is_asked


def test_a_held_signal_is_noted_and_the_second_one_raises() -> None:
    with stop_signals() as signals:
        signals.hold()
        assert not signals.is_asked
        signal.raise_signal(signal.SIGINT)
        assert signals.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_swallowed_signal_is_raised_later() -> None:
    with stop_signals() as signals:
        signals.check()
        # Imports of large packages swallow exceptions like this.
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        for tell in (signals.check, signals.hold):
            with pytest.raises(KeyboardInterrupt):
                tell()


def test_a_signal_that_python_drops_is_raised_later_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: shown.append(dropped.exc_type))

    class Finalised:
        def __init__(self, ends: Callable[[], object]) -> None:
            self.ends = ends

        def __del__(self) -> None:
            self.ends()

    with stop_signals() as signals:
        Finalised(lambda: signal.raise_signal(signal.SIGTERM))
        Finalised(lambda: sys.exit(15))
        Finalised(lambda: 1 / 0)
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    Finalised(lambda: sys.exit(15))
    assert shown == [ZeroDivisionError, SystemExit]


def test_a_signal_is_noted_whatever_another_handler_does() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with signals_noted() as noted:
            signal.raise_signal(signal.SIGTERM)
        with signals_noted() as after:
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (noted, after) == ({signal.SIGTERM}, set())


def test_signals_during_the_end_are_ignored() -> None:
    with stop_signals() as signals:
        signals.hold()
        signals.ignore()
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert signals.is_asked


def test_handlers_of_other_packages_are_replaced_and_restored_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_is_ignored_if_it_was_ignored_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.is_asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_the_terminal_are_kept_from_children() -> None:
    show = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with stop_signals() as signals:
        signals.hold()
        with kept_from_children():
            shows = [show, show.replace("SIGHUP", "SIGTSTP")]
            told = [
                subprocess.run([sys.executable, "-c", each], capture_output=True, text=True).stdout
                for each in shows
            ]
            signal.raise_signal(signal.SIGHUP)
            assert not signals.is_asked
        assert signals.is_asked
    assert told == ["True\n", "True\n"]


STOPPING = """
import sys
from service.launch.signals import stopped_in_order
with stopped_in_order(tell=lambda: print("told", flush=True)):
    print("ready", flush=True)
    sys.stdin.readline()
print("went on", flush=True)
"""


def test_ctrl_z_stops_the_process_after_its_message() -> None:
    command = [sys.executable, "-c", STOPPING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTSTP)
        assert process.stdout.readline() == "told\n"
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "went on\n"
