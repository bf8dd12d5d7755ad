"""Tests of the notices and metrics about calls of a user's functions that gave no answer."""

from __future__ import annotations

from worlds.builders.record_builders import lost_calls

from actors.metrics import Metrics
from service.telemetry.user_calls import MAX_FUNCTIONS, OTHERS, UserCalls

SCORE = "my.py:score"


class Shown:
    """The notices and metrics of a run."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.notices: list[str] = []
        self.calls = UserCalls(self.metrics, self.notices.append)

    def value(self, name: str, **labels: str) -> float | None:
        for families in self.metrics.read():
            for sample in (each for family in families for each in family.samples):
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None

    def lost(self, end: str) -> float | None:
        return self.value("rayloom_user_calls_lost_total", function=SCORE, end=end)


def test_the_first_lost_calls_of_a_function_are_reported_with_their_ends_and_tasks() -> None:
    shown = Shown()
    shown.calls.heard("environment-1-0", (), resident_bytes=0)
    assert shown.notices == [] and shown.lost("killed") is None
    died = lost_calls(SCORE, end="died", tasks=("row-2",), why="its process ended")
    shown.calls.heard("environment-1-0", [lost_calls(SCORE, count=3), died], resident_bytes=0)
    assert shown.notices == [
        "my.py:score: 3 calls were ended at their limit and 1 call was lost with its process (the "
        "first: no answer within 20 s; tasks such as row-1, row-2). Each call fails separately: "
        "a score becomes a reward_error, a tool's answer an error, and an environment's answer an "
        "environment_error"
    ]
    assert (shown.lost("killed"), shown.lost("died")) == (3, 1)


def test_a_function_is_reported_again_at_ten_times_as_many_lost_calls() -> None:
    shown = Shown()
    for count in range(1, 101):
        calls = lost_calls(SCORE, count=count, end="cancelled", tasks=())
        shown.calls.heard("environment-1-0", [calls], resident_bytes=0)
    texts = [text.partition(". ")[0] for text in shown.notices]
    assert texts == [
        "my.py:score: 1 call was ended at its limit (the first: no answer within 20 s)",
        "my.py:score: 10 calls were ended at their limit (the first: no answer within 20 s)",
        "my.py:score: 100 calls were ended at their limit (the first: no answer within 20 s)",
    ]
    shown.calls.heard("environment-1-0", [lost_calls("my.py:other")], resident_bytes=0)
    assert len(shown.notices) == 4 and shown.notices[-1].startswith("my.py:other: 1 call was")


def test_counts_of_actors_are_summed_and_a_successor_begins_at_zero() -> None:
    shown = Shown()
    for actor_id, count in (
        ("environment-1-0", 3),
        ("environment-1-1", 2),
        ("environment-1-0", 4),
        # This actor replaces the first one.
        ("environment-1-2", 1),
        ("environment-1-2", 1),
    ):
        calls = lost_calls(SCORE, count=count)
        shown.calls.heard(actor_id, [calls], resident_bytes=0)
    assert shown.lost("killed") == 4 + 2 + 1
    assert len(shown.notices) == 1


def test_the_memory_of_the_largest_worker_is_shown_while_its_actor_answers() -> None:
    shown, name = Shown(), "rayloom_worker_memory_bytes"
    shown.calls.heard("environment-1-0", (), resident_bytes=0)
    assert shown.value(name) is None
    shown.calls.heard("environment-1-0", (), resident_bytes=300)
    shown.calls.heard("environment-1-1", (), resident_bytes=200)
    assert shown.value(name) == 300
    shown.calls.ended("environment-1-0")
    assert shown.value(name) == 200
    shown.calls.ended("environment-1-1")
    assert shown.value(name) is None


def test_functions_beyond_a_limit_are_counted_together() -> None:
    shown = Shown()
    names = [f"my.py:f{number}" for number in range(MAX_FUNCTIONS + 3)]
    calls = [lost_calls(name, count=2) for name in names]
    shown.calls.heard("environment-1-0", calls, resident_bytes=0)
    shown.calls.heard("environment-1-0", calls, resident_bytes=0)
    name = "rayloom_user_calls_lost_total"
    assert shown.value(name, function=names[0], end="killed") == 2
    assert shown.value(name, function=names[-1], end="killed") is None
    assert shown.value(name, function=OTHERS, end="killed") == 6
    assert len(shown.notices) == MAX_FUNCTIONS + 1
