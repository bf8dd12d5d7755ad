"""Test of the watch of a term's weight board."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray

from actors.deadline import ActorLost, within
from actors.weights.actor import start_board
from service.run import engines

pytestmark = pytest.mark.usefixtures("cluster")


async def test_a_dead_idle_board_is_reported_and_a_frozen_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "BEAT_EVERY_S", 0.1)
    monkeypatch.setattr(engines, "BOARD_DEADLINE_S", 0.2)
    board = start_board()
    pid = await board.__ray_call__.remote(lambda self: os.getpid())
    watching = asyncio.create_task(engines.watch_board(board))
    try:
        os.kill(pid, signal.SIGSTOP)
        done, _ = await asyncio.wait((watching,), timeout=2.0)
        assert not done
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorLost, match="the weight board died"):
            await within(60, watching)
    finally:
        watching.cancel()
        ray.kill(board)
