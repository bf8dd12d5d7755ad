"""Tests of pushed metrics: sums over processes, lost pushes, restarts and ended processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from worlds.servers.prometheus_server import Series, series

from service.telemetry.endpoint import SILENT_S, Push, PushedMetrics, Pusher, Reading

RUN = {"run": "demo"}


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Process:
    """A process with a counter, a histogram and a gauge that pushes to an endpoint."""

    pushed: PushedMetrics
    role: str = "supervisor"
    is_cut_off: bool = False
    loses_answers: bool = False
    gained: CollectorRegistry = field(default_factory=CollectorRegistry)
    values: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.done = Counter("things", "Things.", ["kind"], registry=self.gained)
        self.seconds = Histogram("time_seconds", "Time.", registry=self.gained, buckets=(1, 2))
        self.load = Gauge("load", "Load.", ["replica"], registry=self.values)
        self.load.labels(replica=self.role).set(1)
        self.pusher = Pusher(self.send, role=self.role, read=self.read)

    def read(self) -> Reading:
        return Reading(gained=list(self.gained.collect()), values=list(self.values.collect()))

    async def send(self, push: Push) -> str:
        if self.is_cut_off:
            raise ConnectionError("nobody there")
        self.pushed.push(push)
        if self.loses_answers:
            raise ConnectionError("the answer was lost")
        return "http://here"

    async def push(self, *, is_last: bool = False) -> None:
        await self.pusher.push(is_last=is_last)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pushed(clock: Clock) -> PushedMetrics:
    return PushedMetrics(clock=clock, **RUN)


def shown(pushed: PushedMetrics) -> dict[Series, float]:
    """Return the value of each series and check that none occurs twice."""
    found = [
        (series(sample.name, **sample.labels), sample.value)
        for family in pushed.collect()
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


THINGS = series("things_total", kind="a", **RUN)


async def test_counts_of_several_processes_are_summed(pushed: PushedMetrics) -> None:
    one, other = Process(pushed, role="one"), Process(pushed, role="other")
    for process, count in ((one, 2), (other, 3), (one, 4)):
        process.done.labels(kind="a").inc(count)
        process.seconds.observe(count)
        await process.push()
    found = shown(pushed)
    assert found[THINGS] == 9
    assert found[series("time_seconds_bucket", le="2.0", **RUN)] == 1
    assert found[series("time_seconds_count", **RUN)] == 3
    assert found[series("time_seconds_sum", **RUN)] == 9
    assert found[series("load", replica="one", **RUN)] == 1


async def test_a_counter_is_zero_before_it_counts(pushed: PushedMetrics) -> None:
    process = Process(pushed)
    process.done.labels(kind="a")
    await process.push()
    assert shown(pushed)[THINGS] == 0


async def test_a_push_with_a_lost_answer_counts_once(pushed: PushedMetrics) -> None:
    process = Process(pushed, loses_answers=True)
    process.done.labels(kind="a").inc()
    with pytest.raises(ConnectionError):
        await process.push()
    process.loses_answers = False
    process.done.labels(kind="a").inc()
    await process.push()
    assert shown(pushed)[THINGS] == 2


async def test_the_counts_of_a_lost_push_are_in_the_next_one(pushed: PushedMetrics) -> None:
    process = Process(pushed, is_cut_off=True)
    process.done.labels(kind="a").inc()
    for _ in range(3):
        with pytest.raises(ConnectionError):
            await process.push()
    process.is_cut_off = False
    await process.push()
    assert shown(pushed)[THINGS] == 1


async def test_a_successor_continues_the_counts_and_replaces_the_values(
    pushed: PushedMetrics,
) -> None:
    first = Process(pushed)
    first.done.labels(kind="a").inc(5)
    first.load.labels(replica="left").set(1)
    await first.push()
    second = Process(pushed)
    second.done.labels(kind="a").inc(2)
    await second.push()
    found = shown(pushed)
    assert found[THINGS] == 7
    assert series("load", replica="left", **RUN) not in found
    # The first process was only frozen. It pushes again, but was replaced, so it has no effect.
    first.done.labels(kind="a").inc(100)
    await first.push()
    assert shown(pushed) == found


async def test_an_amendment_for_a_dead_process_is_shown_until_its_successor_pushes(
    pushed: PushedMetrics, clock: Clock
) -> None:
    load = Metric("load", "", "gauge")
    load.add_sample("load", {"replica": "gone"}, 7.0)
    amended = series("load", replica="gone", **RUN)
    pushed.amend("supervisor", [load])
    assert shown(pushed) == {}
    process = Process(pushed)
    process.done.labels(kind="a").inc()
    await process.push()
    before = shown(pushed)
    pushed.amend("supervisor", [load])
    own = series("load", replica="supervisor", **RUN)
    assert shown(pushed) == {**{k: v for k, v in before.items() if k != own}, amended: 7.0}
    clock.now = SILENT_S
    assert amended not in shown(pushed)
    # A push of the same process replaces the amendment, independent of the clocks of the hosts.
    await process.push()
    assert shown(pushed) == before


async def test_values_of_a_silent_process_vanish_and_its_counts_stay(
    pushed: PushedMetrics, clock: Clock
) -> None:
    process = Process(pushed)
    process.done.labels(kind="a").inc()
    await process.push()
    clock.now = SILENT_S - 1
    assert series("load", replica="supervisor", **RUN) in shown(pushed)
    clock.now = SILENT_S
    assert series("load", replica="supervisor", **RUN) not in shown(pushed)
    assert shown(pushed)[THINGS] == 1
    await process.push()
    assert series("load", replica="supervisor", **RUN) in shown(pushed)


async def test_values_of_a_process_that_ended_normally_stay(
    pushed: PushedMetrics, clock: Clock
) -> None:
    process = Process(pushed)
    await process.push(is_last=True)
    clock.now = 100 * SILENT_S
    assert series("load", replica="supervisor", **RUN) in shown(pushed)
