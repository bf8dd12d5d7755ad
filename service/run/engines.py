"""The weight board and the inference deployment of one run, and how weights reach them.

Both outlive the run's terms: after a return to a checkpoint the engines load the older weights as
a newer term's. They are started anew only with a board that died, since they learn of versions
from the board alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.batch import Float32s
from actors.deadline import ActorLost
from actors.environment.actor import PolicyFactory
from actors.trainer.group import TrainerGroup
from actors.weights.actor import WeightBoard, start_board
from actors.weights.board import BoardStatus, WeightError, largest_difference
from service.inference.client import ServePolicyClient
from service.inference.deployment import (
    delete_inference,
    delete_leftovers,
    deploy_inference,
    wait_ready,
)
from service.inference.settings import EngineSettings
from service.run.health import current_replicas
from service.run.remote_handles import BOARD_DEADLINE_S, RPC_DEADLINE_S, remote_handle

log = logging.getLogger("rayloom.engines")

# Engines that were never ready hold nothing: Serve may end them while the process exits.
END_LIMIT_S, END_UNREADY_LIMIT_S = 90.0, 1.0


class Engines:
    """`open_term` starts them; they get ready once a version has been published."""

    def __init__(self, settings: EngineSettings, *, run_id: str, first_term: int) -> None:
        """run_id: the same for every process of this run. first_term: the first of this process."""
        self.settings = settings
        self.app_name = f"{run_id}-t{first_term}"
        self._run_id = run_id
        self._board: ActorHandle | None = None
        self._deploying: asyncio.Future[Any] | None = None
        self._were_ready = False

    @property
    def board(self) -> ActorHandle:
        assert self._board is not None, "open_term comes first"
        return self._board

    @property
    def make_policy(self) -> PolicyFactory:
        """Makes a client of the deployment, in whatever process it is called."""
        return partial(ServePolicyClient, self.app_name)

    async def open_term(self, term: int) -> None:
        """Make the board refuse older terms; start board and deployment where they are missing."""
        if self._board is not None and await self._is_alive():
            await self._board_handle().open_term(term)
            return
        await asyncio.to_thread(delete_leftovers, self._run_id)
        limit_s = self.settings.inference.publish_deadline_s
        self._board = start_board(apply_limit_s=limit_s)
        self._deploying = _in_thread(
            deploy_inference, self.settings, name=self.app_name, board=self._board
        )
        # A thread cannot be cancelled: `stop` waits for it, or it could deploy after the deletion.
        await asyncio.shield(self._deploying)

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Raises: PolicyUnavailable when an engine does not become ready."""
        await _in_thread(wait_ready, self.app_name, timeout_s=deadline_s)
        self._were_ready = True

    async def status(self) -> BoardStatus | None:
        """What the weight board knows of the engines; None without one. Raises: ActorLost."""
        return None if self._board is None else await self._board_handle().status()

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

    async def _is_alive(self) -> bool:
        try:
            await self._board_handle().status()
        except ActorLost:
            return False
        return True

    def _board_handle(self) -> WeightBoard:
        return board_handle(self.board, deadline_s=BOARD_DEADLINE_S)


def board_handle(board: ActorHandle, *, deadline_s: float) -> WeightBoard:
    return remote_handle(board, WeightBoard, name="weight board", deadline_s=deadline_s)


class Publisher:
    """Brings weights from the trainer to the engines, and compares how both score a fixed text."""

    def __init__(
        self, group: TrainerGroup, board: ActorHandle, *, term: int, deadline_s: float
    ) -> None:
        """deadline_s: until every engine must hold a published version."""
        self._trainer = group
        self._board = board
        self._term = term
        self._deadline_s = deadline_s
        self._own_logprobs: Float32s = np.empty(0, np.float32)

    async def publish(self, version: int) -> None:
        """Put the trainer's weights on the board as `version`; do not wait for the engines."""
        try:
            await self._trainer.publish(self._board, self._term, version)
        except (TimeoutError, RayError) as error:
            raise ActorLost(f"the weight board is lost: {error}") from error
        self._own_logprobs = await self._trainer.check_logprobs()

    async def wait_until_loaded(self, version: int) -> float | None:
        """Wait until every engine holds the version that was published last.

        Returns: the largest |trainer - engine| on the fixed text over the engines, nats.
        """
        board = board_handle(self._board, deadline_s=self._deadline_s + RPC_DEADLINE_S)
        try:
            # One is enough: an engine that is being replaced loads the version before it is ready.
            status = await board.wait_published(version, 1, self._deadline_s)
        except WeightError as error:
            raise ActorLost(str(error)) from error
        found = [
            replica.check_logprobs
            for replica in status.replicas
            if replica.check_logprobs is not None
        ]
        return largest_difference(self._own_logprobs, found)

    async def num_ready(self) -> int:
        """Engines that hold the current version."""
        status = await board_handle(self._board, deadline_s=BOARD_DEADLINE_S).status()
        return len(current_replicas(status))


def _in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> asyncio.Future[Any]:
    """Run a blocking call beside the event loop; an error that nobody awaits is still written."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    work.add_done_callback(_log_error)
    return work


def _log_error(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.info("%s", error)
