"""Test of growing lists of which only the newest items are kept."""

from __future__ import annotations

from service.run.health import Tail


def test_since_returns_the_new_items_that_are_still_kept() -> None:
    tail = Tail[int](limit=3)
    assert tail.since(0) == () and tail.last is None
    for item in range(5):
        tail.append(item)
    assert (tail.length, tail.last) == (5, 4)
    assert tail.since(5) == ()
    assert tail.since(3) == (3, 4)
    assert tail.since(0) == (2, 3, 4)
    # The caller has seen a longer list, from before the supervisor was restarted.
    assert tail.since(9) == ()
