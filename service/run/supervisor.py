"""The supervisor: an actor that runs a run's terms (`term`), one after another.

A term is the time under one lease of the run's database; one process at a time has the lease. If an
actor is lost, the next term continues from the newest checkpoint. If another process takes the
lease, the supervisor ends. The run's actors are children of the supervisor and end with it, except
the engines, the weight board and the metrics endpoint. `run_view` has the status that the command
line and the Ray Serve entry point show.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal

from actors.deadline import ActorLost, TaskSet, beside, race
from actors.metrics import Metrics
from actors.trainer.checkpoint import CheckpointError, has_digests
from actors.trainer.group import TrainerStartFailed
from service.access.keys import NamedKey
from service.api.schemas import ReadyAnswer
from service.backlog.queue import SubmissionQueue
from service.config.tree import Config
from service.inference.settings import EngineSettings
from service.inspect.listing import Filters, JournalAnswer, Place, journal_page
from service.inspect.view import trajectory_json
from service.intake.listing import (
    FeedPage,
    SessionFilter,
    SessionPage,
    SessionPlace,
    TaskFilter,
    TaskPage,
)
from service.intake.submission import SubmissionView
from service.launch.placement import Role
from service.launch.resume import fallback_notice, find_faults
from service.launch.run_dir import RunDir, configure_logging, write_config
from service.report.document import Phase, RunPicture
from service.run.checkpoint_uploads import uploads_of
from service.run.control import Control
from service.run.engines import Engines
from service.run.hacking_watch import watch_of
from service.run.health import Cursor, Ending, FaultCount, RunFailed, RunStatus
from service.run.recorder import RunRecorder
from service.run.run_view import RunView
from service.run.term import ParentUnusable, Term
from service.run.traces import traces_to
from service.store.controls import add_key, read_keys, revoke_key
from service.store.errors import LeaseHeld, LeaseLost, StoreError
from service.store.leases import RENEW_EVERY_S, Lease, own_name
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore
from service.store.tables import RunKind
from service.trackers.trackers import trackers_of
from service.worker_thread import WorkerThread

log = logging.getLogger("rayloom.supervisor")
# Errors whose text explains the end of a run; they are logged without a traceback.
_EXPLAINED = (RunFailed, TrainerStartFailed, StoreError, CheckpointError)


WhenHeld = Literal["refuse", "wait", "take over"]
"""The action of a new supervisor if a live process already owns the run.

refuse: it raises LeaseHeld. wait: it waits until the owner shows no more signs of life. take over:
it takes the run from the owner.
"""


class GoingBack(Exception):
    """Raised to end a term if an operator requested the return to a checkpoint.

    The next term continues from this checkpoint.
    """

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"going back to checkpoint {self.checkpoint}, as an operator requested"


class Supervisor:
    """The Ray actor that runs the terms of a run; `status` and `stop` may be called at any time."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        engines: EngineSettings,
        run_id: str,
        endpoint: Any,
        is_service: bool = False,
        when_held: WhenHeld = "refuse",
        replaces: str = "",
        returns_to: str = "",
        notice: str = "",
        root_process: int | None = None,
    ) -> None:
        """Open the run's database and prepare the supervisor's parts.

        Args: endpoint: the actor that serves the run's metrics. is_service: whether clients submit
        the tasks; otherwise the tasks are those of `config`. when_held: what to do if a live
        process owns the run. replaces: HOST:PID of an owner that is known to be dead; empty if
        there is none. returns_to: directory of the checkpoint from which the first term continues;
        empty for the newest. notice: a warning for the user; empty for none. root_process: the
        process that started the run's own Ray; its memory and its descendants' memory are measured.
        None if the run uses a cluster.
        """
        configure_logging(str(run_dir.log_file))
        self._config = config
        self._run_dir = run_dir
        self._model = engines.model
        self._run_id = run_id
        self._metrics = Metrics()
        self._store = RunStore(
            run_dir.database_url,
            may_be_older=True,
            count_failure=self._metrics.database_secret_failures.inc,
        )
        self._thread = WorkerThread("store", expected=LeaseLost)
        self._kind = RunKind.SERVE if is_service else RunKind.TRAIN
        self._when_held, self._replaces, self._returns_to = when_held, replaces, returns_to
        self._leasing = asyncio.Lock()
        """Held while a lease is taken or renewed."""
        self._lost: LeaseLost | None = None
        """The error that every later call raises, because another process has taken over the run.

        None while this process owns the run.
        """
        self._submissions: SubmissionQueue | None = None
        if is_service:
            self._submissions = SubmissionQueue(
                self._store,
                thread=self._thread,
                settings=config.service,
                groups_per_step=config.algorithm.groups_per_step,
                policy=config.outcome_policy,
            )
        of_clients = self._submissions
        self._traces = traces_to(
            config.tracing,
            run=config.run.name,
            accepted_at=of_clients.accepted_at if of_clients else lambda group_id: None,
        )
        self._recorder = RunRecorder(
            self._store,
            self._metrics,
            thread=self._thread,
            num_steps=config.run.steps,
            submissions=self._submissions,
            traces=self._traces,
            trackers=trackers_of(config, run_dir, run_id=run_id, store=self._store),
            hacking=watch_of(config, run_dir, model=self._model),
            uploads=uploads_of(config, run_dir, metrics=self._metrics),
        )
        self._engines = Engines(
            engines,
            run_id=run_id,
            orphan_timeout_s=config.run.orphan_timeout_s,
            has_api=is_service,
        )
        self._control = Control(
            self._store,
            thread=self._thread,
            recorder=self._recorder,
            engines=self._engines,
            checkpoints=run_dir.checkpoints,
            read_queue=lambda: self._view.queue_stats,
        )
        self._view = RunView(
            config,
            run_dir,
            store=self._store,
            thread=self._thread,
            recorder=self._recorder,
            engines=self._engines,
            metrics=self._metrics,
            endpoint=endpoint,
            root_process=root_process,
            read_term=lambda: self._control.term,
        )
        self._held_term = 0
        """The number of the newest term whose lease this supervisor took; 0 before the first."""
        self._roles_offered: frozenset[Role] = frozenset()
        self._unreadable: dict[str, str] = {}
        """The reason why a checkpoint cannot be loaded, by the checkpoint's directory.

        No term continues from such a checkpoint.
        """
        self._is_stopping = self._is_over = False
        if notice:
            self._recorder.notice(notice)
        log.info("run directory %s", run_dir.path)

    async def run(self) -> Ending:
        """Run terms until the run ends, and write the report.

        Returns: how the run ended.
        Raises: RunFailed if the run makes no progress; TrainerStartFailed; ActorLost after too many
        recoveries; LeaseLost; StoreError if no checkpoint is left or the database cannot be
        written; CheckpointError if a checkpoint cannot be written; any error that a bug causes.
        """
        helpers = TaskSet()
        helpers.begin(self._view.observe_forever())
        helpers.begin(self._view.push_forever())
        helpers.begin(self._view.measure_memory_forever())
        # The lease is renewed also while the report is written.
        renewing = helpers.begin(self._renew_forever())
        try:
            # A cancelled term ends its ranks and environment actors at once.
            reason = await beside(self._run_terms(), asyncio.shield(renewing))
        except LeaseLost as loss:
            self._lost = loss
            log.error("%s", loss)
            await self._end("without its lease", str(loss))
            raise
        except _EXPLAINED as error:
            log.error("failed: %s", error)
            await self._end("failed", str(error))
            raise
        except Exception as error:
            # The outermost frame of a run: any error is recorded and raised again.
            log.exception("the run failed")
            await self._end("failed", f"{type(error).__name__}: {error}")
            raise
        else:
            has_report = await self._end("finished", reason)
            return Ending(
                reason=reason,
                has_report=has_report,
                was_stopped=self._is_stopping,
                peak_memory_bytes=self._view.peak_memory_bytes,
            )
        finally:
            await self._engines.stop()
            await helpers.end()
            await self._view.push(is_last=True)
            await self._recorder.close_trackers(is_taken_over=self._lost is not None)
            await self._recorder.close_uploads(is_taken_over=self._lost is not None)
            await self._thread.call(self._leave_store)
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            self._is_over = True

    async def is_over(self) -> bool:
        """Return whether the run has ended and its engines and its database are released."""
        return self._is_over

    def _leave_store(self) -> None:
        with suppress(LeaseLost, StoreError):
            self._store.release(self._held_term)
        self._store.close()

    async def stop(self, grace_s: float | None = None) -> None:
        """End the run after the current step and its checkpoint, or at once during the start.

        grace_s: after this many seconds, a step whose update is not applied yet is abandoned; None
        sets no limit. If `stop` is called again, the grace period that ends first counts. After the
        run's end, do nothing.
        """
        if self._view.exit_reason is not None:
            return
        self._is_stopping = True
        term = self._control.term
        is_training = term is not None and term.is_training
        detail = "after the current step" if is_training else "during the start"
        if is_training and grace_s is not None:
            detail += f", or in {grace_s:g} s without it"
        self._recorder.phase("stopping", detail)
        if term is not None:
            term.request_stop(grace_s=grace_s)

    async def submit(self, offers: Sequence[bytes]) -> list[bytes | Exception]:
        """Accept submissions of clients, and return a reply or an error for each.

        offers: the submissions, each packed with msgpack. Raises: LeaseLost.
        """
        return await self._own_submissions.submit_packed(offers)

    async def submission(
        self, submission_id: str, sees: str | None = None
    ) -> SubmissionView | None:
        """Return the state of a submission; None if it is unknown or not visible.

        sees: the tenant whose submissions are visible, or None for all. Raises: LeaseLost,
        StoreError.
        """
        return await self._own_submissions.view(submission_id, sees=sees)

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Return a page of the tasks that clients submitted. Raises: LeaseLost, StoreError."""
        return await self._own_submissions.page(wanted, after=after, limit=limit)

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        """Return a page of the list of sessions. Raises: LeaseLost, StoreError."""
        return await self._own_submissions.sessions(wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Return a page of the feed, which has the events of tasks, rollouts and sessions.

        after: number of the last entry that the caller has read. sees: the tenant whose entries are
        visible, or None for all. Raises: LeaseLost, StoreError.
        """
        return await self._own_submissions.feed(after=after, limit=limit, sees=sees)

    async def status(self, cursor: Cursor) -> RunStatus:
        return self._view.status(cursor)

    async def readiness(self) -> ReadyAnswer:
        return self._view.readiness()

    async def picture(self, *, term: int, after: int) -> RunPicture:
        """Return the data of the run's web page, with the steps after step `after`.

        term: the term in which the caller read its earlier steps; if another term runs now, return
        all steps. Raises: LeaseLost, StoreError.
        """
        self._check_owned()
        return await self._view.picture(term=term, after=after)

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalAnswer:
        """Return a page of stored trajectories.

        Raises: StoreError for a damaged file; ActorLost.
        """
        return await self._view.read_journal(journal_page, wanted, after)

    async def trajectory(self, name: str) -> bytes | None:
        """Return a stored trajectory as JSON; None if it is unknown.

        Raises: StoreError; ActorLost.
        """
        return await self._view.read_journal(trajectory_json, name)

    async def cancel(self, submission_id: str, sees: str | None = None) -> SubmissionView | None:
        """Cancel a submission, unless a training step has already taken its group.

        sees: the tenant whose submissions are visible, or None for all. Returns: the submission's
        state; None if it is unknown or not visible. Raises: LeaseLost, StoreError.
        """
        return await self._own_submissions.cancel(submission_id, evict=self._evict, sees=sees)

    async def keys(self) -> tuple[NamedKey, ...]:
        """Return the named keys of the run's API, revoked ones too. Raises: StoreError."""
        return await self._thread.call(read_keys, self._store)

    async def add_key(self, key: NamedKey) -> bool:
        """Add a named key; return False if name or digest is taken, or there are too many keys.

        Raises: StoreError.
        """
        return await self._thread.call(add_key, self._store, key)

    async def revoke_key(self, name: str) -> NamedKey | None:
        """Revoke a named key permanently; return it, or None if it is unknown.

        Raises: StoreError.
        """
        return await self._thread.call(revoke_key, self._store, name)

    async def gateway(self) -> Any:
        """Return the handle of the gateway, the actor that serves sessions; None without one."""
        term = self._control.term
        return None if term is None else term.gateway

    async def control(self, call: str, *arguments: Any, **named: Any) -> Any:
        """Call the method `call` of `Control`, and return its answer.

        Raises: ControlRefused, LeaseLost, StoreError.
        """
        self._check_owned()
        return await getattr(self._control, call)(*arguments, **named)

    async def _evict(self, group_id: str) -> bool:
        """Cancel a group of rollouts in the queue; return False if a step trains on it already."""
        # Without a queue, the next term cancels the group at its start.
        with suppress(ActorLost):
            term = self._control.term
            return term is None or await term.queue.cancel_group(group_id)
        return True

    @property
    def _own_submissions(self) -> SubmissionQueue:
        assert self._submissions is not None, "this run was not started as a service"
        self._check_owned()
        return self._submissions

    def _check_owned(self) -> None:
        """Raise LeaseLost if another process owns the run, so that no outdated state is shown."""
        if self._lost is not None:
            raise LeaseLost(str(self._lost))

    async def _run_terms(self) -> str:
        """Run the terms one after another; return why the run has ended."""
        faults, furthest_step = FaultCount(limit=self._config.run.max_recoveries), 0
        while True:
            try:
                return await self._run_one_term()
            except GoingBack as asked:
                self._recorder.notice(str(asked))
                self._recorder.phase("recovering", str(asked))
                # Steps that are trained again are progress.
                furthest_step = 0
            except ParentUnusable as error:
                # This checkpoint is not tried again, so each checkpoint fails at most once.
                self._unreadable[error.directory] = error.reason
            except CheckpointError:
                # A full disk can make this check fail too; then the first error is shown.
                with suppress(StoreError):
                    await self._thread.call(self._store.check_lease, self._held_term)
                raise
            except ActorLost as loss:
                # A process that took the run over may have ended our actors.
                await self._thread.call(self._store.check_lease, self._held_term)
                if self._recorder.checkpoint_step > furthest_step:
                    faults.progressed()
                    furthest_step = self._recorder.checkpoint_step
                faults.count()
                if faults.are_too_many:
                    raise
                if self._is_stopping:
                    return f"{loss}; as a stop was requested, the run ends at its newest checkpoint"
                self._recorder.replaced("term", f"{loss}; going back to the newest checkpoint")
                self._recorder.phase("recovering", str(loss))

    async def _run_one_term(self) -> str:
        """Run one term to its end; return why the run has ended.

        Raises: GoingBack, ActorLost, ParentUnusable if another term may follow; any error of `run`.
        """
        lease = await self._wait_for_lease()
        if lease is None:
            return "stopped before the run was free"
        await self._recorder.begin_term(lease)
        await self._control.begin_term(lease)
        # Run in a thread, because this asks Ray for the nodes and starts the queue's process.
        term = await asyncio.to_thread(
            Term,
            self._config,
            self._run_dir,
            model=self._model,
            run_id=self._run_id,
            lease=lease,
            engines=self._engines,
            store=self._store,
            recorder=self._recorder,
            pauses=self._control.pauses,
            submissions=self._submissions,
            roles_before=self._roles_offered,
        )
        self._control.term = term
        self._roles_offered = term.roles
        if self._is_stopping:
            term.request_stop()
        is_orderly, failure = False, None
        try:
            try:
                await self._unless_going_back(term.run())
            except RunFailed as error:
                failure = error
            is_orderly = True
            await self._view.observe_queue(term)
        finally:
            self._control.term = None
            await term.stop(is_orderly=is_orderly)
        if failure is not None:
            raise failure
        done = self._recorder.last_step
        if done >= self._config.run.steps:
            return f"all {done} steps are done"
        if term.is_solved:
            goal = self._config.run.stop_at_reward
            return f"solved: the last five steps reached {goal:g} (run.stop_at_reward), step {done}"
        return f"stopped after step {done} of {self._config.run.steps}"

    async def _unless_going_back(self, work: Coroutine[Any, Any, None]) -> None:
        """Await a term's work; if an operator requests a return, cancel it and raise GoingBack."""
        async with race(work, self._control.returning.wait()) as (working, asked):
            if asked.done():
                raise GoingBack(self._control.returns_to)
            working.result()

    async def _wait_for_lease(self) -> Lease | None:
        """Return the run's lease once no other process has it; None if a stop was requested first.

        Raises: LeaseHeld instead of waiting if `when_held` is not "wait", or if this supervisor had
        a lease before.
        """
        while True:
            try:
                async with self._leasing:
                    return await self._take_lease()
            except LeaseHeld as held:
                if self._when_held != "wait" or self._held_term:
                    raise
                self._recorder.starting(f"waiting: {held}")
            await asyncio.sleep(RENEW_EVERY_S)
            if self._is_stopping:
                return None

    async def _take_lease(self) -> Lease:
        """Take the lease of a new term, and return it.

        Raises: LeaseHeld; LeaseLost; StoreError if no checkpoint is readable.
        """
        lease, commits = await self._thread.call(self._take_readable)
        self._view.begin_term(lease)
        used = [commit for commit in commits if lease.parent and commit.id == lease.parent.id]
        if used and used[0] is not commits[0] and commits[0].directory in self._unreadable:
            self._recorder.notice(fallback_notice(self._unreadable, commits[0], used[0]))
        if used and self._held_term == 0:
            await self._notice_parent(used[0])
        # `_renew_forever` renews this term as soon as it gets the lock.
        self._held_term = lease.term
        return lease

    async def _notice_parent(self, parent: Checkpoint) -> None:
        if parent.directory == self._returns_to:
            self._recorder.notice(f"going back to {parent.directory}, as --checkpoint requests")
        with suppress(CheckpointError):
            if not await asyncio.to_thread(
                has_digests, self._run_dir.checkpoints / parent.directory
            ):
                self._recorder.notice(
                    f"{parent.directory} was written by an older version and has no digests: "
                    "changed bytes in it would not be noticed; the next checkpoint has them"
                )

    def _take_readable(self) -> tuple[Lease, list[Checkpoint]]:
        """Take the lease of a new term; return the lease and all checkpoints.

        The term continues from the requested checkpoint, or else from the newest intact checkpoint.
        """
        commits = self._store.checkpoints()
        sound = [commit for commit in commits if commit.directory not in self._unreadable]
        self._unreadable |= find_faults(self._run_dir.checkpoints, sound)
        is_first = self._held_term == 0
        lease = self._store.acquire_lease(
            owner=own_name(),
            directory=str(self._run_dir.path),
            kind=self._kind,
            passed_over=self._unreadable.keys(),
            follows=None if is_first else self._held_term,
            unless_held=is_first and self._when_held != "take over",
            replaces=self._replaces,
            returns_to=self._control.returns_to or (self._returns_to if is_first else ""),
        )
        if is_first:
            # Only the owner of the run may write the configuration, so the lease comes first.
            write_config(self._run_dir, self._config)
        self._view.count_earlier(lease.parent)
        return lease, commits

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            # Without the lock, a renewal could mistake this process's own next lease for a lease of
            # another process.
            async with self._leasing:
                if term := self._held_term:
                    await asyncio.to_thread(self._store.renew, term)

    async def _end(self, phase: Phase, reason: str) -> bool:
        has_report = await self._view.end(phase, reason)
        self._control.close(reason)
        if self._submissions is not None:
            self._submissions.close(f"the run has ended: {reason}")
        return has_report
