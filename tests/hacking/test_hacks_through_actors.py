"""Tests that a planted hack is found after it passed the actors: queue, exchange and merge."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from worlds.faults.planted_hacks import planted_hacks
from worlds.parts.hacking_world import Course, ScriptedRun, Size

from actors.merge.actor import MergeActor
from actors.merge.journal import Journal
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.exchange import RolloutExchange
from actors.types import RolloutAssignment, Trajectory
from service.hacking.patterns import find_all
from service.hacking.read import read_features
from service.inspect.reader import open_journal

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("cluster")]

SIZE = Size(num_steps=24, groups_per_step=4, group_size=4)
ONSET = 16


async def play_through_actors(run: ScriptedRun, directory: Path) -> None:
    """Play a scripted run as `ScriptedRun.steps` does, but through Ray actors."""
    queue = start_queue(run.queue_settings)
    await queue.open.remote(0, None)
    journal = Journal(
        directory=directory,
        term=1,
        keep_steps=200,
        keep_bytes=1 << 30,
        max_policy_age=10_000,
        group_rule=None,
    )
    merge = ray.remote(MergeActor).options(num_cpus=0).remote(run.merge_settings, journal)
    step = 1

    async def play(assignment: RolloutAssignment) -> Trajectory:
        # max_lag is 0, so all rollouts belong to the current step.
        return await run.play(assignment, step)

    exchange = RolloutExchange(
        play,
        actor_id="player",
        queue=queue,
        environments=("guessing",),
        num_slots=64,
    )
    running = asyncio.create_task(exchange.run())
    for step in range(1, run.size.num_steps + 1):
        taken = None
        while taken is None:
            slots, _ = await queue.admissible.remote(0.0)
            if slots:
                await queue.admit.remote(run.requests(slots))
            taken, _ = await queue.take_step.remote(0.05)
        built = await merge.build.remote(taken, step - 1)
        await queue.finalise.remote(step, built.outcomes)
        await queue.set_loaded_version.remote(step)
    await exchange.stop()
    await running


async def test_a_hack_is_found_in_the_journal_of_the_merge_actor(tmp_path: Path) -> None:
    hacks = planted_hacks(tmp_path)
    (planted,) = (each for each in hacks if each.name == "malformed that scores")
    course = Course.of(1, num_steps=SIZE.num_steps, has_hack=True)
    course = replace(course, onset=ONSET, ramp=2)
    run = ScriptedRun(planted, course, seed=1, size=SIZE)
    (tmp_path / "run").mkdir()
    async with asyncio.timeout(300):
        await play_through_actors(run, tmp_path / "run" / "journal")
    found = find_all(list(read_features(open_journal(tmp_path / "run"))))
    own = [each for each in found if each.kind in planted.kinds]
    assert own and all(each.step >= ONSET for each in found)
    assert own[0].onset in (ONSET, ONSET + 1)
