"""Lists that only grow, of which the newest items are kept."""

from __future__ import annotations

from service.run.health import Tail


def test_an_asker_gets_what_is_new_as_far_as_it_is_kept() -> None:
    tail = Tail[int](limit=3)
    assert tail.since(0) == () and tail.last is None
    for item in range(5):
        tail.append(item)
    assert (tail.length, tail.last) == (5, 4)
    assert tail.since(5) == ()
    assert tail.since(3) == (3, 4)
    assert tail.since(0) == (2, 3, 4)
    # Of an asker who saw an earlier, longer list: a supervisor that was started again.
    assert tail.since(9) == ()
