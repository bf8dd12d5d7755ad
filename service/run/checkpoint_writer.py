"""Write a term's checkpoints, and commit each with the queue's state after the same step.

To commit a checkpoint is to store its name in the run's database, so that a later term can continue
from it. A checkpoint's files are written during the next step. In a run with clients' tasks,
rollouts may be evicted while the loop waits for a step. To make the evictions durable, the writer
commits the newest checkpoint again, with the queue's newer state. Only the loop calls the writer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from actors.deadline import ActorLost
from actors.trainer.checkpoint import CheckpointError
from actors.trajectory_queue.messages import QueueSnapshot
from service.run.loop_parts import LoopParts
from service.store.lineage import Checkpoint

# Writing a checkpoint's files costs more than committing existing files again.
FILES_FACTOR = 10
# Number of evicted rollouts after which a loop that waits for a step commits the evictions.
MAX_UNCOMMITTED = 1000
ENDED_UNSAVED = "the term ended before its checkpoint was committed"


class CheckpointWriter:
    """The writer of a term's checkpoints.

    It commits each checkpoint with the queue's state after the checkpoint's step.
    """

    def __init__(
        self,
        parts: LoopParts,
        *,
        call_trainer: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        """Start from the checkpoint from which the term continues.

        call_trainer: wrapper for calls of the trainer; `await call_trainer(call)` runs `call()`.
        If restarted ranks have unpublished weights, the wrapper publishes the weights and runs
        `call()` again.
        """
        self._parts, self._call_trainer = parts, call_trainer
        self.newest = parts.parent
        """The checkpoint that was committed last; None before the first."""
        self._committed_at = self._begun_at = time.monotonic()
        self._writing: asyncio.Task[None] | None = None
        """The task that commits the last checkpoint once the ranks have written it.

        None before the first checkpoint, and after `join`.
        """
        self._requests: dict[asyncio.Future[Checkpoint], int] = {}
        """The unanswered requests for a checkpoint, each with the earliest step that it accepts."""
        self._is_over = False

    @property
    def is_written(self) -> bool:
        """Whether the checkpoint begun last is committed or lost, and `join` was not called yet."""
        return self._writing is not None and self._writing.done()

    @property
    def is_requested(self) -> bool:
        """Whether a checkpoint is requested, and no checkpoint is being written."""
        return bool(self._requests) and (self._writing is None or self._writing.done())

    async def request(self, last_step: int) -> Checkpoint:
        """Request a checkpoint of step `last_step` or a later step; return once it is committed.

        Raises: ActorLost if the term ends first.
        """
        if self._is_over:
            raise ActorLost(ENDED_UNSAVED)
        answer: asyncio.Future[Checkpoint] = asyncio.get_running_loop().create_future()
        self._requests[answer] = last_step
        return await answer

    async def save_requested(self, last_step: int) -> None:
        """Begin a checkpoint of step `last_step` if one is requested.

        If step `last_step` is committed already, answer the requests with its checkpoint instead.
        """
        await self.join()
        if (found := self._committed(last_step)) is not None:
            self._answer_requests(found)
        elif self._requests:
            await self._save(last_step)

    def is_due(self, last_step: int, begun_at: float) -> bool:
        """Return whether the loop must call `commit_evicted` now, while it waits for a step.

        This is so after many evictions, or some time after a single eviction. A run without
        clients' tasks never needs such a commit.

        last_step: the last finished step. begun_at: the time at which the loop began to wait.
        """
        # A run without clients' tasks ends after too many failed groups in a row.
        if self._writing is not None or not self._parts.has_clients:
            return False
        factor = FILES_FACTOR if self._committed(last_step) is None else 1
        num_evicted = self._parts.recorder.num_evicted
        waited_s = time.monotonic() - max(begun_at, self._committed_at)
        if num_evicted and waited_s >= factor * self._parts.commit_after_s:
            return True
        return num_evicted >= factor * MAX_UNCOMMITTED

    async def commit_evicted(self, last_step: int) -> None:
        """Store the evictions since the last commit, while the loop waits for the next step.

        The evictions are stored with a checkpoint of step `last_step`. An existing checkpoint of
        this step is committed again; otherwise a new checkpoint is begun.

        last_step: the last finished step; 0 before the first.
        """
        # After the commit, pruning can remove the evicted rollouts from the database.
        if (found := self._committed(last_step)) is not None:
            await self._commit_again(found)
            await self._parts.prune_checkpoints()
        else:
            await self._save(last_step)

    async def begin(self, step: int) -> None:
        """Wait for the previous commit, then make the ranks copy their state for a checkpoint."""
        await self.join()
        self._begun_at = time.monotonic()
        begin_save = partial(self._parts.trainer.begin_save, step, term=self._parts.term)
        await self._call_trainer(begin_save)

    async def commit_when_written(self, step: int) -> None:
        """Copy the queue's state now; start a task that commits it once the checkpoint is written.

        The task runs during the next step.
        """
        # Events that the queue records after this copy may be stored before the commit. A term that
        # continues from the copy ignores them, because their numbers are higher than the number of
        # the copy's last event.
        version, snapshot = self._parts.trainer.version, await self._parts.queue.cut()
        self._writing = asyncio.create_task(
            self._commit_written(step, version, snapshot), name="save"
        )

    async def join(self) -> None:
        """Wait until the checkpoint that was begun last is committed or lost."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def finish(self, last_step: int, *, is_complete: bool) -> None:
        """Commit step `last_step`, the last finished one, at the end of the loop.

        is_complete: whether the run has ended; then the queue's final state is committed even if
        step `last_step` is committed already.
        """
        await self.join()
        if is_complete and (found := self._committed(last_step)) is not None:
            await self._commit_again(found)
        # Repeat this if a rank is lost in the meantime; the trainer limits the number of restarts.
        while last_step > (0 if self.newest is None else self.newest.step):
            await self._save(last_step)
            await self.join()

    async def end(self) -> None:
        """Abandon the checkpoint that is being written; unanswered requests raise ActorLost."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        self._is_over = True
        for answer in self._requests:
            if not answer.done():
                answer.set_exception(ActorLost(ENDED_UNSAVED))

    def _committed(self, step: int) -> Checkpoint | None:
        return self.newest if self.newest is not None and self.newest.step == step else None

    async def _save(self, step: int) -> None:
        await self.begin(step)
        await self.commit_when_written(step)

    async def _commit_written(self, step: int, version: int, snapshot: QueueSnapshot) -> None:
        begun_at, recorder = self._begun_at, self._parts.recorder
        try:
            path = await self._parts.trainer.finish_save()
        except CheckpointError:
            recorder.checkpoint_failed()
            raise
        if path is None:
            recorder.checkpoint_failed()
            recorder.notice(
                f"step {step}: a rank was lost while its checkpoint was written; the run would "
                "resume from the earlier checkpoint until the next one is written"
            )
            return
        await recorder.checkpoint_written(path, seconds=time.monotonic() - begun_at)
        await self._commit(step, version, path.name, snapshot)
        await self._parts.trainer.committed(step, path)
        await self._parts.prune_checkpoints()

    async def _commit_again(self, found: Checkpoint) -> None:
        snapshot = await self._parts.queue.cut()
        await self._commit(found.step, found.policy_version, found.directory, snapshot)

    async def _commit(
        self, step: int, version: int, directory: str, snapshot: QueueSnapshot
    ) -> None:
        curriculum = self._parts.curriculum
        self.newest = await self._parts.recorder.checkpoint(
            step=step,
            version=version,
            directory=directory,
            snapshot=snapshot,
            curriculum=None if curriculum is None else curriculum.results,
        )
        self._committed_at = time.monotonic()
        self._answer_requests(self.newest)

    def _answer_requests(self, newest: Checkpoint) -> None:
        """Answer each request for the step of `newest` or for an earlier step."""
        served = [each for each, step in self._requests.items() if step <= newest.step]
        for answer in served:
            del self._requests[answer]
            if not answer.done():
                answer.set_result(newest)
