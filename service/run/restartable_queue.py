"""The trajectory queue as the supervisor calls it; a queue that died is replaced during the call.

Ray starts a dead queue again under the same handles, but without its state. Therefore each reply to
a call that changes the queue contains a cut (`QueueCut`): the queue's state, and the events since
the last cut. `RestartableQueue` gives the newest state to a new queue, and repeats the calls
without a reply. Cuts do not contain the tasks; `RestartableQueue` keeps the tasks itself.

Invariant: a call returns only after its cut is processed. So a restarted queue knows everything
that earlier calls have returned, and no step is taken twice. Rollouts that ended after the newest
cut are played again, and so are rollouts whose trajectories were in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from actors.deadline import ActorLost, TaskSet, retry
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.groups import FailedGroups, GroupRequest
from actors.trajectory_queue.ledger import RolloutOutcomes, TokenCounts
from actors.trajectory_queue.messages import (
    OpenSlot,
    QueueCut,
    QueueSnapshot,
    QueueStats,
    StepInput,
)
from actors.trajectory_queue.settings import QueueStateSettings
from actors.types import Task
from service.remote_calls import await_reply
from service.run.health import FaultCount
from service.run.recorder import RunRecorder
from service.run.remote_handles import RPC_DEADLINE_S

# Seconds within which a queue that died must be open again.
REOPEN_LIMIT_S = 120.0
# Number of deaths without a finalised step between them; more end the term.
MAX_DEATHS = 5
NAME = "trajectory queue"


class RestartableQueue:
    """A handle of the trajectory queue; if the queue dies, its calls are repeated with a new queue.

    Call `open` first; every call may raise ActorLost.
    """

    def __init__(
        self,
        settings: QueueStateSettings,
        snapshot: QueueSnapshot | None,
        *,
        recorder: RunRecorder,
        strategy: Any = "DEFAULT",
    ) -> None:
        """Start the queue's process.

        snapshot: the state from which the term continues; None starts with an empty queue.
        recorder: receives the queue's events and the summaries of ended rollouts.
        """
        self.actor: ActorHandle = start_queue(settings, strategy=strategy)
        self.failed_groups: FailedGroups | None = None
        """The groups that failed since the last usable group, as of the newest cut.

        None if no group has failed since.
        """
        self._recorder = recorder
        self._snapshot = snapshot
        groups = snapshot.groups if snapshot else ()
        self._tasks: dict[int, Task] = {group.number: group.task for group in groups}
        """The task of each group of the snapshot, by group number."""
        self._is_held = False
        self._cuts = CutsInOrder(self._keep)
        self._reopening = asyncio.Lock()
        self._changing = TaskSet()
        self._deaths = FaultCount(limit=MAX_DEATHS)

    async def open(self) -> None:
        """Give the queue the state from which it starts; all other calls wait for this call."""
        await self._remote("open", self._cuts.opening, self._whole_snapshot())

    async def admissible(self, timeout_s: float) -> list[OpenSlot]:
        """Wait up to `timeout_s` until the queue can admit groups; return the free group numbers.

        `admit` then gives a task to each group number. This method and the methods below call the
        queue actor's methods with the same names; see their docstrings
        (`actors.trajectory_queue.actor`).
        """
        slots: list[OpenSlot] = await self._change("admissible", timeout_s)
        return slots

    async def admit(self, groups: Sequence[GroupRequest]) -> None:
        await self._change("admit", groups, admitted=groups)

    async def take_step(self, timeout_s: float) -> StepInput | None:
        taken: StepInput | None = await self._change("take_step", timeout_s)
        return taken

    async def finalise(self, step: int, outcomes: RolloutOutcomes) -> TokenCounts:
        dropped: TokenCounts = await self._change("finalise", step, outcomes)
        self._deaths.progressed()
        return dropped

    async def replay_lost(self, rollout_ids: Sequence[str]) -> None:
        await self._change("replay_lost", rollout_ids)

    async def set_loaded_version(self, version: int) -> None:
        await self._change("set_loaded_version", version)

    async def cancel_group(self, group_id: str) -> bool:
        is_cancelled: bool = await self._change("cancel_group", group_id)
        return is_cancelled

    async def cancel_all(self) -> None:
        await self._change("cancel_all")

    async def cut(self) -> QueueSnapshot:
        """Return the queue's current state, with the tasks, to be stored in a checkpoint.

        All events up to this state have been passed to the recorder.
        """
        await self._change("cut")
        snapshot = self._whole_snapshot()
        assert snapshot is not None, "the first cut of a queue has a snapshot"
        return snapshot

    async def hold(self, is_held: bool) -> None:
        """Tell the queue to stop giving rollouts to actors, or to resume if `is_held` is False.

        A restarted queue keeps this state.
        """
        self._is_held = is_held
        await self._ask("hold", is_held)

    async def release_actor(self, actor_id: str) -> int:
        num_released: int = await self._ask("release_actor", actor_id)
        return num_released

    async def stats(self) -> QueueStats:
        stats: QueueStats = await self._ask("stats")
        return stats

    def kill(self) -> None:
        # End the calls in progress: they must not write to the recorder, which the next term uses.
        self._changing.cancel()
        ray.kill(self.actor)

    def _whole_snapshot(self) -> QueueSnapshot | None:
        return None if self._snapshot is None else self._snapshot.with_tasks(self._tasks)

    async def _change(
        self, method: str, *arguments: Any, admitted: Sequence[GroupRequest] = ()
    ) -> Any:
        """Make a call that changes the queue; process the cut in the answer, and return the value.

        admitted: the new groups, if the call is `admit`.
        """
        call = self._changing.begin(self._make_change(method, *arguments, admitted=admitted))
        call.add_done_callback(_read_error)
        # Not cancelled with its caller: the cuts of later calls wait for this call's cut.
        return await asyncio.shield(call)

    async def _make_change(
        self, method: str, *arguments: Any, admitted: Sequence[GroupRequest]
    ) -> Any:
        while True:
            reply = await self._ask(method, *arguments)
            value, cut = (None, reply) if isinstance(reply, QueueCut) else reply
            if await self._cuts.take_in(cut, admitted):
                return value

    async def _ask(self, method: str, *arguments: Any) -> Any:
        while True:
            opening = self._cuts.opening
            try:
                return await self._remote(method, *arguments)
            except ActorLost as loss:
                await self._reopen(loss, opening)

    async def _remote(self, method: str, *arguments: Any, **named: Any) -> Any:
        call = getattr(self.actor, method).remote(*arguments, **named)
        return await await_reply(call, name=NAME, deadline_s=RPC_DEADLINE_S)

    def _keep(self, cut: QueueCut, admitted: Sequence[GroupRequest]) -> None:
        """Keep the queue's state and the tasks of its groups; pass its events to the recorder.

        admitted: the new groups, if the cut is the answer to `admit`.
        """
        if cut.snapshot is not None:
            tasks = self._tasks | {request.group_number: request.task for request in admitted}
            self._tasks = {group.number: tasks[group.number] for group in cut.snapshot.groups}
            self._snapshot = cut.snapshot
        self.failed_groups = cut.failed_groups
        self._recorder.events(cut.events)
        self._recorder.rollouts(cut.summaries)

    async def _reopen(self, loss: ActorLost, opening: int) -> None:
        """Open the queue that Ray starts in place of a dead one, unless another call has done so.

        opening: number of the queue's restarts before the call that failed.
        Raises: ActorLost if queues die repeatedly, or Ray starts no new queue.
        """
        async with self._reopening:
            if opening != self._cuts.opening:
                return
            self._deaths.count()
            if self._deaths.are_too_many or isinstance(loss.__cause__, ActorDiedError):
                raise loss
            if isinstance(loss.__cause__, TimeoutError):
                ray.kill(self.actor, no_restart=False)
            await self._cuts.begin_next()
            await retry(self._open_next, on=ActorLost, limit_s=REOPEN_LIMIT_S)
            self._recorder.replaced(
                "queue",
                f"{loss}; its successor continues, and the rollouts in flight are played again",
            )

    async def _open_next(self) -> None:
        is_open = await self._remote(
            "open", self._cuts.opening, self._whole_snapshot(), keeps_taken=True
        )
        if not is_open:
            # The queue had not died: it was only unreachable, and is open with a newer state.
            ray.kill(self.actor, no_restart=False)
            raise ActorLost(f"the {NAME} did not answer in time and was killed")
        if self._is_held:
            await self._remote("hold", True)


Keep = Callable[[QueueCut, Sequence[GroupRequest]], None]


class CutsInOrder:
    """A buffer that passes on the queue's cuts in the order of their numbers, in one event loop.

    A cut is a part of the queue's answer to a call: the queue's state, with the events since the
    last cut. Cuts may arrive in any order.

    A restarted queue numbers its cuts from 0 again. The field `opening` of a cut says which process
    made it: 0 is the first process, 1 is the process after the first restart. Cuts of a dead
    process that were not yet passed on are refused: their calls had no effect, and must be
    repeated.
    """

    def __init__(self, keep: Keep) -> None:
        """Expect cut 0 of the queue's first process as the next cut.

        keep: called once for each cut, in their order, with the cut and the groups that were
        admitted with it.
        """
        self._keep = keep
        self._num_kept = [0]
        """The number of cuts that were passed to `keep`, for each opening."""
        self._waiting: dict[int, tuple[QueueCut, Sequence[GroupRequest]]] = {}
        """The newest opening's cuts that wait until an earlier cut arrives, by number."""
        self._news = asyncio.Condition()

    @property
    def opening(self) -> int:
        """Number of the queue's restarts, which identifies the queue's current process.

        Each cut (reply with the queue's state) has the number of the process that made the cut.
        `take_in` accepts only cuts of the current process.
        """
        return len(self._num_kept) - 1

    @property
    def num_kept(self) -> int:
        """The number of cuts (replies with the queue's state) that were passed to `keep` since the
        queue's last restart."""
        return self._num_kept[-1]

    async def take_in(self, cut: QueueCut, admitted: Sequence[GroupRequest]) -> bool:
        """Pass a cut (the queue's state from a reply) to `keep`, after all earlier cuts.

        If an earlier cut has not arrived yet, wait for the earlier cut.
        admitted: the new groups, if the cut is from the reply to `admit`; otherwise empty.
        Returns: False if the queue's process died before the cut was passed to `keep`. Then the
        call that the cut answers had no effect, and must be repeated.
        """

        def is_kept() -> bool:
            return cut.number < self._num_kept[cut.opening]

        async with self._news:
            if cut.opening == self.opening:
                self._waiting[cut.number] = cut, admitted
            while (following := self._waiting.pop(self.num_kept, None)) is not None:
                self._keep(*following)
                self._num_kept[-1] += 1
            self._news.notify_all()
            await self._news.wait_for(lambda: is_kept() or cut.opening != self.opening)
            return is_kept()

    async def begin_next(self) -> None:
        """Accept from now on only the cuts of the restarted queue, beginning with number 0."""
        async with self._news:
            self._num_kept.append(0)
            self._waiting.clear()
            self._news.notify_all()


def _read_error(call: asyncio.Task[Any]) -> None:
    """Retrieve a call's error, which asyncio would otherwise log if the caller was cancelled."""
    if not call.cancelled():
        call.exception()
