"""Let an operator control a run: pause parts, write or restore checkpoints, and evaluate.

A supervisor's `Control` serves all its terms; a term lasts from a start or recovery to the next.
The database keeps all state that must last. Invariants: a pause is stored before the call returns,
and holds in every later term. One transaction records a return to a checkpoint and begins the next
term. No call waits for a training step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from actors.deadline import ActorLost, TaskSet
from actors.environment.settings import Sampling
from actors.trajectory_queue.messages import QueueStats
from actors.types import Task
from actors.weights.board import BoardStatus, ReplicaReport
from service.api.control import (
    CheckpointAnswer,
    ControlAnswer,
    ControlPort,
    ControlRefused,
    EvaluationAnswer,
    InFlightAnswer,
    OperationAnswer,
    OperationStatus,
    PoliciesAnswer,
    PolicyAnswer,
    ReplicaAnswer,
)
from service.launch.resume import find_faults
from service.report.document import Phase
from service.run.engines import Engines
from service.run.pauses import Pauses
from service.run.recorder import RunRecorder
from service.run.term import Term
from service.store.controls import CallAnswer, ControlStore, PauseAnswer
from service.store.errors import LeaseLost, StoreError
from service.store.leases import Lease
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore
from service.store.tables import Pausable
from service.telemetry.evaluation import evaluation_file, evaluation_record
from service.telemetry.records import EvaluationRecord
from service.worker_thread import WorkerThread

log = logging.getLogger("rayloom.control")

KEPT_OPERATIONS = 256
# Seconds that `pause` waits for an admission in progress, or until the engines hold their turns.
PASSED_LIMIT_S = 10.0
# Share of each environment actor's slots that an evaluation may use; training keeps the others.
EVALUATION_SLOTS_SHARE = 0.25
MAX_EVALUATED = 100_000
_KEPT_BY = "run.keep_checkpoints, run.keep_best"
OVER: frozenset[Phase] = frozenset({"stopping", "finished", "failed", "without its lease"})

Work = Callable[[OperationAnswer], Awaitable[OperationAnswer]]
"""A function that carries out an operation and returns the operation with its result."""


class Control(ControlPort):
    """The calls with which an operator controls a run, made only in the supervisor's event loop.

    `term` is the running term, or None between two terms.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        thread: WorkerThread,
        recorder: RunRecorder,
        engines: Engines,
        checkpoints: Path,
        read_queue: Callable[[], QueueStats | None],
    ) -> None:
        """Start without pauses; `begin_term` restores the stored ones.

        read_queue: function that returns the queue's latest known state.
        """
        self._run_store, self._store, self._thread = store, ControlStore(store), thread
        self._recorder, self._engines = recorder, engines
        self._checkpoints = checkpoints
        self._read_queue = read_queue
        self.pauses = Pauses()
        self.term: Term | None = None
        self.returning = asyncio.Event()
        """Set when the running term must end, to return to a checkpoint."""
        self._return: OperationAnswer | None = None
        """The return to a checkpoint that the next term completes; None if none is requested."""
        self._evaluating = ""
        """The id of the current evaluation; empty if there is none."""
        self._operations: OrderedDict[str, OperationAnswer] = OrderedDict()
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        """Held while a pause is stored and applied."""
        self._begun = TaskSet()
        self._is_restored = False

    # -- calls of the supervisor ----------------------------------------------------------------

    @property
    def returns_to(self) -> str:
        """The id of the checkpoint to which the next term must return; empty if there is none."""
        asked = self._return
        return "" if asked is None else asked.checkpoint or ""

    async def begin_term(self, lease: Lease) -> None:
        """Begin a term, after a start, a recovery or a return to a checkpoint.

        A return that an operator requested is now marked as done, or as failed if the term does not
        continue from the requested checkpoint. The first call in a supervisor's process also
        restores the pauses that operators set earlier.
        lease: names the term and the checkpoint from which the term continues. Raises: StoreError.
        """
        asked, self._return = self._return, None
        self.returning.clear()
        if asked is not None:
            is_there = lease.parent is not None and lease.parent.directory == asked.checkpoint
            detail = f"term {lease.term} continues from it"
            if not is_there:
                detail = "it was pruned meanwhile; the run continues from the newest"
            self._end(asked, detail, is_failed=not is_there)
        if not self._is_restored:
            self.pauses.restore(await self._thread.call(self._store.pauses))
            self._is_restored = True
            self._recorder.paused(self.pauses.paused)
            for pause in self.pauses.paused:
                self._recorder.notice(
                    f"{pause.part} is still paused; resume it with POST "
                    f"/api/v1/control/{pause.part}/resume"
                )

    def close(self, reason: str) -> None:
        """Mark all unfinished operations as failed, because the run has ended."""
        for operation in list(self._operations.values()):
            if operation.status is OperationStatus.RUNNING:
                self._end(operation, f"the run has ended: {reason}", is_failed=True)
        self._begun.cancel()

    # -- pauses ---------------------------------------------------------------------------------

    async def view(self) -> ControlAnswer:
        return ControlAnswer(
            phase=self._recorder.current_phase,
            paused=list(self.pauses.paused),
            in_flight=await self._in_flight(),
        )

    async def pause(self, part: Pausable, reason: str) -> ControlAnswer:
        """Pause admission, generation or training; return what is paused and in flight.

        A second pause has no effect. Raises: ControlRefused, LeaseLost, StoreError.
        """
        self._check_is_running()
        async with self._changing:
            if self.pauses.find(part) is None:
                pause = PauseAnswer(part=part, since=time.time(), reason=reason)
                await self._thread.call(
                    self._store.set_paused, part, pause, term=self._recorder.term_number
                )
                self.pauses.add(pause)
                await self._apply_pauses(part)
        with suppress(TimeoutError):
            async with asyncio.timeout(PASSED_LIMIT_S):
                await self.pauses.gate(part).until_passed()
                if part is Pausable.GENERATION:
                    await self._until_held()
        return await self.view()

    async def resume(self, part: Pausable) -> ControlAnswer:
        """Resume a part of the run if it is paused; return what is still paused and in flight.

        Raises: ControlRefused, LeaseLost, StoreError.
        """
        self._check_is_running()
        async with self._changing:
            if self.pauses.find(part) is not None:
                await self._thread.call(
                    self._store.set_paused, part, None, term=self._recorder.term_number
                )
                self.pauses.remove(part)
                await self._apply_pauses(part)
        return await self.view()

    async def _apply_pauses(self, changed: Pausable) -> None:
        """Show the pauses in the status and metrics; apply a changed pause of generation."""
        recorder = self._recorder
        if recorder.current_phase in ("training", "paused"):
            recorder.training(str(self.pauses))
        recorder.paused(self.pauses.paused)
        if changed is Pausable.GENERATION and self.term is not None:
            # If this term is lost, the next term begins with the stored pauses.
            with suppress(ActorLost):
                await self.term.apply_generation_pause()

    async def _until_held(self) -> None:
        while True:
            found = await self._in_flight()
            if found.engines_held == found.engines:
                return
            await asyncio.sleep(0.1)

    async def _in_flight(self) -> InFlightAnswer:
        stats, term = self._read_queue(), self.term
        status = await self._board_status()
        replicas = () if status is None else status.replicas
        return InFlightAnswer(
            admitted=stats.ledger.in_flight if stats else 0,
            playing=stats.num_handed_out if stats else 0,
            waiting=stats.num_waiting if stats else 0,
            step=None if term is None else term.step_in_hand,
            engines_held=sum(each.is_held for each in replicas),
            engines=len(replicas),
        )

    # -- checkpoints ----------------------------------------------------------------------------

    async def checkpoints(self) -> list[CheckpointAnswer]:
        """Return all checkpoints of the run, newest first, also pruned ones. Raises: StoreError."""
        return await asyncio.to_thread(self._read_checkpoints)

    def _read_checkpoints(self) -> list[CheckpointAnswer]:
        usable = {each.directory: each for each in self._run_store.checkpoints()}
        found: dict[str, Checkpoint] = {}
        for each in self._run_store.all_checkpoints():
            found.setdefault(each.directory, usable.get(each.directory, each))
        return [
            self._checkpoint_view(each, is_usable=name in usable) for name, each in found.items()
        ]

    def _checkpoint_view(self, found: Checkpoint, *, is_usable: bool) -> CheckpointAnswer:
        why_not = f"it was pruned ({_KEPT_BY}), or undone by a return to an older one"
        if is_usable:
            why_not = find_faults(self._checkpoints, [found]).get(found.directory, "")
        return CheckpointAnswer(
            id=found.directory,
            step=found.step,
            policy_version=found.policy_version,
            term=found.term,
            committed_at=found.committed_at,
            bytes=_size_of(self._checkpoints / found.directory),
            can_go_back=not why_not,
            why_not=why_not,
        )

    async def checkpoint(self) -> OperationAnswer:
        """Begin a checkpoint of the newest step; return the operation. Raises: ControlRefused."""
        term = self._training_term("a checkpoint")

        async def work(operation: OperationAnswer) -> OperationAnswer:
            found = await term.checkpoint()
            update = {"checkpoint": found.directory, "detail": f"step {found.step}"}
            return operation.model_copy(update=update)

        return self._begin("checkpoint", work, detail="after the current step")

    async def go_back(self, checkpoint_id: str) -> OperationAnswer:
        """End the term, so that the next term continues from a checkpoint; return the operation.

        checkpoint_id: the checkpoint's id or its step. Raises: ControlRefused, StoreError.
        """
        self._check_is_running()
        views = [
            each for each in await self.checkpoints() if checkpoint_id in (each.id, str(each.step))
        ]
        # If a step has several checkpoints, returns to earlier steps have undone all but one.
        found = next((each for each in views if not each.why_not), views[0] if views else None)
        if found is None:
            raise ControlRefused(
                "unknown",
                f"this run has no checkpoint {checkpoint_id!r}: it never existed, or it is pruned "
                f"({_KEPT_BY}); choose one of GET /api/v1/checkpoints",
            )
        if found.why_not:
            raise ControlRefused("gone", f"the run cannot go back to {found.id}: {found.why_not}")
        self._check_is_running()
        if self._return is not None:
            raise ControlRefused(
                "conflict",
                f"the run is going back to {self._return.checkpoint} already (operation "
                f"{self._return.id}); ask again when that is done",
            )
        self._return = self._add("return", detail="the term is being ended", checkpoint=found.id)
        self.returning.set()
        return self._return

    # -- evaluations ----------------------------------------------------------------------------

    async def evaluate(
        self, sampling: Sampling, *, num_tasks: int | None, task_ids: Sequence[str]
    ) -> OperationAnswer:
        """Begin to play held-out tasks during training; return the operation, which shows progress.

        num_tasks: number of held-out tasks to play, from the first on; None plays all. task_ids:
        ids of the tasks to play instead. Raises: ControlRefused.
        """
        term = self._training_term("an evaluation")
        if self.pauses.holds_generation:
            raise ControlRefused(
                "conflict",
                "generation is paused, so no turn would be sampled; resume it with POST "
                "/api/v1/control/generation/resume first",
            )
        if self._evaluating:
            raise ControlRefused(
                "conflict",
                f"an evaluation is running already (operation {self._evaluating}); wait for its "
                "end",
            )
        tasks = chosen_tasks(
            term.evaluation_tasks, sampling, num_tasks=num_tasks, task_ids=task_ids
        )
        if sampling.kept.structured_outputs is not None and not term.engines_read_text:
            raise ControlRefused(
                "conflict",
                "structured_outputs need engines that read text, and this run's do not; set "
                "evaluation.structured_outputs or rollouts.stop, and resume the run",
            )

        async def work(operation: OperationAnswer) -> OperationAnswer:
            try:
                record = await self._play(term, tasks, sampling, operation_id=operation.id)
            finally:
                self._evaluating = ""
            answer = EvaluationAnswer.model_validate(record)
            found = {"evaluation": answer, "detail": f"step {record.step}"}
            return operation.model_copy(update=found)

        operation = self._begin(
            "evaluation",
            work,
            detail=f"{len(tasks)} tasks, {sampling.num_samples} samples each",
        )
        self._evaluating = operation.id
        return operation

    async def _play(
        self, term: Term, tasks: Sequence[Task], sampling: Sampling, *, operation_id: str
    ) -> EvaluationRecord:
        """Play and record an evaluation. Raises: ActorLost, LeaseLost, StoreError."""
        recorder = self._recorder
        step, version = recorder.last_step, recorder.policy_version
        summaries = await term.evaluate(
            tasks,
            sampling,
            file=evaluation_file(step, operation_id),
            slots_share=EVALUATION_SLOTS_SHARE,
        )
        if term is not self.term:
            raise ActorLost("its term has ended")
        if not summaries:
            raise ActorLost(
                "the evaluation has no result: every environment actor was lost, or ended no "
                "rollout for too long, before it had played its part of the tasks; see the run's "
                "log for the causes, and request the evaluation again"
            )
        record = evaluation_record(
            step, summaries, version=version, sampling=sampling, is_scheduled=False
        )
        await recorder.evaluation(record)
        return record

    # -- operations -----------------------------------------------------------------------------

    async def operation(self, operation_id: str) -> OperationAnswer:
        """Return an operation's state. Raises: ControlRefused if the operation is unknown."""
        if (found := self._operations.get(operation_id)) is None:
            raise ControlRefused(
                "unknown",
                f"this run has no operation {operation_id!r}: it never existed, it is not among "
                f"the newest {KEPT_OPERATIONS}, or its supervisor has died; look for its result "
                "in the run's checkpoints and evaluations",
            )
        return found

    def _begin(
        self,
        kind: str,
        work: Callable[[OperationAnswer], Awaitable[OperationAnswer]],
        *,
        detail: str,
    ) -> OperationAnswer:
        operation = self._add(kind, detail=detail)
        self._begun.begin(self._follow(operation, work))
        return operation

    async def _follow(
        self,
        operation: OperationAnswer,
        work: Callable[[OperationAnswer], Awaitable[OperationAnswer]],
    ) -> None:
        failure = "an unexpected error; see the run's log"
        try:
            operation = await work(operation)
            failure = ""
        except (ActorLost, LeaseLost, StoreError) as error:
            failure = str(error)
        finally:
            # An operation that `close` has ended stays as it is.
            if self._operations.get(operation.id, operation).status is OperationStatus.RUNNING:
                self._end(operation, failure or operation.detail, is_failed=bool(failure))

    def _add(self, kind: str, *, detail: str, checkpoint: str | None = None) -> OperationAnswer:
        operation = OperationAnswer(
            # The id is also different from the ids of earlier supervisors' operations.
            id=f"op-{self._recorder.term_number}-{next(self._numbers)}",
            kind=kind,
            status=OperationStatus.RUNNING,
            created_at=time.time(),
            ended_at=None,
            detail=detail,
            checkpoint=checkpoint,
            evaluation=None,
        )
        self._operations[operation.id] = operation
        while len(self._operations) > KEPT_OPERATIONS:
            self._operations.popitem(last=False)
        return operation

    def _end(self, operation: OperationAnswer, detail: str, *, is_failed: bool = False) -> None:
        if operation.id in self._operations:
            status = OperationStatus.FAILED if is_failed else OperationStatus.DONE
            self._operations[operation.id] = operation.model_copy(
                update={"status": status, "ended_at": time.time(), "detail": detail}
            )

    # -- policies and calls ---------------------------------------------------------------------

    async def policies(self) -> PoliciesAnswer:
        """Return the policy versions of trainer, engines and checkpoints. Raises: StoreError."""
        term, status = self.term, await self._board_status()
        by_version: dict[int, list[str]] = {}
        for each in await self.checkpoints():
            if not each.why_not:
                by_version.setdefault(each.policy_version, []).append(each.id)
        trained = None if term is None else term.trained_version
        return policies_view(
            self._recorder.term_number,
            status,
            trained_version=trained,
            republished=() if term is None else term.republished,
            checkpoints=by_version,
            now=time.time(),
        )

    async def note_call(self, call: CallAnswer) -> None:
        """Store an operator's call in the database, and log it. Raises: LeaseLost, StoreError."""
        log.info(
            "admin call: caller=%r call=%r status=%d body=%r answer=%r",
            call.caller,
            call.call,
            call.status,
            call.body,
            call.answer,
        )
        await self._thread.call(self._store.add_call, call, term=self._recorder.term_number)

    async def calls(self, limit: int) -> Sequence[CallAnswer]:
        """Return the newest `limit` stored calls of operators, newest first. Raises: StoreError."""
        return await asyncio.to_thread(self._store.calls, limit=limit)

    async def _board_status(self) -> BoardStatus | None:
        with suppress(ActorLost):
            return await self._engines.status()
        return None

    def _check_is_running(self) -> None:
        phase = self._recorder.current_phase
        if phase in OVER:
            raise ControlRefused(
                "conflict",
                f"the run is {phase}, expected a running one; resume it with --resume, "
                "which keeps its pauses",
            )
        if self._recorder.term_number == 0:
            raise ControlRefused(
                "conflict", "the run has no lease yet; wait until /readyz says 200"
            )

    def _training_term(self, what: str) -> Term:
        self._check_is_running()
        if self.term is None or not self.term.is_training or self.returning.is_set():
            raise ControlRefused(
                "conflict",
                f"the run is {self._recorder.current_phase}, and {what} needs its trainer "
                "and its environment actors; wait until /readyz says 200",
            )
        return self.term


def chosen_tasks(
    held_out: Sequence[Task], sampling: Sampling, *, num_tasks: int | None, task_ids: Sequence[str]
) -> list[Task]:
    """Return the held-out tasks with the ids `task_ids`; without ids, the first `num_tasks` ones.

    num_tasks: None takes all held-out tasks. Raises: ControlRefused if a requested task is not held
    out, or if there are too many tasks.
    """
    if not held_out:
        raise ControlRefused(
            "conflict",
            "this run has no held-out tasks to evaluate (tasks.evaluation_tasks is 0); set it, and "
            "resume the run",
        )
    if task_ids:
        by_id = {task.task_id: task for task in held_out}
        if unknown := [each for each in task_ids if each not in by_id]:
            raise ControlRefused(
                "invalid",
                f"tasks names {', '.join(unknown[:8])}, expected some of the run's "
                f"{len(held_out)} held-out tasks, such as {held_out[0].task_id}",
            )
        tasks = [by_id[each] for each in task_ids]
    else:
        count = len(held_out) if num_tasks is None else num_tasks
        if count > len(held_out):
            raise ControlRefused(
                "invalid",
                f"num_tasks is {count}, expected at most {len(held_out)}, the number of held-out "
                "tasks (tasks.evaluation_tasks)",
            )
        tasks = list(held_out[:count])
    num_plays = len(tasks) * sampling.num_samples
    if num_plays > MAX_EVALUATED:
        raise ControlRefused(
            "invalid",
            f"{len(tasks)} tasks with {sampling.num_samples} samples each are {num_plays} "
            f"rollouts, expected at most {MAX_EVALUATED}; take fewer tasks or samples",
        )
    return tasks


def policies_view(
    term: int,
    status: BoardStatus | None,
    *,
    trained_version: int | None,
    republished: Sequence[int],
    checkpoints: dict[int, list[str]],
    now: float,
) -> PoliciesAnswer:
    """Return the policy versions that the trainer, an engine or a checkpoint has.

    status: None if the weight board does not answer. republished: see `Term.republished`.
    checkpoints: each version's checkpoint ids. now: seconds since 1970.
    """
    replicas = () if status is None else status.replicas
    # After a return, versions of different terms may have the same number but different weights.
    current = [each for each in replicas if each.term is not None and each.term == term]
    is_own = status is not None and status.term == term
    published = status.version if status is not None and is_own else None
    named = {each.version for each in current} | {trained_version, published} | {*checkpoints}

    def view(replica: ReplicaReport) -> ReplicaAnswer:
        since = None
        if status is not None and replica.loaded_at is not None:
            since = now - (status.now - replica.loaded_at)
        return ReplicaAnswer(
            id=replica.replica_id, version=replica.version, since=since, is_held=replica.is_held
        )

    return PoliciesAnswer(
        term=term,
        trained_version=trained_version,
        published_version=published,
        policies=[
            PolicyAnswer(
                version=version,
                is_trained=version == trained_version,
                is_published=version == published,
                is_republished=version in republished,
                checkpoints=checkpoints.get(version, []),
                replicas=[view(each) for each in current if each.version == version],
            )
            for version in sorted((each for each in named if each is not None), reverse=True)
        ],
        starting=[view(each) for each in replicas if each not in current],
    )


def _size_of(directory: Path) -> int | None:
    """Return a directory's size in bytes; None if it is missing, empty or being removed."""
    try:
        found = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    except OSError:
        return None
    return sum(found) if found else None
