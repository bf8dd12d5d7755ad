"""The weight board and the inference deployment of one run, which outlive its epochs.

A return to a checkpoint keeps the engines: they take the older weights as a newer epoch's. Only a
board that died costs them, because it is where they learn of versions.
"""

from __future__ import annotations

import asyncio

import ray
from ray.actor import ActorHandle

from actors.weights.actor import start_board
from actors.weights.board import BoardStatus
from service.inference.client import ServePolicyClient
from service.inference.deployment import (
    delete_inference,
    delete_leftovers,
    deploy_inference,
    wait_ready,
)
from service.inference.settings import EngineSettings
from service.parts import answer
from service.ports import PartLost

CHECK_DEADLINE_S = 10.0


class Engines:
    """Start with `open_epoch`; the deployment is ready once a version has been offered."""

    def __init__(
        self, settings: EngineSettings, *, run_id: str, first_epoch: int, apply_limit_s: float
    ) -> None:
        """run_id: the same for every process that ever holds this run. first_epoch: this one's."""
        self.settings = settings
        self.app_name = f"{run_id}-e{first_epoch}"
        self._run_id = run_id
        self._apply_limit_s = apply_limit_s
        self._board: ActorHandle | None = None

    @property
    def board(self) -> ActorHandle:
        assert self._board is not None, "open_epoch comes first"
        return self._board

    def policy(self) -> ServePolicyClient:
        return ServePolicyClient(self.app_name)

    async def open_epoch(self, epoch: int) -> None:
        """Fence off older epochs; start what is not there."""
        if self._board is not None and await self._is_alive(self._board):
            await answer(
                self._board.open_epoch.remote(epoch),
                part="weight board",
                deadline_s=CHECK_DEADLINE_S,
            )
            return
        await asyncio.to_thread(delete_leftovers, self._run_id)
        self._board = start_board(apply_limit_s=self._apply_limit_s)
        await asyncio.to_thread(
            deploy_inference, self.settings, name=self.app_name, board=self._board
        )

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Raises: PolicyUnavailable when an engine does not become ready."""
        await asyncio.to_thread(wait_ready, self.app_name, timeout_s=deadline_s)

    async def num_ready(self) -> int:
        """Engines that hold what the board calls current. Raises: PartLost."""
        if self._board is None:
            return 0
        status: BoardStatus = await answer(
            self._board.status.remote(), part="weight board", deadline_s=CHECK_DEADLINE_S
        )
        current = (status.epoch, status.version)
        return sum((replica.epoch, replica.version) == current for replica in status.replicas)

    async def stop(self) -> None:
        if self._board is None:
            return
        await asyncio.to_thread(delete_inference, self.app_name)
        ray.kill(self._board)
        self._board = None

    async def _is_alive(self, board: ActorHandle) -> bool:
        try:
            await answer(board.status.remote(), part="weight board", deadline_s=CHECK_DEADLINE_S)
        except PartLost:
            return False
        return True
