"""What passes between the policy's client and a replica: salts, failures, and who is asked."""

from __future__ import annotations

import pytest

from actors.policy import PolicyDeadlineExceeded, PolicyUnavailable
from service.inference.router import home
from service.inference.wire import GenerateFailure, mark_salt, split_salt


def test_a_salt_carries_the_replica_that_answered_and_gives_it_back() -> None:
    assert split_salt(mark_salt("1:7", "abc")) == ("1:7", "abc")
    assert split_salt(None) == (None, "")
    assert split_salt("1:7") == ("1:7", "")


@pytest.mark.parametrize(
    "error",
    [PolicyUnavailable("gone"), PolicyDeadlineExceeded("late"), ValueError("too long")],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_comes_out_as_the_error_that_it_was(error: ValueError) -> None:
    found = GenerateFailure.of(error).exception()
    assert type(found) is type(error) and str(found) == str(error)


def test_turns_go_to_their_replica_and_without_it_all_to_the_same_survivor() -> None:
    names = ["a", "b", "c", "d"]
    assert [home(name, names) for name in names] == names
    heirs = {gone: home(gone, [n for n in names if n != gone]) for gone in names}
    for gone, heir in heirs.items():
        assert home(gone, [n for n in reversed(names) if n != gone]) == heir != gone
    # Not one survivor for all that are gone.
    assert len({home(f"gone{i}", names) for i in range(64)}) > 1
