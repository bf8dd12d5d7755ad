"""The trajectory queue as a Ray actor: `QueueState` with waiting calls and stored payloads.

Metadata stays in the actor; payloads lie in the object store. The actor owns them: Ray frees what
a dead process owned, and a finished trajectory has to outlive the environment actor that played
it, so `put` takes the block by value (large ones come through shared memory) and stores it under
the queue's own name. Readers get references. Every wait has a deadline; an empty answer means
that there was nothing until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from actors.deadline import is_set_within
from actors.trajectory_queue.codec import TrajectoryBlock
from actors.trajectory_queue.groups import BlockRow, Group, GroupRequest, Rollout
from actors.trajectory_queue.ledger import RolloutOutcome
from actors.trajectory_queue.messages import (
    Drained,
    OpenSlot,
    QueueCut,
    QueueSnapshot,
    QueueStats,
    StepInput,
    StepTrajectory,
)
from actors.trajectory_queue.settings import QueueStateSettings
from actors.trajectory_queue.state import QueueState
from actors.types import RolloutAssignment, TrajectorySummary

Found = TypeVar("Found")


class TrajectoryQueue:
    """One for a run. Called by environment actors (rollouts) and by the supervisor (the rest)."""

    def __init__(self, settings: QueueStateSettings, snapshot: QueueSnapshot | None = None) -> None:
        self._state = QueueState(settings, snapshot=snapshot)
        self._changed = asyncio.Event()
        self._num_changes_seen = 0

    async def admissible(self, timeout_s: float) -> list[OpenSlot]:
        """Group numbers that have no task, waited for up to timeout_s."""
        return await self._until(self._state.admissible, timeout_s) or []

    async def admit(self, groups: Sequence[GroupRequest]) -> None:
        """Give tasks to group numbers; all or none. Raises: ValueError, as QueueState.admit."""
        self._state.admit(groups)
        self._notify()

    async def take_rollouts(
        self, actor_id: str, max_count: int, timeout_s: float
    ) -> list[RolloutAssignment]:
        """Up to max_count rollouts to play, waited for up to timeout_s.

        Raises: ActorReleased once the actor was released, also in a wait that is under way.
        """

        def take() -> list[RolloutAssignment]:
            return self._state.take_rollouts(actor_id, max_count=max_count)

        return await self._until(take, timeout_s) or []

    async def put(
        self, actor_id: str, block: TrajectoryBlock, summaries: Sequence[TrajectorySummary]
    ) -> list[bool]:
        """Take in ended attempts: row i of the block is what summaries[i] describes.

        Returns: for each whether it was taken; False for a late result, which changes nothing.
        Raises: ValueError when rows and summaries differ in number.
        """
        if block.num_rows != len(summaries):
            raise ValueError(
                f"queue: a block of {block.num_rows} rows with {len(summaries)} summaries, "
                "expected one for each row"
            )
        reference = ray.put(block)
        accepted = [
            self._state.put(
                actor_id, summary, BlockRow(block=reference, row=row, num_bytes=summary.num_bytes)
            )
            for row, summary in enumerate(summaries)
        ]
        self._notify()
        return accepted

    async def take_step(self, timeout_s: float) -> StepInput | None:
        """The next step's closed groups, waited for up to timeout_s; None: not complete yet."""
        taken = await self._until(self._state.take_step, timeout_s)
        if taken is None:
            return None
        self._notify()
        return _step_input(taken[0], taken[1])

    async def finalise(self, step: int, outcomes: Sequence[RolloutOutcome]) -> None:
        """Let a step's rollouts leave, each once. Raises: ValueError, as QueueState.finalise."""
        self._state.finalise(step, outcomes)
        self._notify()

    async def replay_lost(self, rollout_ids: Sequence[str]) -> tuple[int, ...]:
        """Play again rollouts whose payload was lost. Returns: the steps rolled back, which have to
        be taken again."""
        rolled_back = self._state.replay_lost(rollout_ids)
        self._notify()
        return rolled_back

    async def set_loaded_version(self, version: int) -> None:
        """Every ready engine holds `version`. Raises: ValueError when it goes backwards."""
        self._state.set_loaded_version(version)
        self._notify()

    async def release_actor(self, actor_id: str) -> int:
        """An environment actor is dead: its rollouts are played again, its id is used up.

        Returns: how many rollouts it held.
        """
        num_released = self._state.release_actor(actor_id)
        self._notify()
        return num_released

    async def cancel_group(self, group_id: str) -> bool:
        """Evict a group as cancelled. Returns: False when it has left, or a step has taken it."""
        is_cancelled = self._state.cancel_group(group_id)
        self._notify()
        return is_cancelled

    async def cancel_all(self) -> int:
        """End the run. Returns: how many rollouts were in flight and are evicted now."""
        num_cancelled = self._state.cancel_all()
        self._notify()
        return num_cancelled

    async def drain(self) -> Drained:
        """Ledger events and summaries of accepted attempts since the last call."""
        return self._state.drain()

    async def stats(self) -> QueueStats:
        return self._state.stats()

    async def cut(self) -> QueueCut:
        """Drain and take a snapshot in one call, so that no event falls between the two."""
        drained = self._state.drain()
        return QueueCut(snapshot=self._state.snapshot(), drained=drained)

    def _notify(self) -> None:
        """Wake the waiting calls, if something has changed for any of them."""
        if self._state.num_changes == self._num_changes_seen:
            return
        self._num_changes_seen = self._state.num_changes
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, find: Callable[[], Found | None], timeout_s: float) -> Found | None:
        """Call `find` now and after each change, until it finds something or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            found = find()
            left = deadline - loop.time()
            if found or left <= 0:
                return found
            if not await is_set_within(left, self._changed):
                return find()


def start_queue(settings: QueueStateSettings, snapshot: QueueSnapshot | None = None) -> ActorHandle:
    """Start the queue, empty or as `snapshot` has it."""
    return ray.remote(num_cpus=0)(TrajectoryQueue).remote(settings, snapshot)


def _step_input(step: int, groups: Sequence[Group]) -> StepInput:
    """Describe a taken step; rows of one block share its reference."""
    blocks: dict[object, int] = {}

    def describe(rollout: Rollout) -> StepTrajectory:
        assert rollout.payload is not None
        block = blocks.setdefault(rollout.payload.block, len(blocks))
        return StepTrajectory(rollout_id=rollout.rollout_id, block=block, row=rollout.payload.row)

    described = tuple(tuple(map(describe, group.finished())) for group in groups)
    return StepInput(step=step, groups=described, blocks=tuple(blocks))
