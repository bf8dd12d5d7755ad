"""Record what happens in the training loop: in the database, the metrics, the log and the
display."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from actors.deadline import ActorLost
from actors.metrics import Metrics, Part, PublishPhase
from actors.outcomes import UNSCORED
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from actors.trajectory_queue.messages import QueueSnapshot, QueueStats, Side
from actors.types import Outcome, TrajectorySummary
from actors.weights.board import StartStages
from service.backlog.queue import SubmissionQueue
from service.intake.listing import FeedEntry
from service.intake.submission import RolloutResult
from service.report.document import PHASES, Phase
from service.run.health import Tail
from service.run.stored_metrics import StoredMetrics
from service.run.traces import RolloutTraces
from service.store.controls import PauseAnswer
from service.store.leases import Lease
from service.store.lineage import Checkpoint, newest_records, read_history
from service.store.retention import forget
from service.store.run_store import RunStore
from service.store.tables import Pausable
from service.telemetry.memory import memory_shortage
from service.telemetry.records import (
    EvaluationRecord,
    Finding,
    StepRecord,
    evaluation_line,
    step_line,
)
from service.telemetry.reward_drop import RewardWatch
from service.telemetry.user_calls import UserCalls
from service.trackers.trackers import Trackers
from service.worker_thread import WorkerThread

if TYPE_CHECKING:
    # These modules import Ray, which a recorder does not need.
    from service.run.checkpoint_uploads import CheckpointUploads
    from service.run.hacking_watch import HackingWatch

log = logging.getLogger("rayloom.run")

# Number of newest records and notices that are kept for clients that read the status rarely.
KEPT_RECORDS = 256
KEPT_NOTICES = 256

# The first rollout with each of these outcomes causes a notice with its error; metrics and the
# report have the counts.
FAULTS = frozenset(
    {
        Outcome.AGENT_ERROR,
        Outcome.ENVIRONMENT_ERROR,
        Outcome.INFRASTRUCTURE_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.TOKEN_MISALIGNED,
        Outcome.WALL_TIMEOUT,
    }
)


class RunRecorder:
    """The recorder of what happens in the training loop.

    A process has one recorder for all its terms; each start, recovery and return to a checkpoint
    begins a new term of the run. Call `begin_term` before anything of a term is stored.

    `events` and `rollouts` update metrics, traces and submissions at once, but write nothing to the
    database. The next call of `step` or `checkpoint` stores the events and results together with
    the step or checkpoint, in one transaction. The asynchronous calls use the store in its thread,
    and complete even if the caller is cancelled. If a newer term exists, a write raises LeaseLost.
    """

    def __init__(
        self,
        store: RunStore,
        metrics: Metrics,
        *,
        thread: WorkerThread,
        num_steps: int,
        submissions: SubmissionQueue | None = None,
        traces: RolloutTraces | None = None,
        trackers: Trackers | None = None,
        hacking: HackingWatch | None = None,
        uploads: CheckpointUploads | None = None,
    ) -> None:
        """Start with the totals that the database has of earlier steps.

        submissions: receives the results of clients' rollouts; None if the run has no clients.
        traces, trackers, hacking, uploads: None if the run does not use them.
        """
        self._store = store
        self._thread = thread
        self._submissions = submissions
        self._traces = traces
        self._trackers = trackers
        self._hacking = hacking
        self._uploads = uploads
        self._metrics = metrics
        self._stored = StoredMetrics(metrics, store)
        self.term_number = 0
        """The number of the term under which the recorder writes; 0 before the first term."""
        self._num_steps = num_steps
        metrics.run.planned_steps.set(num_steps)
        self._pending: list[LedgerEvent] = []
        self._pending_results: list[RolloutResult] = []
        self.last_step = 0
        self.policy_version = 0
        """Policy version after `last_step`."""
        self.checkpoint_step = 0
        """Step of the newest committed checkpoint."""
        self._rewards = RewardWatch()
        self.steps = Tail[StepRecord](limit=KEPT_RECORDS)
        self.evaluations = Tail[EvaluationRecord](limit=KEPT_RECORDS)
        self.notices = Tail[str](limit=KEPT_NOTICES)
        self.stages = Tail[str](limit=KEPT_NOTICES)
        """A line for each ended stage of a start, with its seconds."""
        self._started_engines: set[str] = set()
        self.current_phase: Phase = "starting"
        self.phase_detail = ""
        metrics.run.phase_time.set(time.time())
        self.phase("starting", "")
        self.paused(())
        self.num_rollouts = 0
        self.num_sampled = 0
        self._faults_noticed: set[Outcome] = set()
        self.user_calls = UserCalls(metrics, self.notice)
        self._blocked_s: Mapping[Side, float] = {}
        """For each side of the queue, the seconds for which it was blocked, as read last."""

    async def begin_term(self, lease: Lease) -> None:
        """Begin to record a new term, after a start, a recovery or a return to a checkpoint.

        Events and results of an older term that are not stored yet are dropped. Traces, trackers,
        the audit, uploads and clients' submissions are started or reset too.
        lease: the right to write to the run's database in the new term. Raises: StoreError.
        """
        self.term_number = lease.term
        self._pending, self._pending_results = [], []
        self._blocked_s = {}
        if self._traces is not None:
            self._traces.begin_term()
        if self._submissions is not None:
            await self._submissions.begin_term(lease)
        # The thread reads this after the writes that an older term had begun.
        newest = await self._thread.call(newest_records, self._store)
        self._stored.begin_term(*newest)
        history = await self._thread.call(read_history, self._store)
        self._rewards = RewardWatch()
        for record in history.steps:
            self._rewards.see(record)
        self._metrics.statistics.collapsed_since.set(self.collapsed_since)
        self.last_step = self.checkpoint_step = lease.parent.step if lease.parent else 0
        if lease.parent is not None:
            self._metrics.run.checkpoint_step.set(lease.parent.step)
            self._metrics.run.checkpoint_time.set(lease.parent.committed_at)
        self.policy_version = lease.parent.policy_version if lease.parent else 0
        if self._trackers is not None:
            self._trackers.begin(partial(self._notice_from_thread, asyncio.get_running_loop()))
        if self._hacking is not None:
            notice = partial(self._notice_from_thread, asyncio.get_running_loop())
            self._hacking.begin_term(lease.term, notice)
        if self._uploads is not None:
            notice = partial(self._notice_from_thread, asyncio.get_running_loop())
            self._uploads.begin_term(notice)
        if lease.term > 1:
            self.notice(f"term {lease.term} continues from step {self.last_step}")

    def phase(self, phase: Phase, detail: str) -> None:
        if (phase, detail) != (self.current_phase, self.phase_detail):
            log.info("%s%s", phase, f": {detail}" if detail else "")
        metrics = self._metrics.run
        with self._metrics.together():
            if phase != self.current_phase:
                metrics.phase_time.set(time.time())
            metrics.phase.show({each: float(each == phase) for each in PHASES})
        self.current_phase, self.phase_detail = phase, detail

    def training(self, paused: str) -> None:
        """Set the phase to training, or to paused if parts are paused.

        paused: the paused parts as text; empty if no part is paused.
        """
        self.phase("paused" if paused else "training", paused)

    def paused(self, pauses: Sequence[PauseAnswer]) -> None:
        """Set the metrics of the paused parts of the run."""
        paused = {pause.part for pause in pauses}
        self._metrics.run.paused.show({part.value: float(part in paused) for part in Pausable})

    def starting(self, detail: str) -> None:
        """Set the phase to starting; if the start follows a fault, set it to recovering.

        detail: a few words on the phase, such as "starting 2 engines".
        """
        is_recovery = self.current_phase == "recovering"
        self.phase("recovering" if is_recovery else "starting", detail)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the time of this block, and record it as the stage `name` of the run's start.

        Nothing is recorded if the block raises an error.
        """
        began = time.monotonic()
        yield
        self.stage_ended(name, time.monotonic() - began)

    def stage_ended(self, name: str, seconds: float) -> None:
        line = f"{name}: {seconds:.1f} s"
        log.info("start: %s", line)
        self.stages.append(line)

    def engine_started(self, replica_id: str, stages: StartStages) -> None:
        """Record the stages of an engine's start, with their seconds; once for each engine."""
        if replica_id not in self._started_engines:
            self._started_engines.add(replica_id)
            for name, seconds in stages:
                self.stage_ended(name, seconds)

    def notice(self, text: str) -> None:
        """Add a notice for the user, such as a fault, a recovery or a warning."""
        log.warning("%s", text)
        self.notices.append(text)

    def _notice_from_thread(self, loop: asyncio.AbstractEventLoop, text: str) -> None:
        try:
            loop.call_soon_threadsafe(self.notice, text)
        except RuntimeError:
            # The loop has ended, and no display shows notices any more.
            log.warning("%s", text)

    def replaced(self, part: Part, text: str, *, count: int = 1) -> None:
        """Count `count` replacements of a part that died or froze, and give a notice.

        text: the notice; if memory is short, a hint is added.
        """
        self._metrics.parts.replacements.labels(part=part).inc(count)
        self.notice("; ".join(filter(None, (text, memory_shortage()))))

    def rollouts(self, summaries: Sequence[TrajectorySummary]) -> None:
        for summary in summaries:
            with self._metrics.together():
                self._count_rollout(summary)
            self.num_sampled += summary.num_sampled
            self._notice_first(summary)
        self.num_rollouts += len(summaries)
        if self._traces is not None:
            self._traces.attempts(summaries, now=time.time())
        if self._submissions is not None:
            self._pending_results += self._submissions.note_rollouts(summaries)

    def _count_rollout(self, summary: TrajectorySummary) -> None:
        metrics, environment = self._metrics.rollouts, summary.environment
        metrics.meet(environment)
        metrics.ended.labels(environment=environment, outcome=summary.outcome.value).inc()
        metrics.seconds.labels(environment=environment).observe(summary.timings.wall_s)
        for phase, seconds in summary.timings.by_phase().items():
            metrics.phase_seconds.labels(environment=environment, phase=phase).observe(seconds)
        if summary.is_graded and summary.outcome not in UNSCORED:
            metrics.returns.labels(environment=environment).observe(summary.episode_return)

    def _notice_first(self, summary: TrajectorySummary) -> None:
        outcome = summary.outcome
        if outcome in FAULTS and outcome not in self._faults_noticed:
            self._faults_noticed.add(outcome)
            self.notice(
                f"first {outcome.value}, on task {summary.task_id!r}: {summary.detail}; "
                "further ones are only counted"
            )

    @property
    def num_evicted(self) -> int:
        """Number of rollouts whose eviction is not stored in the database yet."""
        return sum(event.kind is LedgerEventKind.EVICTED for event in self._pending)

    def events(self, events: Sequence[LedgerEvent]) -> None:
        self._pending += events
        if self._traces is not None:
            self._traces.events(events, now=time.time())
        if self._submissions is not None:
            self._submissions.note_events(events)

    async def step(self, record: StepRecord) -> None:
        events, results = self._take_pending()

        async def write() -> None:
            totals = await self._thread.call(
                self._store.add_step, record, term=term, new_events=events, new_results=results
            )
            self._stored.step(record, events, totals)
            if self._submissions is not None:
                self._submissions.note_step_seconds(record.stages.total)
            if self._traces is not None:
                self._traces.step(record)
            self._wake_trackers()
            if self._hacking is not None:
                self._hacking.stored(term, record.step)
            self.steps.append(record)
            self.last_step, self.policy_version = record.step, record.policy_version
            self._watch_reward(record)
            log.info("%s", step_line(record, self._num_steps))

        term = self.term_number
        await self._thread.finish(write())

    @property
    def collapsed_since(self) -> int | None:
        """First step of the current collapse of the mean return; None if there is no collapse."""
        drop = self._rewards.drop
        return None if drop is None else drop.since

    def _watch_reward(self, record: StepRecord) -> None:
        before = self._rewards.drop
        self._rewards.see(record)
        drop = self._rewards.drop
        self._metrics.statistics.collapsed_since.set(self.collapsed_since)
        if drop is not None and before is None:
            self.notice(f"step {record.step}: {drop.text}; a checkpoint from before it is kept")
        elif drop is None and before is not None:
            self.notice(f"step {record.step}: the mean return has recovered")

    async def evaluation(self, record: EvaluationRecord) -> None:
        async def write() -> None:
            await self._thread.call(self._store.add_evaluation, record, term=term)
            self._wake_trackers()
            self.evaluations.append(record)
            if record.is_charted:
                self._stored.evaluation(record)
            log.info("%s", evaluation_line(record))

        term = self.term_number
        await self._thread.finish(write())

    async def close_trackers(self, *, is_taken_over: bool) -> None:
        """End the experiment trackers; before that, let them write the stored records.

        This method waits only for a limited time.
        is_taken_over: whether another process has taken over the run, and writes the records
        instead.
        """
        if self._trackers is not None:
            await asyncio.to_thread(self._trackers.close, writes_rest=not is_taken_over)

    @property
    def uploading(self) -> str:
        """Name of the checkpoint that is being copied to `run.checkpoint_url`; empty if none is."""
        return "" if self._uploads is None else self._uploads.uploading

    async def close_uploads(self, *, is_taken_over: bool) -> None:
        """End the thread of the uploads; before that, let it copy the newest checkpoints.

        This method waits only for a limited time.
        is_taken_over: whether another process has taken over the run, and copies the checkpoints
        instead.
        """
        if self._uploads is not None:
            await asyncio.to_thread(self._uploads.close, writes_rest=not is_taken_over)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the audit for reward hacking."""
        return () if self._hacking is None else self._hacking.findings

    async def close_audit(self) -> None:
        """End the audit for reward hacking; before that, let it check the stored steps.

        This method waits only for a limited time.
        """
        if self._hacking is not None:
            await asyncio.to_thread(self._hacking.close)

    def _wake_trackers(self) -> None:
        if self._trackers is not None:
            self._trackers.wake()

    async def checkpoint(
        self,
        *,
        step: int,
        version: int,
        directory: str,
        snapshot: QueueSnapshot,
        curriculum: Mapping[str, tuple[float, ...]] | None = None,
    ) -> Checkpoint:
        """Commit a checkpoint, with the events and results that are not stored yet."""
        events, results = self._take_pending()
        entries: list[FeedEntry] = []
        if self._submissions is not None:
            entries = self._submissions.take_entries(last_event_seq=snapshot.last_event_seq)

        async def write() -> Checkpoint:
            committed = await self._thread.call(
                self._store.commit_checkpoint,
                term=term,
                step=step,
                policy_version=version,
                directory=directory,
                queue_snapshot=snapshot,
                curriculum=curriculum,
                new_events=events,
                new_results=results,
                new_entries=entries,
                last_event_seq=snapshot.last_event_seq,
            )
            self._stored.events(events)
            if step != self.checkpoint_step:
                # At its end, and while it waits for a step, a run commits the newest step again.
                log.info("checkpoint of step %d in %s", step, directory)
                self._metrics.run.checkpoint_step.set(step)
                self._metrics.run.checkpoint_time.set(time.time())
            self.checkpoint_step = step
            if self._uploads is not None:
                self._uploads.wake()
            return committed

        term = self.term_number
        return await self._thread.finish(write())

    async def checkpoint_written(self, path: Path, *, seconds: float) -> None:
        """Set the metrics of a written checkpoint: its size, its duration and the free disk space.

        seconds: the duration of the write.
        """
        num_bytes = await asyncio.to_thread(_size_of, path)
        volume = await asyncio.to_thread(shutil.disk_usage, path)
        self._metrics.run.checkpoint_bytes.set(num_bytes)
        self._metrics.run.checkpoint_free_bytes.set(volume.free)
        self._metrics.run.checkpoint_seconds.set(seconds)

    def checkpoint_failed(self) -> None:
        self._metrics.parts.checkpoint_failures.inc()

    @contextmanager
    def publishing(self, phase: PublishPhase) -> Iterator[None]:
        """Measure the duration of this block, which is a phase of a publication.

        If the block raises ActorLost, count a failed publication instead.
        """
        started, parts = time.monotonic(), self._metrics.parts
        try:
            yield
        except ActorLost:
            parts.publish_failures.inc()
            raise
        parts.publish_seconds.labels(phase=phase).observe(time.monotonic() - started)

    async def forget(
        self,
        kept: Sequence[Checkpoint],
        *,
        keep_checkpoints: int,
        journal_steps: int,
        max_policy_age: int,
    ) -> None:
        """Remove rows of the database that no resume, report or API call needs any more.

        kept: the checkpoints to which the run can return, newest first.
        """
        if self._submissions is not None:
            # Do this before the events are removed: they say how the submissions' rollouts ended.
            await self._submissions.archive([each.last_event_seq for each in kept])
        await self._thread.call(
            forget,
            self._store,
            term=self.term_number,
            kept=kept,
            keep_checkpoints=keep_checkpoints,
            journal_steps=journal_steps,
            max_policy_age=max_policy_age,
        )

    def engines(
        self, num_ready: int | None, *, num_expected: int, versions: Mapping[str, int]
    ) -> None:
        """Set the metrics of the engines.

        num_ready: number of ready engines; None if unknown. versions: policy version of each
        replica.
        """
        parts = self._metrics.parts
        with self._metrics.together():
            parts.engines_ready.set(num_ready)
            parts.engines_expected.set(num_expected)
            parts.engine_version.show(versions)

    def environment_actors(self, num_alive: int) -> None:
        self._metrics.parts.environment_actors.set(num_alive)

    def ranks(self, peak_bytes: Sequence[int]) -> None:
        """Set the metrics of the trainer's ranks.

        peak_bytes: peak memory of each rank; empty if the ranks are lost or not started.
        """
        with self._metrics.together():
            self._metrics.parts.ranks.set(len(peak_bytes))
            by_rank = {str(rank): float(value) for rank, value in enumerate(peak_bytes)}
            self._metrics.parts.rank_memory.show(by_rank)

    def database(self, away_s: float) -> None:
        self._metrics.run.database_away.set(away_s)

    def queue(self, stats: QueueStats) -> None:
        """Set the metrics of the trajectory queue's current state."""
        metrics, ledger = self._metrics.ledger, stats.ledger
        with self._metrics.together():
            metrics.admitted.set(ledger.admitted)
            metrics.trained.set(ledger.trained)
            metrics.in_flight.set(ledger.in_flight)
            # Set every reason: a count of a lost term must become 0 again in the next term.
            for reason in EvictionReason:
                metrics.evicted.labels(reason=reason.value).set(ledger.evicted.get(reason, 0))
            metrics.waiting_items.set(stats.num_waiting)
            metrics.waiting_bytes.set(stats.waiting_bytes)
            metrics.handed_out.set(stats.num_handed_out)
            metrics.oldest.set(stats.oldest_s)
            self._count_blocked(stats.blocked_s)
            if self._submissions is not None:
                backlog = self._submissions.backlog
                self._metrics.service.waiting_tasks.set(backlog.waiting)
                self._metrics.service.waiting_tasks_limit.set(backlog.capacity)

    def _count_blocked(self, blocked_s: Mapping[Side, float]) -> None:
        """Add to a metric how long each side of the queue was blocked since the last call.

        blocked_s: for each side, the total seconds since the queue's start.
        """
        for side, seconds in blocked_s.items():
            counted_s = self._blocked_s.get(side, 0.0)
            # A lower total began again at 0, because the queue was restarted.
            gained_s = seconds - counted_s if seconds >= counted_s else seconds
            self._metrics.waits.blocked.labels(side=side).inc(gained_s)
        self._blocked_s = blocked_s

    def _take_pending(self) -> tuple[list[LedgerEvent], list[RolloutResult]]:
        taken = self._pending, self._pending_results
        self._pending, self._pending_results = [], []
        return taken


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
