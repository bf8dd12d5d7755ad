"""The loop's ports over Ray actors: await a call with a deadline, translate what it raises."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.batch import Float32s
from actors.deadline import within
from actors.merge.actor import MergeReply
from actors.trainer.group import TrainerGroup, TrainerRankLost
from actors.trainer.manifest import list_checkpoints
from actors.trainer.statistics import StepStats
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.ledger import Settlement
from actors.trajectory_queue.messages import Drained, QueueCut, QueueStats, StepInput, Vacancy
from actors.weights.board import BoardStatus, PublishReport
from actors.weights.errors import WeightError
from actors.weights.parity import parity_difference
from service.run.ports import BuiltStep, PartLost, PublishedVersion
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore

RPC_DEADLINE_S = 60.0
MERGE_DEADLINE_S = 300.0
BOARD_DEADLINE_S = 10.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Answer = TypeVar("Answer")


async def answer(call: Awaitable[Answer], *, part: str, deadline_s: float) -> Answer:
    """Await a Ray call. An error that the callee raised comes out as itself.

    Raises: PartLost when the actor has died or does not answer in time.
    """
    try:
        return await within(deadline_s, call)
    except RayTaskError as error:
        raise error.cause from error
    except TimeoutError as error:
        raise PartLost(f"the {part} did not answer within {deadline_s:g} s") from error
    except RayError as error:
        raise PartLost(f"the {part} died: {_reason(error)}") from error


def _reason(error: RayError) -> str:
    """The line that says it: of a constructor's traceback the last one, else the first."""
    lines = [line for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    is_traceback = isinstance(error, RayActorError) and error.actor_init_failed
    return lines[-1 if is_traceback else 0].strip() if lines else type(error).__name__


class QueueParts:
    """QueuePort over the trajectory queue actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def admissible(self, *, timeout_s: float) -> Sequence[Vacancy]:
        return await self._call("admissible", timeout_s, wait_s=timeout_s)

    async def admit(self, groups: Sequence[GroupRequest]) -> None:
        await self._call("admit", groups)

    async def take_step(self, *, timeout_s: float) -> StepInput | None:
        return await self._call("take_step", timeout_s, wait_s=timeout_s)

    async def settle(self, step: int, settlements: Sequence[Settlement]) -> None:
        await self._call("settle", step, settlements)

    async def lost(self, rollout_ids: Sequence[str]) -> None:
        await self._call("lost", rollout_ids)

    async def published(self, version: int) -> None:
        await self._call("published", version)

    async def drain(self) -> Drained:
        return await self._call("drain_events")

    async def cut(self) -> QueueCut:
        return await self._call("cut")

    async def cancel_group(self, group_id: str) -> bool:
        return await self._call("cancel_group", group_id)

    async def cancel_all(self) -> None:
        await self._call("cancel_all")

    async def stats(self) -> QueueStats:
        return await self._call("stats")

    async def release_actor(self, actor_id: str) -> int:
        return await self._call("release_actor", actor_id)

    async def _call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        call = getattr(self._actor, method).remote(*arguments)
        return await answer(call, part="trajectory queue", deadline_s=wait_s + RPC_DEADLINE_S)


class MergeParts:
    """MergePort over the merge actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def plan(self, step_input: StepInput, *, version: int) -> Sequence[Any]:
        return await answer(
            self._actor.plan.remote(step_input, version),
            part="merge actor",
            deadline_s=MERGE_DEADLINE_S,
        )

    async def build(
        self, step_input: StepInput, *, version: int, scores: Sequence[Any] = ()
    ) -> BuiltStep:
        reply: MergeReply = await answer(
            self._actor.build.remote(step_input, version, list(scores)),
            part="merge actor",
            deadline_s=MERGE_DEADLINE_S,
        )
        return BuiltStep(
            step=reply.step,
            shards=reply.shards,
            settlements=reply.settlements,
            report=reply.report,
            value_shards=reply.value_shards,
            notices=reply.notices,
        )


class TrainerParts:
    """TrainerPort over the group of ranks."""

    def __init__(self, group: TrainerGroup, store: RunStore, *, epoch: int, keep: int) -> None:
        self._group = group
        self._store = store
        self._epoch = epoch
        self._keep = keep

    async def score(self, shards: Sequence[Any]) -> Sequence[Any]:
        with _rank_loss():
            return await self._group.score(shards)

    async def step(self, built: BuiltStep) -> StepStats:
        with _rank_loss():
            return await self._group.step(built.shards, built.value_shards)

    async def save(self, *, step: int, version: int) -> str:
        with _rank_loss():
            return (await self._group.save(step, version=version, epoch=self._epoch)).name

    async def prune(self) -> None:
        for directory in prunable(
            list_checkpoints(self._group.settings.checkpoint_dir),
            self._store.checkpoints(),
            epoch=self._epoch,
            keep=self._keep,
        ):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def prunable(
    directories: Sequence[Path], commits: Sequence[Checkpoint], *, epoch: int, keep: int
) -> list[Path]:
    """Which checkpoints go: all but the newest `keep` commits, newest first, of the lineage.

    What no commit names was cut short by a fault. Nothing goes unless this epoch has committed
    and a kept one is really there.
    """
    if not commits or commits[0].term != epoch:
        return []
    kept = {commit.directory for commit in commits[:keep]}
    if not any(directory.name in kept for directory in directories):
        return []
    return [directory for directory in directories if directory.name not in kept]


class _rank_loss:
    """Translate the loss of a rank into the loss of a part."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TrainerRankLost):
            raise PartLost(str(error)) from error


async def board_status(board: ActorHandle) -> BoardStatus:
    """Raises: PartLost."""
    return await answer(board.status.remote(), part="weight board", deadline_s=BOARD_DEADLINE_S)


def num_current(status: BoardStatus) -> int:
    """Engines that hold what the board calls current."""
    current = (status.epoch, status.version)
    return sum((replica.epoch, replica.version) == current for replica in status.replicas)


class EngineParts:
    """EnginesPort: the trainer puts, the board tells, the engines load, the trainer compares."""

    def __init__(
        self,
        group: TrainerGroup,
        board: ActorHandle,
        *,
        epoch: int,
        deadline_s: float,
    ) -> None:
        self._group = group
        self._board = board
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._own_parity: Float32s = np.empty(0, np.float32)

    async def offer(self, version: int) -> None:
        """Make `version` what the engines load next; do not wait for them."""
        with _rank_loss():
            try:
                await self._group.publish(self._board, self._epoch, version)
            except (TimeoutError, RayError) as error:
                raise PartLost(f"the weight board is lost: {error}") from error
            self._own_parity = await self._group.parity_logprobs()

    async def wait(self, version: int) -> PublishedVersion:
        """Wait until every engine holds the version last offered, and compare each with it."""
        # One is enough: an engine that is being replaced loads the version before it is ready.
        call = self._board.wait_published.remote(version, 1, self._deadline_s)
        try:
            report: PublishReport = await answer(
                call, part="weight board", deadline_s=self._deadline_s + RPC_DEADLINE_S
            )
        except WeightError as error:
            raise PartLost(str(error)) from error
        found = [replica.parity for replica in report.replicas if replica.parity is not None]
        return PublishedVersion(
            version=version,
            num_engines=len(report.replicas),
            parity_max=parity_difference(self._own_parity, found),
            wall_s=report.wall_s,
        )

    async def num_ready(self) -> int:
        return num_current(await board_status(self._board))
