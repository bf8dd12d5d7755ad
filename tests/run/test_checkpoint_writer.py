"""Tests of when a loop writes and commits its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from worlds.parts.loop_world import World, make_loop

from actors.deadline import ActorLost, within
from actors.trainer.checkpoint import CheckpointError
from service.run.loop import Loop
from service.store.lineage import Checkpoint


async def test_a_checkpoint_is_committed_after_its_files_and_its_step_are_written() -> None:
    world = World()
    await make_loop(world).run()
    assert world.checkpoints == [(2, "dir-2"), (3, "dir-3")]
    at = world.calls.index("save 2")
    own = [call for call in world.calls[at:] if call.split()[-1] in ("2", "cut", "prune")]
    assert own[:6] == ["save 2", "record 2", "cut", "commit 2", "committed 2", "prune"]


async def test_training_continues_while_a_checkpoint_is_written_and_the_next_one_waits() -> None:
    is_trained = asyncio.Event()
    world = World()

    async def wait(step: int) -> None:
        if step == 2:
            await is_trained.wait()

    def note(version: int) -> None:
        if version == 4:
            is_trained.set()

    world.checkpoint_is_written, world.on_publish = wait, note
    await make_loop(world, steps=4).run()
    calls = world.calls_of("train", "save", "cut", "commit 2", "commit 4")
    assert calls == [
        "train 1", "train 2", "save 2", "cut", "train 3", "train 4", "commit 2", "save 4", "cut",
        "commit 4", "cut", "commit 4",
    ]  # fmt: skip


async def test_a_checkpoint_whose_ranks_are_lost_is_not_committed(
) -> None:  # fmt: skip
    world = World(lose_save_at=2)
    await make_loop(world, steps=4).run()
    assert {step for step, _ in world.checkpoints} == {4}
    world = World(lose_save_at=3)
    await make_loop(world, steps=3).run()
    assert world.checkpoints == [(2, "dir-2"), (3, "dir-3")]
    assert world.calls_of("save") == ["save 2", "save 3", "save 3"]
    assert world.calls_of("written", "checkpoint failed") == [
        "written dir-2", "checkpoint failed", "written dir-3"
    ]  # fmt: skip


async def test_a_checkpoint_that_cannot_be_written_ends_the_run() -> None:
    async def fail(step: int) -> None:
        raise CheckpointError("the disk is full")

    world = World(checkpoint_is_written=fail)
    with pytest.raises(CheckpointError, match="disk is full"):
        await make_loop(world, steps=100).run()
    assert world.checkpoints == []
    assert world.calls_of("checkpoint failed") == ["checkpoint failed"]


def evict_and_stop(
    world: World, loop: Loop, *, num_evicted: int, num_commits: int
) -> Callable[[], None]:
    """Return a poll that evicts rollouts after each commit, and stops after enough commits.

    It also stops after 200 polls.
    """
    polls = iter(range(200))

    def poll() -> None:
        if len(world.checkpoints) == num_commits or next(polls, None) is None:
            loop.stop()
        elif world.calls[-1:] == ["prune"]:
            world.num_evicted = num_evicted

    return poll


@pytest.mark.parametrize(("num_evicted", "commit_after_s"), [(1000, 60.0), (1, 0.0)])
async def test_evictions_without_a_step_are_committed_with_the_newest_checkpoint(
    num_evicted: int, commit_after_s: float
) -> None:
    world = World(starve_from=2, num_evicted=num_evicted)
    loop = make_loop(world, steps=100, has_clients=True, commit_after_s=commit_after_s)
    world.on_starve = evict_and_stop(world, loop, num_evicted=num_evicted, num_commits=3)
    await loop.run()
    # Step 2 has a checkpoint already, so that its files are written only once.
    assert world.calls_of("train", "save", "cut", "commit ", "prune") == [
        "train 1", "train 2", "save 2", "cut", "commit 2", "prune",
        "cut", "commit 2", "prune", "cut", "commit 2", "prune",
    ]  # fmt: skip


async def test_a_checkpoint_of_the_last_step_is_written_before_evictions_are_committed() -> None:
    for done in (0, 1):
        world = World(starve_from=done, num_evicted=10_000)
        loop = make_loop(world, steps=100, has_clients=True)
        world.on_starve = evict_and_stop(world, loop, num_evicted=1_000, num_commits=2)
        await loop.run()
        assert world.calls_of("save", "cut", "commit", "prune") == [
            f"save {done}", "cut", f"commit {done}", f"committed {done}", "prune",
            "cut", f"commit {done}", "prune",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("done", "num_evicted", "commit_after_s", "has_clients"),
    [(2, 999, 60.0, True), (2, 0, 0.0, True), (0, 9_999, 60.0, True), (2, 10_000, 0.0, False)],
    ids=["few", "none", "few for new files", "no clients"],
)
async def test_without_a_step_nothing_is_committed_unless_it_is_due(
    done: int, num_evicted: int, commit_after_s: float, has_clients: bool
) -> None:
    world = World(starve_from=done, num_evicted=num_evicted)
    loop = make_loop(world, steps=100, has_clients=has_clients, commit_after_s=commit_after_s)
    polls = iter(range(200))

    def poll() -> None:
        world.num_evicted = num_evicted
        if next(polls, None) is None:
            loop.stop()

    world.on_starve = poll
    await loop.run()
    assert next(polls, None) is None and world.checkpoints == [(2, "dir-2")] * (done // 2)


async def test_a_step_is_recorded_before_the_commit_that_evictions_cause() -> None:
    world = World(starve_from=1, num_evicted=10_000)
    polls = 0

    async def load(version: int) -> None:
        while polls < 20 and not world.checkpoints:
            await asyncio.sleep(0)

    world.engines_load = load
    loop = make_loop(world, steps=100, max_lag=1, has_clients=True)

    def poll() -> None:
        nonlocal polls
        polls += 1
        if world.checkpoints or polls == 200:
            loop.stop()

    world.on_starve = poll
    await loop.run()
    assert world.calls_of("loaded", "record", "save") == ["loaded 1", "record 1", "save 1"]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


async def test_a_requested_checkpoint_waits_for_the_current_step_and_earlier_checkpoints() -> None:
    world, written = World(), asyncio.Event()

    async def write(step: int) -> None:
        if step == 2:
            await written.wait()

    world.checkpoint_is_written = write
    loop = make_loop(world, steps=4)
    asked: list[asyncio.Task[Checkpoint]] = []

    def ask(version: int) -> None:
        if version == 3:
            asked.append(asyncio.create_task(loop.checkpoint()))
            asyncio.get_running_loop().call_later(0.01, written.set)

    world.on_publish = ask
    await loop.run()
    assert (await asked[0]).step >= 2
    assert world.checkpoints[0] == (2, "dir-2") and world.checkpoints[-1] == (4, "dir-4")


async def test_a_requested_checkpoint_that_a_lost_rank_spoils_is_written_again() -> None:
    world = World(lose_save_at=0, starve_from=0)
    loop = make_loop(world)
    running = asyncio.create_task(loop.run())
    assert (await within(5.0, loop.checkpoint())).directory == "dir-0"
    assert world.calls_of("save") == ["save 0", "save 0"]
    # The checkpoint of the same step exists and is not written again.
    assert (await within(5.0, loop.checkpoint())).step == 0
    assert world.calls_of("save") == ["save 0", "save 0"]
    loop.stop()
    await running


async def test_a_requested_checkpoint_fails_when_the_term_ends() -> None:
    world, asked = World(lose_trainer_at=2), []

    async def never(step: int) -> None:
        await asyncio.Event().wait()

    world.checkpoint_is_written = never
    loop = make_loop(world)
    world.on_publish = lambda version: asked.append(asyncio.create_task(loop.checkpoint()))
    with pytest.raises(ActorLost, match="rank 0 is gone"):
        await loop.run()
    for late in (asked[0], loop.checkpoint()):
        with pytest.raises(ActorLost, match="the term ended before its checkpoint"):
            await late
