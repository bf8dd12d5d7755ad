"""Tests of logging errors of user code: one traceback for each location, up to a bound."""

from __future__ import annotations

import logging

import pytest

from actors.deadline import within
from actors.user_code import FaultLog, in_thread, location, root_cause


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


def test_each_location_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(logging.getLogger("faults"))
    with caplog.at_level(logging.WARNING, logger="faults"):
        for _ in range(3):
            log.log("reset: boom", fail())
            log.log("reset: boom", wrapped(fail()))
        log.log("step: boom", fail_elsewhere())
        log.log("step: boom", fail(kind=KeyError))
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "reset: boom", "step: boom", "step: boom",
    ]  # fmt: skip
    assert caplog.text.count("in fail_elsewhere") == 1 and "around it" not in caplog.text


def test_the_number_of_locations_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(logging.getLogger("faults"))
    for number in range(200):
        log.log("step", fail(kind=type(f"Error{number}", (Exception,), {})))
    assert len(caplog.records) == 100


def test_the_location_is_file_line_and_function() -> None:
    assert location(fail()).endswith("in fail") and "test_user_code.py:" in location(fail())
    assert location(ValueError("never raised")) == ""
    assert str(root_cause(wrapped(fail()))) == "boom"


async def test_a_stop_iteration_in_a_thread_reaches_the_caller() -> None:
    def first_of_none() -> int:
        return next(iter(()))

    with pytest.raises(Exception, match="StopIteration") as raised:
        await within(20, in_thread(first_of_none))
    assert isinstance(root_cause(raised.value), StopIteration)
