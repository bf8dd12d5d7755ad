"""Make a long run's directory without training, with the code by which a run writes.

Every rollout is evicted as masked, so its journal needs no tokens; checkpoints, retention and the
journal are those of a run. `long_history` uses this module, and so does a test at a small scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event
from sqlalchemy.pool import Pool

from actors.journal.files import JournalStep, TrajectoryEntry, prune, write_file
from actors.merge.report import MergeReport
from actors.metrics import Metrics
from actors.statistics import BY_NAME
from actors.trainer import checkpoint
from actors.trainer.checkpoint import Progress
from actors.trajectory_queue.ledger import EvictionReason, Ledger, TokenCounts
from actors.trajectory_queue.messages import QueueSnapshot
from actors.types import Outcome, RolloutAssignment, Task, Trajectory
from service.launch.resume import kept_commits, prune_directories
from service.launch.run_dir import RunDir
from service.run.recorder import RunRecorder
from service.store.run_store import RunStore
from service.telemetry.records import EvaluationRecord, StageSeconds, StepRecord
from service.worker_thread import WorkerThread

START = 1_795_000_000.0
SECONDS_A_STEP = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The length of the run, and what its directory keeps."""

    steps: int
    rollouts_per_step: int
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    journal_steps: int = 200
    steps_between_faults: int = 1000
    """Number of steps after which the run loses a part and returns to its newest checkpoint."""


async def make_history(
    run_dir: RunDir, scale: Scale, *, tell: Callable[[int], None] = lambda step: None
) -> None:
    """Make the directory of a run. tell: called after each step with its number."""
    run_dir.path.mkdir(parents=True)
    run_dir.config_file.write_text(
        "model: {tiny: {}}\ntasks: {environment: guessing}\n"
        f"run: {{steps: {scale.steps}, journal_steps: {scale.journal_steps}}}\n"
    )
    # This only affects the time for making the run.
    event.listen(Pool, "checkout", _do_not_sync)
    store = RunStore(run_dir.database_url)
    run = _Run(run_dir, scale, store)
    await run.begin_term()
    while run.step < scale.steps:
        await run.do_step()
        if run.step % scale.steps_between_faults == scale.checkpoint_every // 2:
            await run.begin_term()
        tell(run.step)
    if scale.steps % scale.checkpoint_every:
        await run.commit()
    store.release(run.term)
    store.close()
    event.remove(Pool, "checkout", _do_not_sync)


def _do_not_sync(connection: Any, _record: Any, _proxy: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


class _Run:
    def __init__(self, run_dir: RunDir, scale: Scale, store: RunStore) -> None:
        self._run_dir, self._scale, self._store = run_dir, scale, store
        self._recorder = RunRecorder(
            store, Metrics(), thread=WorkerThread("store"), num_steps=scale.steps
        )
        self._ledger = Ledger()
        self._faults: set[int] = set()
        self.step = self.term = 0

    async def begin_term(self) -> None:
        """Begin a term from the newest checkpoint, unless a term began at this step already."""
        if self.step in self._faults:
            return
        self._faults.add(self.step)
        lease = self._store.acquire_lease(owner="benchmark:1")
        await self._recorder.begin_term(lease)
        self.term, self.step = lease.term, lease.parent.step if lease.parent else 0
        snapshot = lease.queue_snapshot
        self._ledger = Ledger(snapshot=snapshot.ledger if snapshot else None)

    async def do_step(self) -> None:
        self.step += 1
        rollouts = [
            f"g{self.step:06d}.0-{member}" for member in range(self._scale.rollouts_per_step)
        ]
        for rollout_id in rollouts:
            self._ledger.admit(rollout_id)
        for rollout_id in rollouts:
            self._ledger.evict(rollout_id, EvictionReason.MASKED, step=self.step)
        if self.step > self._scale.steps - self._scale.journal_steps:
            self._write_journal(rollouts)
        self._recorder.events(self._ledger.drain())
        await self._recorder.step(step_record(self.step, num_rollouts=len(rollouts)))
        if self.step % 20 == 0:
            await self._recorder.evaluation(evaluation_record(self.step))
        if self.step % self._scale.checkpoint_every == 0:
            await self.commit()

    async def commit(self) -> None:
        checkpoints = self._run_dir.checkpoints
        progress = Progress(
            step=self.step,
            version=self.step,
            term=self.term,
            num_updates=self.step,
            num_ranks=1,
            model="none",
        )
        checkpoint.begin(checkpoints, progress)
        checkpoint.finish(checkpoints, progress, digests={}, digest_s=0.0)
        self._recorder.events(self._ledger.drain())
        snapshot = QueueSnapshot(ledger=self._ledger.snapshot(waiting=TokenCounts()))
        await self._recorder.checkpoint(
            step=self.step, version=self.step, directory=progress.directory_name, snapshot=snapshot
        )
        kept = kept_commits(
            checkpoints, self._store, term=self.term, keep=self._scale.keep_checkpoints
        )
        await self._recorder.forget(
            kept,
            keep_checkpoints=self._scale.keep_checkpoints,
            journal_steps=self._scale.journal_steps,
            max_policy_age=2,
        )
        prune_directories(checkpoints, kept)

    def _write_journal(self, rollouts: list[str]) -> None:
        step = JournalStep(
            step=self.step,
            term=self.term,
            trainer_version=self.step - 1,
            max_policy_age=2,
            group_rule=None,
            num_packed_trained=0,
            entries=tuple(_entry(rollout_id) for rollout_id in rollouts),
        )
        write_file(self._run_dir.journal, step)
        prune(
            self._run_dir.journal,
            newest=self.step,
            keep_steps=self._scale.journal_steps,
            keep_bytes=20 << 30,
        )


def _entry(rollout_id: str) -> TrajectoryEntry:
    group_id, _, _ = rollout_id.rpartition("-")
    assignment = RolloutAssignment(
        rollout_id=rollout_id,
        group_id=group_id,
        group_number=int(group_id[1:7]),
        attempt=0,
        task=Task(task_id=group_id, environment="guessing", seed=0),
    )
    return TrajectoryEntry(
        trajectory=Trajectory.of(assignment, Outcome.COMPLETED, detail=""),
        reason=EvictionReason.MASKED,
        baseline_return=None,
        advantages=(),
    )


def step_record(step: int, *, num_rollouts: int) -> StepRecord:
    """Return a step record with every statistic, and with the largest possible values."""
    return StepRecord(
        step=step,
        trainer_version=step - 1,
        policy_version=step,
        wall_time=START + SECONDS_A_STEP * step,
        num_groups=max(num_rollouts // 16, 1),
        num_zero_variance_groups=step % 3,
        num_trajectories=num_rollouts,
        outcomes={Outcome.COMPLETED: num_rollouts - 1, Outcome.MAX_TURNS: 1},
        evictions={EvictionReason.MASKED: num_rollouts},
        num_malformed_rewarded=0,
        merge=MergeReport(
            samples_before=4 * num_rollouts,
            samples_after=num_rollouts,
            branches={},
            num_saved_tokens=1000,
            num_masked_tokens=0,
        ),
        num_turns=4 * num_rollouts,
        num_malformed_turns=1,
        num_inserted_tokens=0,
        num_sampled_tokens=100 * num_rollouts,
        num_trained_tokens=90 * num_rollouts,
        num_packed_tokens=200 * num_rollouts,
        num_micro_batches=8,
        num_padding_rows=0,
        num_overruled_records=0,
        learning_rate=1e-3,
        is_skipped=False,
        stages=StageSeconds(collect=3.1, merge=0.2, train=2.4, publish=0.3),
        statistics={name: number / 64 + step / 1e6 for number, name in enumerate(BY_NAME)},
    )


def evaluation_record(step: int) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        policy_version=step,
        num_tasks=64,
        reward_mean=0.6,
        scaled_reward_mean=0.6,
        outcomes={Outcome.COMPLETED: 64},
    )
