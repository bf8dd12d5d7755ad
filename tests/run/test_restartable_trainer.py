"""Tests of a trainer that loses its ranks, with fakes whose weights list the trained steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from worlds.parts.loop_world import World, make_loop, stats

from actors.deadline import ActorLost
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.group import ShardLost, TrainerGroup, TrainerRankLost
from actors.trainer.statistics import StepStats
from service.run.health import WeightsMoved
from service.run.restartable_trainer import MAX_RESTARTS, RestartableTrainer


@dataclass
class Disk:
    """The state that all groups share: checkpoints by path, publications, and planned losses."""

    checkpoints: dict[Path, list[str]] = field(default_factory=dict)
    published: list[tuple[int, str]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    lose_at: list[str] = field(default_factory=list)
    """Calls during which the group is lost, each once."""
    drift: bool = False
    """Whether the weights of every group differ in their bits."""
    serves_engines: bool = False
    told: list[str] = field(default_factory=list)
    looks: list[Sequence[int]] = field(default_factory=list)

    def make_group(self) -> TrainerGroup:
        group = Group(self, number=len(self.groups), serves_engines=self.serves_engines)
        self.groups.append(group)
        return cast(Any, self.groups[-1])


@dataclass
class Group:
    disk: Disk
    number: int
    version: int = -1
    shape: None = None
    serves_engines: bool = False
    weights: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    renumbered: list[int] = field(default_factory=list)
    is_killed: bool = False

    def _meet(self, call: str) -> None:
        if self.is_killed or call in self.disk.lose_at:
            if not self.is_killed:
                self.disk.lose_at.remove(call)
            self.is_killed = True
            raise TrainerRankLost(0, call, "the process died")

    async def start(self) -> None:
        self._meet("start")
        self.version = 0

    async def load(self, path: Path) -> None:
        self._meet("load")
        if path not in self.disk.checkpoints:
            raise CheckpointError(f"{path} is not there")
        self.weights = list(self.disk.checkpoints[path])
        self.version = len(self.weights)

    async def check_alive(self) -> tuple[int, ...]:
        self._meet("check_alive")
        return (self.number,)

    async def step(self, shards: Sequence[str]) -> StepStats:
        self._meet(f"step {shards[0]}")
        if shards[0] == "gone":
            raise ShardLost(0, "train_step", "the object's owner died")
        self.trained.append(shards[0])
        self.weights.append(f"{shards[0]} by {self.number}" if self.disk.drift else shards[0])
        self.version += 1
        return stats(self.version - 1)

    async def fingerprint(self) -> tuple[int, ...]:
        return (hash(tuple(self.weights)),)

    async def renumber(self, version: int, republished: tuple[int, ...]) -> None:
        self.version = version
        self.renumbered.append(version)

    async def publish(self, board: object, term: int, version: int) -> None:
        assert version == self.version
        self._meet(f"publish {version}")
        self.disk.published.append((version, ",".join(self.weights)))

    async def check_logprobs(self, rows: Sequence[Any] = ()) -> np.ndarray:
        self._meet("check_logprobs")
        return np.array([hash(tuple(self.weights)) % 1000], np.float32)

    async def begin_save(self, step: int, *, term: int) -> None:
        self._meet("begin_save")
        self.staged = (Path(f"step-{step}"), list(self.weights))

    async def finish_save(self) -> Path:
        self._meet("finish_save")
        path, weights = self.staged
        self.disk.checkpoints[path] = weights
        return path

    def kill(self) -> None:
        self.is_killed = True


async def started(disk: Disk, *, max_kept_bytes: int = 1000) -> RestartableTrainer:
    trainer = RestartableTrainer(
        disk.make_group,
        parent=None,
        first_step=1,
        max_kept_bytes=max_kept_bytes,
        on_restart=disk.told.append,
        on_check=disk.looks.append,
    )
    await trainer.start()
    await publish(trainer)
    return trainer


async def publish(trainer: RestartableTrainer) -> None:
    await trainer.publish(None, 1, trainer.version)
    await trainer.check_logprobs()


async def train(trainer: RestartableTrainer, *names: str) -> None:
    for name in names:
        await trainer.step([name], num_bytes=10)
        await publish(trainer)


async def checkpoint(trainer: RestartableTrainer, step: int) -> None:
    await trainer.begin_save(step, term=1)
    path = await trainer.finish_save()
    assert path is not None
    await trainer.committed(step, path)


async def test_steps_since_the_checkpoint_are_trained_again_and_not_published(
) -> None:  # fmt: skip
    disk = Disk()
    trainer = await started(disk)
    await train(trainer, "a", "b")
    await checkpoint(trainer, 2)
    await train(trainer, "c", "d")
    published = list(disk.published)
    disk.lose_at.append("step e")
    await trainer.step(["e"])
    assert disk.groups[1].trained == ["c", "d", "e"]
    assert disk.groups[1].weights == ["a", "b", "c", "d", "e"]
    assert disk.published == published
    assert (trainer.version, trainer.republished) == (5, ())
    assert "at version 4" in disk.told[0] and "2 steps trained again" in disk.told[0]


async def test_is_restarting_is_set_while_ranks_are_replaced() -> None:
    disk, seen = Disk(lose_at=["step a"]), []
    trainer = RestartableTrainer(
        disk.make_group,
        parent=None,
        first_step=1,
        max_kept_bytes=1000,
        on_restart=lambda told: seen.append(trainer.is_restarting),
        on_check=disk.looks.append,
    )
    await trainer.start()
    assert not trainer.is_restarting
    await trainer.step(["a"])
    assert seen == [True] and not trainer.is_restarting


async def test_a_version_without_a_step_is_reported_before_it_is_published() -> None:
    disk, reported = Disk(), []

    async def report(versions: tuple[int, ...]) -> None:
        reported.append((versions, list(disk.published)))

    trainer = RestartableTrainer(
        disk.make_group,
        parent=None,
        first_step=1,
        max_kept_bytes=1000,
        on_restart=disk.told.append,
        on_check=disk.looks.append,
        on_republish=report,
    )
    await trainer.start()
    await publish(trainer)
    await train(trainer, "a")
    disk.drift = True
    disk.lose_at.append("step b")
    with pytest.raises(WeightsMoved):
        await trainer.step(["b"])
    assert reported == [((2,), [(0, ""), (1, "a")])]


async def test_new_ranks_publish_the_version_again_if_they_serve_the_engines() -> None:
    disk = Disk(serves_engines=True)
    trainer = await started(disk)
    await train(trainer, "a")
    disk.lose_at.append("step b")
    await trainer.step(["b"])
    assert disk.published == [(0, ""), (1, "a"), (1, "a")] and trainer.version == 2


@pytest.mark.parametrize("call", ["publish 2", "check_logprobs", "finish_save", "check_alive"])
async def test_the_call_that_detects_the_loss_is_repeated(call: str) -> None:
    disk = Disk()
    trainer = await started(disk)
    await train(trainer, "a")
    await trainer.step(["b"])
    disk.lose_at.append(call)
    if call == "check_alive":
        watching = asyncio.create_task(trainer.watch())
        while len(disk.looks) < 2:
            await asyncio.sleep(0.01)
        watching.cancel()
        # The lost group reports no ranks; its successor, which is number 1, does.
        assert disk.looks == [(), (1,)] and len(disk.told) == 1
    await publish(trainer)
    await trainer.begin_save(2, term=1)
    if call == "finish_save":
        # A save is not repeated: the lost one is not committed, and the next one is.
        assert await trainer.finish_save() is None
        await trainer.begin_save(2, term=1)
    assert await trainer.finish_save() == Path("step-2")
    assert disk.groups[1].trained == ["a", "b"]
    assert disk.published[-1] == (2, "a,b") and trainer.version == 2


async def test_a_trainer_that_dies_repeatedly_at_one_step_ends_the_term() -> None:
    disk = Disk(lose_at=["step b"] * (MAX_RESTARTS + 1))
    trainer = await started(disk)
    await train(trainer, "a")
    with pytest.raises(ActorLost, match=f"{MAX_RESTARTS} groups in a row ended"):
        await trainer.step(["b"])
    disk = Disk()
    trainer = await started(disk)
    disk.lose_at += ["step b", "start", "load", "step c", "step c"]
    await train(trainer, "a")
    await checkpoint(trainer, 1)
    await train(trainer, "b", "c")
    assert disk.published[-1] == (3, "a,b,c")


async def test_a_loss_ends_the_term_if_too_many_bytes_were_kept_since_the_checkpoint() -> None:
    disk = Disk()
    trainer = await started(disk, max_kept_bytes=25)
    await train(trainer, "a", "b", "c")
    disk.lose_at.append("step d")
    with pytest.raises(ActorLost, match=r"trainer\.max_replay_mib"):
        await trainer.step(["d"])
    disk = Disk()
    trainer = await started(disk, max_kept_bytes=25)
    await train(trainer, "a")
    await trainer.begin_save(1, term=1)
    await train(trainer, "b", "c")
    await trainer.committed(1, await trainer.finish_save() or Path())
    disk.lose_at.append("step d")
    await train(trainer, "d")
    assert disk.groups[1].trained == ["b", "c", "d"]


async def test_a_lost_shard_or_checkpoint_ends_the_term() -> None:
    disk = Disk()
    trainer = await started(disk)
    with pytest.raises(ShardLost, match="could not fetch its shard"):
        await trainer.step(["gone"])
    disk = Disk()
    trainer = await started(disk)
    await train(trainer, "a")
    await checkpoint(trainer, 1)
    disk.checkpoints.clear()
    disk.lose_at.append("step b")
    with pytest.raises(ActorLost, match="step-1 is not there"):
        await trainer.step(["b"])


async def ask_for_step(trainer: RestartableTrainer) -> object:
    return await trainer.step(["c"])


async def ask_for_checkpoint(trainer: RestartableTrainer) -> None:
    await trainer.begin_save(2, term=1)


@pytest.mark.parametrize("ask", [ask_for_step, ask_for_checkpoint])
async def test_weights_with_other_bits_are_published_as_the_next_version_first(
    ask: Callable[[RestartableTrainer], Any],
) -> None:
    disk = Disk(drift=True)
    trainer = await started(disk)
    await train(trainer, "a", "b")
    disk.groups[0].is_killed = True
    with pytest.raises(WeightsMoved, match="version 3"):
        await ask(trainer)
    with pytest.raises(WeightsMoved):
        await ask(trainer)
    assert (trainer.version, trainer.republished) == (3, (3,))
    await publish(trainer)
    assert disk.published[-2:] == [(2, "a by 0,b by 0"), (3, "a by 1,b by 1")]
    await train(trainer, "c")
    assert trainer.version == 4
    # At a second loss, the step after the republication keeps its own version number.
    disk.groups[1].is_killed = True
    with pytest.raises(WeightsMoved, match="version 5"):
        await trainer.step(["d"])
    assert disk.groups[2].trained == ["a", "b", "c"]
    assert disk.groups[2].renumbered == [0, 3, 5] and trainer.republished == (3, 5)


async def test_weights_that_no_engine_has_loaded_need_no_second_version() -> None:
    disk = Disk(drift=True)
    trainer = await started(disk)
    await train(trainer, "a")
    await trainer.step(["b"])
    disk.groups[0].is_killed = True
    await trainer.check_logprobs()
    await publish(trainer)
    assert disk.published[-1] == (2, "a by 1,b by 1")
    # An engine may have loaded the version of a group that dies during a publish.
    disk.lose_at.append("publish 3")
    await trainer.step(["c"])
    with pytest.raises(WeightsMoved, match="version 4"):
        await publish(trainer)
    await publish(trainer)
    assert [version for version, _ in disk.published] == [0, 1, 2, 4]


@dataclass
class Publisher:
    """A publisher whose engines load every version at once."""

    world: World
    trainer: RestartableTrainer
    on_publish: Callable[[int], None]

    async def publish(self, version: int) -> None:
        await self.trainer.publish(None, 1, version)
        await self.trainer.check_logprobs()
        self.world.calls.append(f"publish {version}")
        self.on_publish(version)

    async def wait_until_loaded(self, version: int) -> None: ...

    async def num_ready(self) -> int:
        return 1


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("drift", [False, True])
async def test_a_run_whose_ranks_die_between_and_during_steps_trains_each_step_once(
    drift: bool, max_lag: int
) -> None:
    disk, world = Disk(drift=drift), World()
    trainer = await started(disk)
    losses = {3: "between", 6: "in"}

    def lose(version: int) -> None:
        kind = losses.pop(version, "")
        if kind == "between":
            disk.groups[-1].is_killed = True
        elif kind == "in":
            disk.lose_at.append("step shard")

    publisher = Publisher(world, trainer, lose)
    parts = {"trainer": trainer, "publisher": publisher}
    await make_loop(world, steps=8, max_lag=max_lag, parts=parts).run()
    versions = [record.policy_version for record in world.records]
    assert [record.step for record in world.records] == list(range(1, 9))
    assert world.calls_of("loaded") == [f"loaded {step}" for step in range(1, 9)]
    assert len(disk.groups[-1].weights) == 8
    assert world.checkpoints[-1][0] == 8 and not losses
    if not drift:
        assert versions == list(range(1, 9)) and len(disk.told) == 2
        assert world.calls_of("publish") == [f"publish {version}" for version in range(1, 9)]
    else:
        assert world.calls_of("publish") == [f"publish {version}" for version in range(1, 11)]
        assert versions == [1, 2, 3, 5, 6, 8, 9, 10] and trainer.republished == (4, 7)
