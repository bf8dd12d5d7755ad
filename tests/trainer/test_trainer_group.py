"""Tests of the trainer group on real Ray: steps, publications, and the loss of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import get_placement_group, placement_group, remove_placement_group
from worlds.builders.settings import changed, rank_settings
from worlds.parts.trainer_world import list_checkpoints, process_ids_of, random_samples, shards

from actors.deadline import ActorLost
from actors.trainer import group as trainer_group
from actors.trainer.agreement import ShardRefused, StepAbandoned
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.group import (
    TrainerGroup,
    TrainerRankLost,
    TrainerStartFailed,
    remove_reservations,
    reservation_name,
)
from actors.trainer.settings import RankSettings
from actors.weights.actor import start_board
from actors.weights.board import NUM_CHECK_TOKENS, Publication
from actors.weights.buffers import buffer_checksum, unpack_group
from service.run.restartable_trainer import RestartableTrainer

pytestmark = [pytest.mark.usefixtures("cluster")]


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    return rank_settings(tiny_models[True], tmp_path)


def put_shards(step: int) -> list[ray.ObjectRef]:
    samples = random_samples(step, 6)
    own = shards([samples], num_ranks=2, num_micro=2, step=step, version=step)
    return [ray.put(shard) for shard in own]


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process_id}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


async def wait_until_dead(process_ids: list[int]) -> None:
    for _ in range(600):
        if not any(is_alive(process_id) for process_id in process_ids):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"still alive: {process_ids}")


async def start_group(settings: RankSettings) -> TrainerGroup:
    group = TrainerGroup(settings)
    await group.start()
    return group


async def fetch_weights(board: ActorHandle) -> tuple[Publication, dict[str, torch.Tensor]]:
    """Poll the board like a replica, check the buffers, and return publication and tensors."""
    publication = await board.poll.remote("replica", None, None, 5.0)
    named: dict[str, torch.Tensor] = {}
    for group in publication.groups:
        buffer = await group.buffer
        assert buffer_checksum(buffer) == group.checksum
        named.update(unpack_group(group.manifest, torch.tensor(buffer)))
    return publication, named


@pytest.mark.chaos
async def test_a_group_trains_publishes_and_is_restored_exactly_after_the_death_of_a_rank(
    settings: RankSettings,
) -> None:
    board = start_board()
    groups: list[TrainerGroup] = []
    told: list[str] = []

    def make_group() -> TrainerGroup:
        groups.append(TrainerGroup(settings))
        return groups[-1]

    trainer = RestartableTrainer(
        make_group,
        parent=None,
        first_step=0,
        max_kept_bytes=2**20,
        on_restart=told.append,
        on_check=lambda peak_bytes: None,
    )
    await trainer.start()
    group = groups[0]
    await trainer.publish(board, 0, 0)
    _, first = await fetch_weights(board)
    stats = await trainer.step(put_shards(0))
    assert stats.num_updates == 1 and group.version == 1
    with pytest.raises(ValueError, match="got version 0, expected 1 to publish"):
        await group.publish(board, 0, 0)
    await trainer.publish(board, 0, 1)
    await trainer.begin_save(1, term=0)
    await trainer.step(put_shards(1))
    path = await trainer.finish_save()
    assert path is not None and list_checkpoints(settings.checkpoint_dir) == [path]
    await trainer.committed(0, path)

    publication, weights = await fetch_weights(board)
    assert publication.version == 1
    assert "lm_head.weight" not in weights
    assert max(float((weights[name] - first[name]).abs().max()) for name in weights) > 0
    await trainer.publish(board, 0, 2)
    own = await trainer.check_logprobs()
    assert own.shape == (NUM_CHECK_TOKENS - 1,) and own.max() < 0
    before = await group.fingerprint()

    process_ids = await process_ids_of(group)
    os.kill(process_ids[1], signal.SIGKILL)
    # Scores are requested before anything else notices the dead rank.
    assert len(await trainer.score(put_shards(2))) == 2
    assert "rank 1 was lost in score_rows (the process died" in told[0]
    assert "1 steps trained again" in told[0] and len(told) == 1
    await wait_until_dead(process_ids)

    assert trainer.version == 2 and trainer.republished == ()
    assert await groups[1].fingerprint() == before
    np.testing.assert_array_equal(await groups[1].check_logprobs(), own)
    process_ids = await process_ids_of(groups[1])
    await trainer.stop()
    await wait_until_dead(process_ids)


@pytest.mark.chaos
async def test_an_abandoned_step_leaves_the_weights_of_the_previous_one(
    settings: RankSettings,
) -> None:
    group = await start_group(settings)
    await group.step(put_shards(0))
    before = await group.fingerprint()
    long = shards([random_samples(1, 400)], num_ranks=2, num_micro=200, version=1)
    step = asyncio.create_task(group.step([ray.put(shard) for shard in long]))
    # By then the ranks train the step; otherwise they abandon it at its first micro-batch.
    await asyncio.sleep(1.0)
    assert not step.done()
    await group.abandon()
    with pytest.raises(StepAbandoned):
        await step
    assert group.version == 1 and await group.fingerprint() == before
    await group.begin_save(1, term=0)
    path = await group.finish_save()
    # Ranks that have abandoned a step begin no other one.
    with pytest.raises(StepAbandoned):
        await group.step(put_shards(1))
    await group.stop()
    again = await start_group(settings)
    assert (await again.load(path)).step == 1
    assert await again.fingerprint() == before
    assert (await again.step(put_shards(1))).num_updates == 1
    await again.stop()


@pytest.mark.chaos
async def test_a_group_survives_refused_calls_and_loses_a_hanging_rank_at_the_deadline(
    settings: RankSettings, tmp_path: Path
) -> None:
    group = await start_group(changed(settings, step_deadline_s=6.0))
    wrong = shards([random_samples(1, 4)], num_ranks=2, num_micro=1, version=5)
    with pytest.raises(ShardRefused, match="made for version 5"):
        await group.step([ray.put(shard) for shard in wrong])
    with pytest.raises(CheckpointError, match="does not exist"):
        await group.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="got 1 shards for 2 ranks"):
        await group.step(put_shards(0)[:1])
    assert (await group.step(put_shards(0))).num_updates == 1
    assert list_checkpoints(settings.checkpoint_dir) == []

    process_ids = await process_ids_of(group)
    os.kill(process_ids[0], signal.SIGSTOP)
    try:
        with pytest.raises(TrainerRankLost, match="no answer within 6 s"):
            await group.step(put_shards(1))
        await wait_until_dead(process_ids[1:])
    finally:
        if is_alive(process_ids[0]):
            os.kill(process_ids[0], signal.SIGCONT)
    await wait_until_dead(process_ids)


async def test_every_call_of_a_killed_group_raises_a_lost_rank(
    settings: RankSettings,
) -> None:
    group = TrainerGroup(settings)
    group.kill()
    for call in (
        group.start(),
        group.check_alive(),
        group.score([]),
        group.step([]),
        group.publish(None, 0, 0),
        group.check_logprobs(),
        group.begin_save(0, term=0),
        group.finish_save(),
        group.fingerprint(),
        group.renumber(1, ()),
        group.load(Path("nowhere")),
    ):
        with pytest.raises(TrainerRankLost, match="the group was ended"):
            await call
    await group.stop()


@ray.remote(num_cpus=0, max_concurrency=10)
class SlowBoard:
    """A board whose publish makes progress `num_moves` times, and then ends as `then` says."""

    def __init__(self, num_moves: int = 0, then: str = "") -> None:
        self.num_moves, self.then = num_moves, then
        self.moved = 0
        self.begun, self.lost = asyncio.Event(), asyncio.Event()

    async def publish(self, term: int, version: int, groups: object) -> None:
        while self.moved < self.num_moves:
            await asyncio.sleep(0.1)
        self.begun.set()
        if self.then == "hangs":
            await asyncio.sleep(600.0)
        if self.then == "loses what it fetches":
            await self.lost.wait()
            raise RayError("the object's owner died")

    async def num_moved(self) -> int:
        self.moved = min(self.moved + 1, self.num_moves)
        return self.moved

    async def wait_until_begun(self) -> None:
        await self.begun.wait()

    async def lose(self) -> None:
        self.lost.set()

    async def form_group(self, term: int, version: int, store: str, timeout_s: float) -> None:
        raise LookupError("no seats")


@pytest.mark.chaos
async def test_a_publish_continues_while_the_board_makes_progress_and_names_a_lost_rank(
    settings: RankSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await start_group(changed(settings, num_ranks=1))
    monkeypatch.setattr(trainer_group, "IDLE_S", 6.0)
    began = time.monotonic()
    await group.publish(SlowBoard.remote(num_moves=5), 0, 0)
    assert time.monotonic() - began > trainer_group.IDLE_S
    with pytest.raises(ActorLost, match="board is lost: it has fetched and copied nothing for 6 s"):
        await group.publish(SlowBoard.remote(num_moves=1, then="hangs"), 0, 0)
    first, *_ = await process_ids_of(group)
    board = SlowBoard.remote(then="loses what it fetches")
    publishing = asyncio.ensure_future(group.publish(board, 0, 0))
    await board.wait_until_begun.remote()
    os.kill(first, signal.SIGKILL)
    # `RestartableTrainer.watch` may detect the loss first and kill the group, as here.
    with pytest.raises(TrainerRankLost, match="rank 0 was lost in check"):
        while True:
            await group.check_alive()
    await board.lose.remote()
    with pytest.raises(TrainerRankLost, match="rank 0 was lost in check"):
        await publishing


@pytest.mark.chaos
async def test_a_rank_that_no_longer_broadcasts_its_weights_is_lost(
    settings: RankSettings,
) -> None:
    collective = changed(settings, num_ranks=1, weight_backend="collective")
    group = await start_group(collective)
    await group.publish(SlowBoard.remote(), 0, 0)
    reason = "RuntimeError: weights: the broadcasting thread has ended after LookupError: no seats"
    with pytest.raises(TrainerRankLost, match=f"rank 0 was lost in check .{reason}"):
        async with asyncio.timeout(60.0):
            while True:
                await group.check_alive()


async def test_a_missing_model_is_reported_with_the_reason(
    settings: RankSettings, tmp_path: Path
) -> None:
    missing = changed(settings, model=str(tmp_path / "missing"), num_ranks=1)
    with pytest.raises(TrainerStartFailed, match=r"rank 0 cannot start \(join: .*missing"):
        await start_group(missing)


@ray.remote(num_cpus=0)
class Holder:
    """An actor that reserves resources, like a supervisor that dies before it releases them."""

    def reserve(self, name: str) -> None:
        ray.get(placement_group([{"CPU": 1}], name=name).ready(), timeout=60)


def test_the_next_term_releases_the_reservations_of_a_killed_process() -> None:
    older, newer = (reservation_name("run", term) for term in (9, 10))
    for name in (older, newer):
        holder = Holder.remote()
        ray.get(holder.reserve.remote(name))
        ray.kill(holder)
    remove_reservations("run", before_term=10)
    with pytest.raises(ValueError, match=older):
        get_placement_group(older)
    remove_placement_group(get_placement_group(newer))
