"""Tests of the broadcast of weights to engines that join, die or freeze during it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from worlds.parts.broadcast_member import Member, build_model, group_former, packed, score

from actors.weights.actor import start_board
from actors.weights.board import BoardStatus, Publication
from actors.weights.collective import BLOCKING_WAIT, Sender, raising_timeouts

pytestmark = [pytest.mark.usefixtures("cluster")]
# Five failed broadcasts of more than ten seconds each take a minute and a half when idle.
LIMIT_S = 300.0


class Trainer:
    """The sending side of a broadcast, which is rank 0."""

    def __init__(self, board: Any) -> None:
        self.board = board
        self.sender = Sender(group_former(board), address="127.0.0.1", device=torch.device("cpu"))

    async def publish(self, version: int) -> Any:
        """Publish a version, and return the scores of its model."""
        model = build_model(seed=version)
        groups = packed(model)
        self.sender.offer(Publication(term=1, version=version, groups=groups))
        without = [replace(group, buffer=None) for group in groups]
        await self.board.publish.remote(1, version, without)
        return score(model)

    async def wait_until_loaded(self, version: int, *, num_members: int) -> BoardStatus:
        status: BoardStatus = await self.board.wait_published.remote(version, num_members, LIMIT_S)
        assert status.is_loaded and len(status.replicas) == num_members
        return status


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    board = start_board()
    trainer = Trainer(board)
    yield trainer
    trainer.sender.offer(None)
    ray.kill(board)


def start(trainer: Trainer, directory: Path, name: str, fault: str = "", at: str = "") -> Any:
    member = Member.remote(trainer.board, str(directory), name, fault, at)
    member.pull.remote()
    return member


async def wait_until_live(trainer: Trainer, num_members: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len((await trainer.board.status.remote()).replicas) < num_members:
            await asyncio.sleep(0.05)


async def wait_until_stopped(pid: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.05)


async def wait_until_dead(member: Any) -> None:
    with pytest.raises(RayActorError):
        async with asyncio.timeout(LIMIT_S):
            while True:
                await member.failures.remote()
                await asyncio.sleep(0.05)


def check_scores(status: BoardStatus, expected: Any) -> None:
    # An engine that the board had forgotten when it reported has no scores until its next load.
    scored = [each.logprobs for each in status.scores]
    assert scored
    for found in scored:
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("before", [None, "0"])
def test_timeouts_raise_only_in_the_groups_of_broadcasts(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    with pytest.raises(RuntimeError), raising_timeouts():
        assert os.environ[BLOCKING_WAIT] == "1"
        raise RuntimeError("no such device")
    assert os.environ.get(BLOCKING_WAIT) == before


@pytest.mark.proof
@pytest.mark.slow
async def test_a_version_reaches_live_engines_and_one_that_joins_later(
    trainer: Trainer, tmp_path: Path
) -> None:
    start(trainer, tmp_path, "a")
    mortal = start(trainer, tmp_path, "b", fault="dies", at="load")
    await wait_until_live(trainer, 2)
    expected = await trainer.publish(1)
    # The engine dies after it has received all tensors, and does not count as a holder.
    await wait_until_dead(mortal)
    check_scores(await trainer.wait_until_loaded(1, num_members=1), expected)
    start(trainer, tmp_path, "late")
    await wait_until_live(trainer, 2)
    check_scores(await trainer.wait_until_loaded(1, num_members=2), expected)
    expected = await trainer.publish(2)
    check_scores(await trainer.wait_until_loaded(2, num_members=2), expected)


@pytest.mark.chaos
@pytest.mark.parametrize("at", ["seat", "broadcast", "load"])
async def test_an_engine_that_dies_in_a_broadcast_is_dropped_and_others_get_the_version(
    trainer: Trainer, tmp_path: Path, at: str
) -> None:
    members = [start(trainer, tmp_path, name) for name in ("a", "b")]
    start(trainer, tmp_path, "mortal", fault="dies", at=at)
    await wait_until_live(trainer, 3)
    expected = await trainer.publish(1)
    status = await trainer.wait_until_loaded(1, num_members=2)
    assert {each.replica_id for each in status.replicas} == {"a", "b"}
    check_scores(status, expected)
    assert max([await member.failures.remote() for member in members]) <= 2


@pytest.mark.chaos
async def test_an_engine_that_never_joins_a_broadcast_ends_and_the_others_do_not(
    trainer: Trainer, tmp_path: Path
) -> None:
    members = [start(trainer, tmp_path, name) for name in ("a", "b")]
    bad = start(trainer, tmp_path, "bad", fault="strays")
    await wait_until_live(trainer, 3)
    expected = await trainer.publish(1)
    check_scores(await trainer.wait_until_loaded(1, num_members=2), expected)
    await wait_until_dead(bad)
    assert max([await member.failures.remote() for member in members]) <= 2


@pytest.mark.chaos
@pytest.mark.parametrize("at", ["seat", "broadcast", "load"])
async def test_an_engine_that_is_frozen_for_20_s_gets_the_version_when_it_wakes(
    trainer: Trainer, tmp_path: Path, at: str
) -> None:
    """Check that an engine that joins during the stalled broadcast gets the version too."""
    for name in ("a", "b"):
        start(trainer, tmp_path, name)
    frozen = start(trainer, tmp_path, "frozen", fault="freezes", at=at)
    joining = Member.remote(trainer.board, str(tmp_path), "joining")
    pid, _ = await frozen.pid.remote(), await joining.pid.remote()
    await wait_until_live(trainer, 3)
    expected = await trainer.publish(1)
    await wait_until_stopped(pid)
    thawing = asyncio.get_running_loop().call_later(20.0, os.kill, pid, signal.SIGCONT)
    if at == "broadcast":
        assert not (await trainer.board.status.remote()).is_loaded
    joining.pull.remote()
    # The other engines do not wait longer than the lease of the frozen one.
    status = await trainer.wait_until_loaded(1, num_members=3)
    assert {each.replica_id for each in status.replicas} == {"a", "b", "joining"}
    check_scores(status, expected)
    thawing.cancel()
    os.kill(pid, signal.SIGCONT)
    await wait_until_live(trainer, 4)
    check_scores(await trainer.wait_until_loaded(1, num_members=4), expected)
    expected = await trainer.publish(2)
    check_scores(await trainer.wait_until_loaded(2, num_members=4), expected)
