"""Tests of waiting with a deadline, retries, races and sets of tasks."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from actors.deadline import TaskSet, beside, is_set_within, race, retry, wait_while_moving, within


async def answer(word: str) -> str:
    await asyncio.sleep(0)
    return word


async def test_within_returns_the_result_or_raises_the_error_of_a_timely_call() -> None:
    assert await within(30.0, answer("yes")) == "yes"

    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await within(30.0, fail())


async def test_within_times_out_and_cancels_a_late_call() -> None:
    call = asyncio.create_task(asyncio.sleep(3600))
    with pytest.raises(TimeoutError):
        await within(0.01, call)
    assert call.cancelled()


async def test_a_cancellation_at_the_same_time_as_the_result_is_not_lost() -> None:
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(30.0, answered))
    await asyncio.sleep(0)
    answered.set_result("yes")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_is_set_within_reports_whether_the_event_was_set() -> None:
    event = asyncio.Event()
    assert not await is_set_within(0.01, event)
    assert not await is_set_within(-1.0, event)
    asyncio.get_running_loop().call_soon(event.set)
    assert await is_set_within(30.0, event)
    assert await is_set_within(-1.0, event)


class Failing:
    """A call that fails the first `num_failures` times."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_calls = 0

    async def call(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise KeyError(self.num_calls)
        return self.num_calls


async def test_a_failing_call_is_retried_until_it_succeeds() -> None:
    assert await retry(Failing(2).call, on=KeyError, first_pause_s=0.001) == 3


async def test_retry_raises_the_last_error_after_the_limit() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(KeyError):
        await retry(Failing(99).call, on=(KeyError, OSError), limit_s=0.05, first_pause_s=0.04)
    assert asyncio.get_running_loop().time() - started >= 0.049


async def test_an_error_of_another_kind_is_not_retried() -> None:
    failing = Failing(1)
    with pytest.raises(KeyError):
        await retry(failing.call, on=OSError)
    assert failing.num_calls == 1


async def test_waiting_ends_when_progress_stops_or_all_answers_are_in() -> None:
    answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
    moved = 0

    async def progress() -> dict[int, int]:
        nonlocal moved
        moved = min(moved + 1, 20)
        return {0: moved} if moved % 2 else {1: moved}

    wait = partial(wait_while_moving, answers, progress, idle_s=0.1, look_s=0.01)
    await wait()
    assert moved == 20 and not any(answer.done() for answer in answers)
    answers[0].set_result(None)
    await wait()
    answers[1].set_exception(OSError("broken"))
    moved = 0
    await wait()
    assert moved == 0


async def never(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append(name)


async def fails(name: str) -> None:
    raise KeyError(name)


async def test_a_race_begins_its_block_with_the_first_result_and_then_ends_the_others() -> None:
    ended: list[str] = []
    async with race(never(ended, "slow"), answer("fast")) as (slow, fast):
        assert fast.result() == "fast" and not slow.done() and not ended
    assert ended == ["slow"]

    with pytest.raises(KeyError, match="mine"):
        async with race(never(ended, "slower"), fails("mine")) as (_, failed):
            failed.result()
    assert ended == ["slow", "slower"]


async def test_a_cancelled_race_ends_all_its_tasks() -> None:
    ended: list[str] = []

    async def wait() -> None:
        async with race(never(ended, "a"), never(ended, "b")):
            raise AssertionError("the block began although no task has ended")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(ended) == ["a", "b"]


async def test_work_continues_when_helpers_end_and_ends_when_one_fails() -> None:
    ended: list[str] = []

    async def slow() -> str:
        await asyncio.sleep(0.02)
        return "done"

    assert await beside(slow(), answer("at once"), never(ended, "helper")) == "done"
    assert ended == ["helper"]

    async def fails_later() -> None:
        await asyncio.sleep(0.01)
        await fails("helper")

    with pytest.raises(KeyError, match="helper"):
        await beside(never(ended, "work"), answer("at once"), fails_later())
    assert ended == ["helper", "work"]
    with pytest.raises(KeyError, match="work"):
        await beside(fails("work"), never(ended, "other"))
    assert ended == ["helper", "work", "other"]


async def test_a_task_set_keeps_tasks_until_they_end_or_it_ends_them() -> None:
    tasks, ended = TaskSet(), list[str]()
    answered = tasks.begin(answer("yes"))
    for name in ("a", "b"):
        tasks.begin(never(ended, name))
    assert await answered == "yes"
    await asyncio.sleep(0.01)
    assert len(tasks) == 2 and answered not in list(tasks)
    await tasks.end()
    assert sorted(ended) == ["a", "b"] and not len(tasks)
