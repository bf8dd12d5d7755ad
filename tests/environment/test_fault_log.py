"""Tracebacks of a user's environment: once for each place, never a flood."""

from __future__ import annotations

import logging

import pytest

from actors.environment.fault_log import FaultLog, origin, place


def fail(*, kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind("boom")
    except kind as error:
        return error


def fail_elsewhere() -> Exception:
    try:
        raise ValueError("boom")
    except ValueError as error:
        return error


def wrapped(error: Exception) -> Exception:
    try:
        raise RuntimeError("around it") from error
    except RuntimeError as outer:
        return outer


def test_each_place_is_told_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(logging.getLogger("faults"))
    with caplog.at_level(logging.WARNING, logger="faults"):
        for _ in range(3):
            log.tell("reset: boom", fail())
            log.tell("reset: boom", wrapped(fail()))
        log.tell("step: boom", fail_elsewhere())
        log.tell("step: boom", fail(kind=KeyError))
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "reset: boom", "step: boom", "step: boom",
    ]  # fmt: skip
    assert caplog.text.count("in fail_elsewhere") == 1 and "around it" not in caplog.text


def test_the_number_of_places_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(logging.getLogger("faults"))
    for number in range(200):
        log.tell("step", fail(kind=type(f"Error{number}", (Exception,), {})))
    assert len(caplog.records) == 100


def test_the_place_is_file_line_and_function() -> None:
    assert place(fail()).endswith("in fail") and "test_fault_log.py:" in place(fail())
    assert place(ValueError("never raised")) == ""
    assert str(origin(wrapped(fail()))) == "boom"
