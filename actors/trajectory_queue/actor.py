"""The trajectory queue as a Ray actor: `QueueState` with waiting calls and stored payloads.

A finished trajectory must outlive the environment actor that played it, but Ray frees the objects
of a dead process. So `put` stores a block of trajectories as the queue's own object, and readers
get references. Every wait has a deadline, after which the answer is empty.

Every answer to the training loop contains a cut (`QueueCut`): the queue's state, and its events
since the last answer. Ray restarts a dead queue without its state. The supervisor then opens the
queue with the state of the newest cut, and other calls wait until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from actors.deadline import is_set_within
from actors.trajectory_queue.codec import TrajectoryBlock
from actors.trajectory_queue.groups import BlockRow, Group, GroupRequest, Rollout
from actors.trajectory_queue.ledger import RolloutOutcomes, TokenCounts
from actors.trajectory_queue.messages import (
    GroupToScore,
    OpenSlot,
    QueueCut,
    QueueSnapshot,
    QueueStats,
    Side,
    StepInput,
    StepTrajectory,
)
from actors.trajectory_queue.settings import QueueStateSettings
from actors.trajectory_queue.state import QueueState
from actors.types import RolloutAssignment, TrajectorySummary

Found = TypeVar("Found")


class TrajectoryQueue:
    """A run's queue. Environment actors and the gateway take and return rollouts; the supervisor
    calls the other methods.
    """

    def __init__(self, settings: QueueStateSettings) -> None:
        self._settings = settings
        self._state = QueueState(settings)
        self._opening: int | None = None
        self._opened = asyncio.Event()
        self._num_cuts = 0
        self._cut_snapshot: QueueSnapshot | None = None
        """The snapshot of the newest cut that contained a snapshot."""
        self._changed = asyncio.Event()
        self._num_changes_seen = 0
        self._blocked_s: dict[Side, float] = {"producer": 0.0, "consumer": 0.0}
        # Store blocks one after the other, so that an actor's puts keep their order.
        self._storing = asyncio.Lock()

    async def open(
        self, opening: int, snapshot: QueueSnapshot | None, *, keeps_taken: bool = False
    ) -> bool:
        """Start from `snapshot`, or empty if `snapshot` is None. Until then all other calls wait.

        Args: opening: how often Ray has restarted this queue. keeps_taken: whether the training
            loop still has the steps that it took but did not finalise. If False, the rollouts of
            these steps are played again.
        Returns: True if this call, or an earlier call with the same `opening`, opened the queue;
            False if a call with another `opening` did.
        """
        if self._opening is None:
            self._state = QueueState(self._settings, snapshot=snapshot, keeps_taken=keeps_taken)
            self._opening = opening
            self._opened.set()
        return self._opening == opening

    async def admissible(self, timeout_s: float) -> tuple[list[OpenSlot], QueueCut]:
        """Wait up to timeout_s until new tasks can be admitted.

        Returns: the free group numbers, to which `admit` can give tasks; an empty list if timeout_s
            passes first. Also a cut: the queue's state and its events since the last cut.
        """
        await self._opened.wait()
        return await self._until(self._state.admissible, timeout_s) or [], self._cut()

    async def admit(self, groups: Sequence[GroupRequest]) -> QueueCut:
        """Add new groups of rollouts to the queue; add none if one of the requests is refused.

        Each request gives a task to a free group number.
        Raises: ValueError if a number is not free or a group could never be trained.
        """
        await self._opened.wait()
        self._state.admit(groups)
        return self._cut()

    async def take_rollouts(
        self, actor_id: str, max_count: int, timeout_s: float, environments: Collection[str]
    ) -> list[RolloutAssignment]:
        """Wait up to timeout_s for rollouts of these environments to play; return at most
        max_count.

        Raises: ActorReleased if the actor has been released, also during the wait.
        """

        await self._opened.wait()

        def take() -> list[RolloutAssignment]:
            return self._state.take_rollouts(
                actor_id, max_count=max_count, environments=environments
            )

        def note(waited_s: float) -> None:
            if self._state.holds_back(environments):
                self._blocked_s["producer"] += waited_s

        return await self._until(take, timeout_s, note_wait=note) or []

    async def put(
        self, actor_id: str, block: TrajectoryBlock, summaries: Sequence[TrajectorySummary]
    ) -> list[bool]:
        """Accept ended attempts: summaries[i] describes row i of the block.

        Returns: for each attempt, whether it was accepted. A late result is not accepted and
            changes nothing.
        Raises: ValueError if rows and summaries differ in number.
        """
        await self._opened.wait()
        rows = await self._stored(block, len(summaries))
        accepted = [
            self._state.put(actor_id, summary, row)
            for summary, row in zip(summaries, rows, strict=True)
        ]
        self._notify()
        return accepted

    async def take_group(
        self, actor_id: str, timeout_s: float, environments: Collection[str]
    ) -> GroupToScore | None:
        """Wait up to timeout_s for a group that is to be scored together, and hand it out.

        Returns: the group; None if there is none within that time.
        Raises: ActorReleased if the actor has been released.
        """
        await self._opened.wait()

        def take() -> Group | None:
            return self._state.take_group(actor_id, environments=environments)

        group = await self._until(take, timeout_s)
        if group is None:
            return None
        (described,), blocks = _described([group.usable()])
        return GroupToScore(
            group_id=group.group_id,
            group_number=group.number,
            task=group.task,
            trajectories=described,
            blocks=blocks,
        )

    async def put_group(
        self,
        actor_id: str,
        group_id: str,
        block: TrajectoryBlock | None,
        summaries: Sequence[TrajectorySummary],
    ) -> bool:
        """Accept a group that an actor has scored.

        Args: block: The scored trajectories; None if their payloads were lost.
        Returns: whether the group was accepted; False for a late result, which changes nothing.
        """
        await self._opened.wait()
        if block is None:
            is_taken = self._state.lose_group(actor_id, group_id)
        else:
            rows = await self._stored(block, len(summaries))
            scored = list(zip(summaries, rows, strict=True))
            is_taken = self._state.put_group(actor_id, group_id, scored)
        self._notify()
        return is_taken

    async def take_step(self, timeout_s: float) -> tuple[StepInput | None, QueueCut]:
        """Wait up to timeout_s for the next step's closed groups, and take them; return None if the
        step is not complete within that time.
        """
        await self._opened.wait()

        def note(waited_s: float) -> None:
            self._blocked_s["consumer"] += waited_s

        taken = await self._until(self._state.take_step, timeout_s, note_wait=note)
        return None if taken is None else _step_input(*taken), self._cut()

    async def finalise(self, step: int, outcomes: RolloutOutcomes) -> tuple[TokenCounts, QueueCut]:
        """Record whether each rollout of a step was trained or evicted, and forget the step.

        Returns: counts of the tokens that were dropped since the last finalised step; the attempts
            that sampled them were in no step. Also a cut: the queue's state and its events since
            the last cut.
        Raises: ValueError (`QueueState.finalise`).
        """
        await self._opened.wait()
        dropped = self._state.finalise(step, outcomes)
        return dropped, self._cut()

    async def replay_lost(self, rollout_ids: Sequence[str]) -> QueueCut:
        """Play rollouts again, because their trajectories were lost.

        If a step has taken such a rollout, this step and all later ones are undone; the caller must
        take them again.
        """
        await self._opened.wait()
        self._state.replay_lost(rollout_ids)
        return self._cut()

    async def set_loaded_version(self, version: int) -> QueueCut:
        """Record that every ready engine holds the weights that step number `version` has produced.

        Raises: ValueError if `version` is lower than the number recorded before.
        """
        await self._opened.wait()
        self._state.set_loaded_version(version)
        return self._cut()

    async def release_actor(self, actor_id: str) -> int:
        """Take back the rollouts of a dead actor, and hand out no more rollouts under its id.

        Returns: the number of rollouts that it held.
        """
        await self._opened.wait()
        num_released = self._state.release_actor(actor_id)
        self._notify()
        return num_released

    async def give_back(self, actor_id: str) -> int:
        """Take back all rollouts of a live actor, which has dropped them.

        Returns: the number of rollouts that it held.
        """
        await self._opened.wait()
        num_held = self._state.give_back(actor_id)
        self._notify()
        return num_held

    async def hold(self, is_held: bool) -> None:
        """Stop handing out rollouts, or resume (`QueueState.hold`)."""
        await self._opened.wait()
        self._state.hold(is_held)
        self._notify()

    async def cancel_group(self, group_id: str) -> tuple[bool, QueueCut]:
        """Evict a group as cancelled; return False if it is gone or a step has taken it."""
        await self._opened.wait()
        is_cancelled = self._state.cancel_group(group_id)
        return is_cancelled, self._cut()

    async def cancel_all(self) -> QueueCut:
        """End the run: evict all rollouts that are in flight."""
        await self._opened.wait()
        self._state.cancel_all()
        return self._cut()

    async def stats(self) -> QueueStats:
        await self._opened.wait()
        return replace(self._state.stats(now=time.monotonic()), blocked_s=dict(self._blocked_s))

    async def cut(self) -> QueueCut:
        """Return a cut: the queue's state, and its events since any call last returned a cut."""
        await self._opened.wait()
        return self._cut()

    async def _stored(self, block: TrajectoryBlock, num_summaries: int) -> list[BlockRow]:
        """Store a block as an object that the queue owns, and return its rows."""
        if block.num_rows != num_summaries:
            raise ValueError(
                f"queue: got a block of {block.num_rows} rows with {num_summaries} summaries, "
                "expected one summary for each row"
            )
        async with self._storing:
            # Copy in a thread, because copying a large block would block every other call.
            reference = await asyncio.to_thread(ray.put, block)
        num_bytes, arrived_at = int(block.data.nbytes), time.monotonic()
        return [
            BlockRow(block=reference, row=row, num_bytes=num_bytes, arrived_at=arrived_at)
            for row in range(block.num_rows)
        ]

    def _cut(self) -> QueueCut:
        """Return the queue's state, and its events since the last call of this method.

        Call this directly after a change: during an await, another call could take the events.
        """
        self._notify()
        assert self._opening is not None
        drained = self._state.drain()
        snapshot = self._state.snapshot().without_task_data()
        is_new = snapshot != self._cut_snapshot
        self._cut_snapshot = snapshot
        cut = replace(
            drained,
            opening=self._opening,
            number=self._num_cuts,
            snapshot=snapshot if is_new else None,
        )
        self._num_cuts += 1
        return cut

    def _notify(self) -> None:
        if self._state.num_changes == self._num_changes_seen:
            return
        self._num_changes_seen = self._state.num_changes
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(
        self,
        find: Callable[[], Found | None],
        timeout_s: float,
        *,
        note_wait: Callable[[float], None] = lambda waited_s: None,
    ) -> Found | None:
        """Call `find` now and after each change, until it finds something or timeout_s has passed.

        note_wait: called after each wait for a change, with its duration in seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found, began = find(), time.monotonic()
            left = deadline - began
            if found or left <= 0:
                return found
            is_changed = await is_set_within(left, self._changed)
            note_wait(time.monotonic() - began)
            if not is_changed:
                return find()


def start_queue(settings: QueueStateSettings, *, strategy: Any = "DEFAULT") -> ActorHandle:
    """Start a queue that is not open yet. If it dies, Ray restarts it, and it must be opened again.

    strategy: Ray's scheduling strategy for the actor.
    """
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
    return ray.remote(**options)(TrajectoryQueue).remote(settings)


def _step_input(step: int, groups: Sequence[Group]) -> StepInput:
    described, blocks = _described([group.finished() for group in groups])
    return StepInput(step=step, groups=described, blocks=blocks)


def _described(
    groups: Sequence[Sequence[Rollout]],
) -> tuple[tuple[tuple[StepTrajectory, ...], ...], tuple[Any, ...]]:
    """Return the location (block and row) of each rollout, by group, and the list of blocks."""
    blocks: dict[object, int] = {}

    def describe(rollout: Rollout) -> StepTrajectory:
        assert rollout.payload is not None
        block = blocks.setdefault(rollout.payload.block, len(blocks))
        return StepTrajectory(rollout_id=rollout.rollout_id, block=block, row=rollout.payload.row)

    described = tuple(tuple(map(describe, group)) for group in groups)
    return described, tuple(blocks)
