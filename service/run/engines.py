"""The weight board and the inference deployment of one run, which outlive its epochs.

A return to a checkpoint keeps the engines: they take the older weights as a newer epoch's. Only a
board that died costs them, because it is where they learn of versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.environment.actor import PolicyFactory
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
from service.run.parts import BOARD_DEADLINE_S, answer, board_status
from service.run.ports import PartLost

log = logging.getLogger("rayloom.engines")

# Engines that have never been ready hold nothing; Serve ends them without being watched.
END_LIMIT_S, END_UNREADY_LIMIT_S = 90.0, 1.0


class Engines:
    """Start with `open_epoch`; the deployment is ready once a version has been offered."""

    def __init__(self, settings: EngineSettings, *, run_id: str, first_epoch: int) -> None:
        """run_id: the same for every process that ever holds this run. first_epoch: this one's."""
        self.settings = settings
        self.app_name = f"{run_id}-e{first_epoch}"
        self._run_id = run_id
        self._board: ActorHandle | None = None
        self._deploying: asyncio.Future[Any] | None = None
        self._were_ready = False

    @property
    def board(self) -> ActorHandle:
        assert self._board is not None, "open_epoch comes first"
        return self._board

    @property
    def make_policy(self) -> PolicyFactory:
        """What makes a client of the deployment, wherever it is carried."""
        return partial(ServePolicyClient, self.app_name)

    async def open_epoch(self, epoch: int) -> None:
        """Fence off older epochs; start what is not there."""
        if self._board is not None and await self._is_alive(self._board):
            await answer(
                self._board.open_epoch.remote(epoch),
                part="weight board",
                deadline_s=BOARD_DEADLINE_S,
            )
            return
        await asyncio.to_thread(delete_leftovers, self._run_id)
        limit_s = self.settings.inference.publish_deadline_s
        self._board = start_board(apply_limit_s=limit_s)
        self._deploying = _in_thread(
            deploy_inference, self.settings, name=self.app_name, board=self._board
        )
        # A thread cannot be cancelled: `stop` waits for it, or it would deploy behind its back.
        await asyncio.shield(self._deploying)

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Raises: PolicyUnavailable when an engine does not become ready."""
        await _in_thread(wait_ready, self.app_name, timeout_s=deadline_s)
        self._were_ready = True

    async def status(self) -> BoardStatus | None:
        """What the weight board knows of the engines; None before it is there. Raises: PartLost."""
        return None if self._board is None else await board_status(self._board)

    async def stop(self) -> None:
        """End the deployment and the board; bounded, also in the middle of the start."""
        if self._board is None:
            return
        if self._deploying is not None:
            await asyncio.wait((self._deploying,), timeout=END_LIMIT_S)
        deleting = _in_thread(delete_inference, self.app_name)
        limit_s = END_LIMIT_S if self._were_ready else END_UNREADY_LIMIT_S
        await asyncio.wait((deleting,), timeout=limit_s)
        ray.kill(self._board)
        self._board = None

    async def _is_alive(self, board: ActorHandle) -> bool:
        try:
            await board_status(board)
        except PartLost:
            return False
        return True


def _in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> asyncio.Future[Any]:
    """Run a blocking call beside the event loop; an error that nobody awaits is still written."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    work.add_done_callback(_log_error)
    return work


def _log_error(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.info("%s", error)
