"""Tests of the handle of a real queue that dies: known results hold, the rest is played again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from worlds.agents.queue_player import Player
from worlds.builders.queue_builders import GAME, through_json
from worlds.builders.settings import queue_settings
from worlds.builders.trajectory_builders import make_task

from actors.deadline import ActorLost
from actors.metrics import Part
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from actors.trajectory_queue.messages import StepInput
from actors.types import Task, TrajectorySummary
from service.run.restartable_queue import RestartableQueue

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("cluster")]
LIMIT_S = 60.0
SETTINGS = queue_settings(groups_per_step=2, max_lag=1, window_groups=2)


@dataclass
class Notebook:
    """A recorder with the methods that the handle calls."""

    seen: list[LedgerEvent] = field(default_factory=list)
    summaries: list[TrajectorySummary] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def events(self, events: Sequence[LedgerEvent]) -> None:
        self.seen += events

    def rollouts(self, summaries: Sequence[TrajectorySummary]) -> None:
        self.summaries += summaries

    def replaced(self, part: Part, text: str) -> None:
        self.parts.append(part)


async def started(notebook: Any) -> tuple[RestartableQueue, int]:
    """Start a queue with two groups per step; return its handle and its process id."""
    queue = RestartableQueue(SETTINGS, None, recorder=notebook)
    await queue.open()
    pid: int = await queue.actor.__ray_call__.remote(lambda _: os.getpid())
    return queue, pid


async def fill(queue: RestartableQueue, *, first_task: int = 0) -> int:
    """Admit all groups that fit, and return their number; group k plays task first_task + k."""
    slots = await queue.admissible(0.0)
    await queue.admit(
        [
            GroupRequest(
                group_number=slot.group_number,
                task=make_task(first_task + slot.group_number),
                num_samples=2,
            )
            for slot in slots
        ]
    )
    return len(slots)


async def play(player: Any, count: int) -> list[bool]:
    await player.take.remote(count, LIMIT_S)
    accepted: list[bool] = await player.hand_in.remote(count, 2)
    return accepted


async def finalise(queue: RestartableQueue, step: StepInput) -> None:
    await queue.finalise(step.step, dict.fromkeys(step.rollout_ids))
    await queue.set_loaded_version(step.step)


def test_the_next_queue_finalises_a_step_that_the_dead_one_took() -> None:
    async def story() -> None:
        notebook = Notebook()
        queue, pid = await started(notebook)
        player = Player.remote(queue.actor, "player")
        assert await fill(queue) == 4
        # Finish four rollouts for step 1; four more are being played when the queue dies.
        assert await play(player, 4) == [True] * 4
        step = await queue.take_step(LIMIT_S)
        assert step is not None and step.step == 1
        await player.take.remote(4, LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        # Make calls of the loop concurrently, in any order.
        await asyncio.gather(finalise(queue, step), queue.cut(), queue.cut(), queue.stats())
        assert notebook.parts == ["queue"]
        assert (await queue.stats()).ledger.trained == 4
        assert await player.hand_in.remote(2, 2) == [False] * 2, "it was given to the dead queue"
        other = Player.remote(queue.actor, "other")
        assert await play(other, 4) == [True] * 4
        assert await fill(queue) == 2
        step = await queue.take_step(LIMIT_S)
        assert step is not None and step.step == 2
        await finalise(queue, step)
        await queue.cancel_all()
        ledger = (await queue.stats()).ledger
        assert (ledger.admitted, ledger.trained, ledger.num_evicted) == (12, 8, 4)
        # The recorder has every event once and in order.
        assert [event.seq for event in notebook.seen] == list(range(24))
        exits = Counter(e.rollout_id for e in notebook.seen if e.kind is not ADMITTED)
        assert len(exits) == 12 and set(exits.values()) == {1}
        queue.kill()

    asyncio.run(story())


ADMITTED = LedgerEventKind.ADMITTED


def test_a_step_whose_payloads_died_with_the_queue_is_played_again() -> None:
    async def story() -> None:
        queue, pid = await started(Notebook())
        player = Player.remote(queue.actor, "player")
        await fill(queue)
        await play(player, 4)
        step = await queue.take_step(LIMIT_S)
        assert step is not None
        os.kill(pid, signal.SIGKILL)
        # Report one lost block, as the merge actor does; all blocks died with the queue.
        await queue.replay_lost(step.rollout_ids[:1])
        assert await queue.take_step(0.0) is None
        assert await play(Player.remote(queue.actor, "other"), 4) == [True] * 4
        again = await queue.take_step(LIMIT_S)
        assert again is not None and again.step == 1
        assert set(again.rollout_ids) == set(step.rollout_ids)
        queue.kill()

    asyncio.run(story())


def test_a_cancelled_call_does_not_delay_later_calls() -> None:
    async def story() -> None:
        queue, _ = await started(Notebook())
        while await fill(queue):
            pass
        num_kept = queue._cuts.num_kept
        waiting = asyncio.create_task(queue.admissible(0.5))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(LIMIT_S):
            await queue.cut()
        # The cancelled call had made a cut too.
        assert queue._cuts.num_kept == num_kept + 2
        queue.kill()

    asyncio.run(story())


def test_the_next_queue_and_a_resumed_run_have_the_tasks_with_their_data() -> None:
    expected = {number: make_task(number) for number in range(4)} | {1: make_task(101)}

    async def played(queue: RestartableQueue) -> dict[int, Task]:
        taken = await queue.actor.take_rollouts.remote("any", 8, LIMIT_S, GAME)
        assert len(taken) == 8
        return {assignment.group_number: assignment.task for assignment in taken}

    async def story() -> None:
        queue, pid = await started(Notebook())
        await fill(queue)
        assert await queue.cancel_group("g000001.0")
        assert await fill(queue, first_task=100) == 1
        os.kill(pid, signal.SIGKILL)
        cut = await queue.cut()
        assert await played(queue) == expected
        assert {group.number: group.task for group in cut.groups} == expected
        # A cut without changes is as complete as the first one.
        await queue.cut()
        assert (await queue.cut()).groups == (await queue.cut()).groups != ()
        queue.kill()
        resumed = RestartableQueue(SETTINGS, through_json(cut), recorder=Notebook())
        await resumed.open()
        assert (await resumed.cut()).groups == cut.groups
        assert await played(resumed) == expected
        resumed.kill()

    asyncio.run(story())


def test_a_killed_queue_is_lost() -> None:
    async def story() -> None:
        queue, _ = await started(Notebook())
        queue.kill()
        with pytest.raises(ActorLost, match="the trajectory queue died"):
            await queue.cut()

    asyncio.run(story())


def test_a_frozen_queue_continues_when_it_wakes() -> None:
    async def story() -> None:
        notebook = Notebook()
        queue, pid = await started(notebook)
        psutil.Process(pid).suspend()
        filling = asyncio.create_task(fill(queue))
        await asyncio.sleep(1)
        assert not filling.done()
        psutil.Process(pid).resume()
        assert await filling == 4
        assert notebook.parts == []
        queue.kill()

    asyncio.run(story())


def test_the_successor_of_a_held_queue_hands_out_nothing_either() -> None:
    async def story() -> None:
        queue, pid = await started(Notebook())
        await queue.hold(True)
        await fill(queue)
        os.kill(pid, signal.SIGKILL)
        await queue.cut()

        async def take() -> int:
            call = queue.actor.take_rollouts.remote("a", 4, 0.1, ["game"])
            return len(await call)

        assert await take() == 0
        await queue.hold(False)
        assert await take() == 4
        queue.kill()

    asyncio.run(story())
