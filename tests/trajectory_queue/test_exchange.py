"""Tests of a player's side of the queue, without Ray: playing, results, stops and lost queues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from worlds.builders.trajectory_builders import make_task
from worlds.parts.environment_fakes import FakeQueue

from actors.trajectory_queue.exchange import Play, QueueUnreachable, RolloutExchange
from actors.types import SESSION, Outcome, RolloutAssignment, Trajectory


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"POLL_S": 0.01, "TICK_S": 0.001, "MAX_BLOCK": 8, "QUEUE_DEADLINE_S": 1.0}
    for name, value in short.items():
        monkeypatch.setattr(f"{RolloutExchange.__module__}.{name}", value)


class Handle:
    """A handle of an object in this process, with the interface of a Ray actor."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


class DyingQueue(FakeQueue):
    """A queue that dies at the second request; its successor hands out all rollouts again."""

    def __init__(self, assignments: list[RolloutAssignment]) -> None:
        super().__init__(assignments)
        self.all = list(assignments)
        self.story: list[str] = []

    async def take_rollouts(self, *arguments: Any) -> list[RolloutAssignment]:
        if self.num_asked == 1 and not self.story:
            # Meanwhile the rollouts of the first request begin.
            await asyncio.sleep(0.01)
            self.story.append("died")
            raise ActorUnavailableError("the queue is gone", None)
        return await super().take_rollouts(*arguments)

    async def give_back(self, actor_id: str) -> int:
        if self.story == ["died"]:
            self.story.append("not back yet")
            raise ActorUnavailableError("the queue is gone", None)
        self.story.append(f"{actor_id} gave back")
        self.num_held, self.waiting = 0, list(self.all)
        return len(self.all)


def assignments(count: int) -> list[RolloutAssignment]:
    return [
        RolloutAssignment(
            rollout_id=f"r{number}",
            group_id="g",
            group_number=0,
            attempt=0,
            task=make_task(number),
        )
        for number in range(count)
    ]


def ended(assignment: RolloutAssignment) -> Trajectory:
    return Trajectory.of(assignment, Outcome.COMPLETED, detail="")


def exchange_with(
    queue: object,
    play: Play,
    *,
    num_slots: int = 4,
    is_durable: bool = False,
) -> RolloutExchange:
    return RolloutExchange(
        play,
        actor_id="gateway",
        queue=Handle(queue),
        environments=(SESSION,),
        num_slots=num_slots,
        is_durable=is_durable,
    )


async def until(is_so: Callable[[], bool], running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():
            assert not running.done()
            await asyncio.sleep(0.001)


def outcomes(queue: FakeQueue) -> Counter[Outcome]:
    return Counter(summary.outcome for summary, _ in queue.ended)


async def test_thousands_of_rollouts_wait_at_once_and_each_is_returned_once() -> None:
    queue, asked, waiting = FakeQueue(assignments(5000)), [], []

    async def take_rollouts(*arguments: Any) -> list[RolloutAssignment]:
        asked.append(arguments[3])
        return await FakeQueue.take_rollouts(queue, *arguments)

    async def play(assignment: RolloutAssignment) -> Trajectory:
        if assignment.rollout_id == "r7":
            raise OSError("no store")
        waiting.append(assignment)
        await may_end.wait()
        return ended(assignment)

    may_end = asyncio.Event()
    handle = SimpleNamespace(take_rollouts=take_rollouts, put=queue.put)
    exchange = exchange_with(handle, play, num_slots=3000)
    running = asyncio.create_task(exchange.run())
    await until(lambda: len(waiting) == 3000, running)
    may_end.set()
    await until(lambda: len(queue.ended) == 5000, running)
    with pytest.raises(RuntimeError, match="actor gateway: run was called twice"):
        await exchange.run()
    await exchange.stop()
    await running
    assert set(asked) == {(SESSION,)}
    assert queue.max_held == 3000 and max(queue.block_sizes) == 8
    assert len({summary.rollout_id for summary, _ in queue.ended}) == 5000
    assert outcomes(queue) == {Outcome.COMPLETED: 4999, Outcome.INFRASTRUCTURE_ERROR: 1}
    (failed,) = (s for s, _ in queue.ended if s.outcome is Outcome.INFRASTRUCTURE_ERROR)
    assert (failed.rollout_id, failed.detail) == ("r7", "OSError: no store")


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_stop_returns_cancelled_rollouts_unless_they_are_durable(is_durable: bool) -> None:
    queue, playing = FakeQueue(assignments(3)), []

    async def play(assignment: RolloutAssignment) -> Trajectory:
        playing.append(assignment)
        if assignment.rollout_id == "r0":
            await asyncio.sleep(0.05)
            return ended(assignment)
        await asyncio.sleep(3600)
        raise AssertionError

    exchange = exchange_with(queue, play, is_durable=is_durable)
    running = asyncio.create_task(exchange.run())
    await until(lambda: len(playing) == 3, running)
    await exchange.stop(drain_s=0.2)
    await running
    dropped = {} if is_durable else {Outcome.CANCELLED: 2}
    assert outcomes(queue) == {Outcome.COMPLETED: 1, **dropped}


@pytest.mark.parametrize("is_durable", [False, True])
async def test_after_the_death_of_the_queue_all_rollouts_are_given_back_and_played_again(
    is_durable: bool,
) -> None:
    queue, plays = DyingQueue(assignments(3)), Counter[str]()

    async def play(assignment: RolloutAssignment) -> Trajectory:
        plays[assignment.rollout_id] += 1
        await asyncio.sleep(3600 if plays[assignment.rollout_id] == 1 else 0)
        return ended(assignment)

    exchange = exchange_with(queue, play, is_durable=is_durable)
    running = asyncio.create_task(exchange.run())
    await until(lambda: len(queue.ended) == 3, running)
    await exchange.stop()
    await running
    assert queue.story == ["died", "not back yet", "gateway gave back"]
    assert plays == {"r0": 2, "r1": 2, "r2": 2} and outcomes(queue) == {Outcome.COMPLETED: 3}


async def test_a_queue_that_does_not_answer_ends_the_run_with_an_error() -> None:
    class Silent(FakeQueue):
        async def take_rollouts(self, *arguments: Any) -> list[RolloutAssignment]:
            raise TimeoutError("no answer")

    async def play(assignment: RolloutAssignment) -> Trajectory:
        return ended(assignment)

    with pytest.raises(QueueUnreachable, match="take_rollouts: TimeoutError: no answer"):
        await exchange_with(Silent([]), play).run()


async def test_the_last_trajectory_is_sent_without_waiting_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = FakeQueue(assignments(1))

    async def play(assignment: RolloutAssignment) -> Trajectory:
        await asyncio.sleep(0.01)
        return ended(assignment)

    monkeypatch.setattr(f"{RolloutExchange.__module__}.TICK_S", 60.0)
    exchange = exchange_with(queue, play)
    running = asyncio.create_task(exchange.run())
    await until(lambda: len(queue.ended) == 1, running)
    await exchange.stop()
    await running
