"""The trainer group under real Ray: step, publish, lose a rank, go on from the checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorHandle
from worlds.settings import changed, rank_settings
from worlds.trainer_world import random_samples, shards

from actors.trainer.checkpoint import CheckpointError, list_checkpoints
from actors.trainer.group import (
    Deadlines,
    TrainerGroup,
    TrainerRankLost,
    TrainerStartFailed,
)
from actors.trainer.settings import RankSettings
from actors.trainer.shard_check import ShardRefused
from actors.weights.actor import start_board
from actors.weights.board import NUM_CHECK_TOKENS, CommandKind, Publication
from actors.weights.buffers import buffer_checksum, unpack_group

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


async def start_group(settings: RankSettings, **deadlines: float) -> TrainerGroup:
    group = TrainerGroup(settings, deadlines=Deadlines(**deadlines))
    await group.start()
    return group


async def fetch_weights(board: ActorHandle) -> tuple[Publication, dict[str, torch.Tensor]]:
    """Poll the board as a replica does, and check what it was given."""
    publication = await board.poll.remote("replica", None, None, 5.0)
    assert not isinstance(publication, CommandKind)
    named: dict[str, torch.Tensor] = {}
    for group in publication.groups:
        buffer = await group.buffer
        assert buffer_checksum(buffer) == group.checksum
        named.update(unpack_group(group.manifest, torch.tensor(buffer)))
    return publication, named


async def test_a_group_trains_publishes_and_survives_the_death_of_a_rank(
    settings: RankSettings,
) -> None:
    board = start_board()
    group = await start_group(settings)
    await group.publish(board, 0, 0)
    _, first = await fetch_weights(board)
    stats = await group.step(put_shards(0))
    assert stats.num_updates == 1 and group.version == 1
    with pytest.raises(ValueError, match="got version 0, expected 1 to publish"):
        await group.publish(board, 0, 0)
    await group.publish(board, 0, 1)
    path = await group.save(1, version=1, term=0)

    publication, weights = await fetch_weights(board)
    assert publication.version == 1
    assert "lm_head.weight" not in weights
    assert max(float((weights[name] - first[name]).abs().max()) for name in weights) > 0
    own = await group.check_logprobs()
    assert own.shape == (NUM_CHECK_TOKENS - 1,) and own.max() < 0
    expected = (await group.step(put_shards(1))).statistics["loss"]

    process_ids = [process.process_id for process in group.processes]
    os.kill(process_ids[1], signal.SIGKILL)
    with pytest.raises(TrainerRankLost, match="rank 1 was lost in train_step") as caught:
        await group.step(put_shards(2))
    assert "the process died" in caught.value.reason
    assert caught.value.rank == 1
    await wait_until_dead(process_ids)
    await group.stop()

    heir = await start_group(settings)
    progress = await heir.load(path)
    assert (progress.step, heir.version) == (1, 1)
    np.testing.assert_array_equal(await heir.check_logprobs(), own)
    assert (await heir.step(put_shards(1))).statistics["loss"] == expected
    await heir.stop()
    await wait_until_dead([process.process_id for process in heir.processes])


async def test_refusals_leave_the_group_at_work_and_a_rank_that_hangs_is_lost_at_the_deadline(
    settings: RankSettings, tmp_path: Path
) -> None:
    group = await start_group(changed(settings, step_deadline_s=6.0))
    wrong = shards([random_samples(1, 4)], num_ranks=2, num_micro=1, version=5)
    with pytest.raises(ShardRefused, match="made for version 5"):
        await group.step([ray.put(shard) for shard in wrong])
    with pytest.raises(CheckpointError, match="is not there"):
        await group.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="got 1 shards for 2 ranks"):
        await group.step(put_shards(0)[:1])
    assert (await group.step(put_shards(0))).num_updates == 1
    assert list_checkpoints(settings.checkpoint_dir) == []

    process_ids = [process.process_id for process in group.processes]
    os.kill(process_ids[0], signal.SIGSTOP)
    try:
        with pytest.raises(TrainerRankLost, match="no answer within 6 s"):
            await group.step(put_shards(1))
        await wait_until_dead(process_ids[1:])
    finally:
        if is_alive(process_ids[0]):
            os.kill(process_ids[0], signal.SIGCONT)
    await wait_until_dead(process_ids)


async def test_a_model_that_is_not_there_is_reported_with_its_reason(
    settings: RankSettings, tmp_path: Path
) -> None:
    missing = changed(settings, model=str(tmp_path / "missing"), num_ranks=1)
    with pytest.raises(TrainerStartFailed, match=r"rank 0 cannot start \(join: .*missing"):
        await start_group(missing)
