"""The trajectory queue as the supervisor calls it; a queue that died is replaced during the call.

If the queue's process dies, Ray starts it again under the same handles, but without its state. A
`QueueCut` is the queue's state, with the events since the last cut. Every call that changes the
queue is answered with a cut. `RestartableQueue` gives a restarted queue the state of the newest cut
that it has processed, and then repeats the calls that the dead queue did not answer.

Invariants: cuts are processed in order, and their events and summaries are passed to the recorder.
A call returns only after its own cut is processed. Whatever the loop learns from a call is
therefore known to the recorder, and to a restarted queue. Rollouts that ended after the newest cut,
or whose trajectories were in the queue, are played again. A step that the loop has taken is not
taken a second time. `RestartableQueue` itself keeps the tasks of the groups in flight, because cuts
do not contain the data of tasks.
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
        """Give the term's first queue its initial state, so that it answers the other calls."""
        await self._remote("open", self._cuts.opening, self._whole_snapshot())

    async def admissible(self, timeout_s: float) -> list[OpenSlot]:
        """Wait up to `timeout_s` until the queue can admit groups; return the free group numbers.

        Call `admit` to give them tasks. Like the methods below, this method calls the queue actor's
        method of the same name, which explains it.
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
        """Fetch and record all events up to now; return the queue's state, with the tasks."""
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
        """Make a call that changes the queue; record the answer's events, and return its value.

        The answer contains a cut, which is the queue's state with the events since the last cut.
        Cuts are processed in order. The call completes even if the caller is cancelled; otherwise
        the cuts of later calls would wait forever for this call's cut. admitted: groups that this
        call adds to the queue.
        """
        call = self._changing.begin(self._make_change(method, *arguments, admitted=admitted))
        call.add_done_callback(_read_error)
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
        """Keep the queue's state and the tasks of its groups; record the events since the last cut.

        cut: the queue's reply to a call, with its state and these events. admitted: groups that
        this call added to the queue.
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

    The cuts may arrive in any order. Invariant: `take_in` returns whether its cut was kept, even if
    the queue has died meanwhile: a call whose cut was kept took effect, and is not made again.

    A cut is the queue's state with the events since the last cut. Each process of the queue has a
    number, and each of its cuts has this number as `opening`: 0 for the first process, 1 after the
    first restart. Cuts of a process that has been replaced are refused.
    """

    def __init__(self, keep: Keep) -> None:
        """Expect the cuts of the queue's first process.

        keep: called once for each cut, in order. Its second argument has the groups that were
        admitted by the call whose answer contained the cut.
        """
        self._keep = keep
        self._num_kept = [0]
        """The number of cuts that were passed to `keep`, for each opening."""
        self._waiting: dict[int, tuple[QueueCut, Sequence[GroupRequest]]] = {}
        """The newest opening's cuts that wait until an earlier cut arrives, by number."""
        self._news = asyncio.Condition()

    @property
    def opening(self) -> int:
        """The number of times that the queue was restarted. `take_in` accepts only cuts with this
        number as their `opening`."""
        return len(self._num_kept) - 1

    @property
    def num_kept(self) -> int:
        """The number of cuts (replies with the queue's state) that were passed to `keep` since the
        queue's last restart."""
        return self._num_kept[-1]

    async def take_in(self, cut: QueueCut, admitted: Sequence[GroupRequest]) -> bool:
        """Wait until this cut and all earlier cuts of the queue are passed to `keep`.

        A cut is the queue's state with the events since the last cut.
        Returns: False if the queue's process dies before the cut is passed on. The call whose
        answer contained the cut then had no effect.
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
        """Accept only the cuts of the restarted queue from now on; their numbers begin at 0."""
        async with self._news:
            self._num_kept.append(0)
            self._waiting.clear()
            self._news.notify_all()


def _read_error(call: asyncio.Task[Any]) -> None:
    """Retrieve a call's error, which asyncio would otherwise log if the caller was cancelled."""
    if not call.cancelled():
        call.exception()
