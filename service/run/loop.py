"""The circle: admit groups, collect a step, merge, train, publish, and again.

Synchronous and asynchronous training are this same code: how far rollouts run ahead is decided by
the queue's admission window alone. Two short loops over ports run side by side: `_admit` gives
admitted group numbers their tasks, `_train` takes closed groups to the optimiser and the weights
back to the engines. With a lag, the engines take a version while the next step is collected and
trained; a version is never offered before all of them hold the one before it. Run by the
supervisor, once an epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.algorithm import AlgorithmSettings
from actors.merge.actor import BuiltStep
from actors.merge.groups import PayloadsLost
from actors.merge.report import StepReport
from actors.trainer.statistics import StepStats
from actors.trajectory_queue.failures import FailedGroups
from actors.trajectory_queue.messages import Drained, StepInput
from actors.types import Task
from service.config.tree import RunSettings
from service.run.failing import FailureLimits, FailureWatch, GivenUp
from service.run.ports import (
    EnginesPort,
    EnvironmentsPort,
    MergePort,
    PublishedVersion,
    QueuePort,
    Recorder,
    TrainerPort,
)
from service.run.task_feed import TaskFeed
from service.telemetry.records import StageSeconds, evaluation_record, step_record
from service.telemetry.summary import EDGE_STEPS

POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the loop is told: two leaves of the configuration, and where this epoch stands."""

    run: RunSettings
    algorithm: AlgorithmSettings
    first_step: int
    """The checkpoint's step + 1, or 1."""
    failures: FailureLimits | None
    """None for a run that no row of failed groups ends, because clients bring the tasks."""
    checkpoint: str = ""
    """Of which this epoch goes on, by name; empty for a fresh start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    queue: QueuePort
    merge: MergePort
    trainer: TrainerPort
    engines: EnginesPort
    environments: EnvironmentsPort
    tasks: TaskFeed
    evaluation_tasks: Sequence[Task]
    recorder: Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step behind its update, before every engine holds its version.

    stages: how long the loop stood at each; what overlaps the next step is not in it.
    """

    step: int
    report: StepReport
    stats: StepStats
    stages: StageSeconds


class Stopwatch:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        return elapsed


class Loop:
    """One epoch of a run. The engines hold version `first_step - 1` when it starts."""

    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._step = settings.first_step
        self._committed: tuple[int, str] = (settings.first_step - 1, settings.checkpoint)
        self._failures = FailureWatch(settings.failures) if settings.failures else None
        self._concluding: asyncio.Task[None] | None = None
        self._is_stopping = asyncio.Event()
        self._rewards: deque[float] = deque(maxlen=EDGE_STEPS)
        self._evaluated_step: int | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the last steps' mean return has reached stop_at_reward."""
        goal = self._settings.run.stop_at_reward
        if goal is None or len(self._rewards) < EDGE_STEPS:
            return False
        return sum(self._rewards) / EDGE_STEPS >= goal

    @property
    def _has_more(self) -> bool:
        return self._step <= self._settings.run.steps and not self.is_solved

    def stop(self) -> None:
        """Finish the step in hand, leave a checkpoint, and return from `run`."""
        self._is_stopping.set()

    async def run(self) -> None:
        """Train until the last step or `stop`; ends with nothing in flight and a checkpoint.

        Raises: GivenUp, after the same checkpoint as a stop leaves; PartLost.
        """
        gave_up: GivenUp | None = None
        admitting = asyncio.create_task(self._admit(), name="admit")
        training = asyncio.create_task(self._train(), name="train")
        try:
            await asyncio.wait({admitting, training}, return_when=asyncio.FIRST_COMPLETED)
            if admitting.done():
                admitting.result()
            await training
        except GivenUp as error:
            gave_up = error
            await self._concluded()
        finally:
            tasks = [task for task in (admitting, training, self._concluding) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._finish()
        if gave_up is not None:
            raise gave_up

    async def _admit(self) -> None:
        parts = self._parts
        while not self._is_stopping.is_set() and self._has_more:
            vacancies = await parts.queue.admissible(timeout_s=POLL_S)
            groups = await parts.tasks.fill(vacancies) if vacancies else []
            if groups:
                await parts.queue.admit(groups)

    async def _train(self) -> None:
        if self._step == 1:
            await self._evaluate(step=0)
        while self._has_more and not self._is_stopping.is_set():
            watch = Stopwatch()
            step_input = await self._collect()
            if step_input is None:
                break
            collect_s = watch.lap()
            try:
                built, score_s = await self._build(step_input)
            except PayloadsLost as loss:
                self._parts.recorder.notice(f"step {self._step}: {loss}; they are played again")
                await self._parts.queue.lost(loss.rollout_ids)
                continue
            for notice in built.notices:
                self._parts.recorder.notice(notice)
            merge_s = watch.lap() - score_s
            stages = StageSeconds(collect=collect_s, merge=merge_s, score=score_s)
            await self._train_step(built, stages)
            self._step += 1
        await self._concluded()

    async def _collect(self) -> StepInput | None:
        """Wait for a step's closed groups; None when asked to stop, or solved, meanwhile."""
        while self._has_more and not self._is_stopping.is_set():
            step_input = await self._parts.queue.take_step(timeout_s=POLL_S)
            drained = await self._drain()
            if step_input is not None:
                return step_input
            if self._concluding is not None and self._concluding.done():
                await self._concluded()
            await self._check_failures(drained.failed_groups)
        return None

    async def _build(self, step_input: StepInput) -> tuple[BuiltStep, float]:
        """Returns: the step, and the seconds that the trainer scored. Raises: PayloadsLost."""
        parts, version = self._parts, self._step - 1
        if not self._settings.algorithm.scores_first:
            return await parts.merge.build(step_input, version=version), 0.0
        shards = await parts.merge.plan(step_input, version=version)
        watch = Stopwatch()
        scores = await parts.trainer.score(shards)
        score_s = watch.lap()
        return await parts.merge.build(step_input, version=version, scores=scores), score_s

    async def _check_failures(self, failed: FailedGroups | None) -> None:
        """Raises: GivenUp when the run gets nowhere."""
        if self._failures is None:
            return
        # Without a failure the engines need not be asked.
        num_ready = 0 if failed is None else await self._parts.engines.num_ready()
        self._failures.look(failed, num_engines_ready=num_ready, now=time.monotonic())

    async def _train_step(self, built: BuiltStep, stages: StageSeconds) -> None:
        parts, step, watch = self._parts, self._step, Stopwatch()
        stats = await parts.trainer.step(built)
        stages = replace(stages, train=watch.lap())
        await self._concluded()
        await parts.engines.offer(step)
        settlements = built.settlements_after(is_all_skipped=stats.is_all_skipped)
        await parts.queue.settle(built.step, settlements)
        stages = replace(stages, publish=watch.lap())
        trained = Trained(step=step, report=built.report, stats=stats, stages=stages)
        # In step nothing can be sampled while the engines load.
        is_in_step = self._settings.algorithm.is_in_step
        if not is_in_step and not self._is_any_due(step):
            self._concluding = asyncio.create_task(self._conclude(trained), name="conclude")
        else:
            await self._conclude_here(trained)
        if self._failures is not None:
            self._failures.look_at_merge(step, built.report, notices=built.notices)
            self._failures.look_at_step(step, was_trained=not stats.is_all_skipped)

    def _is_any_due(self, step: int) -> bool:
        """Whether an evaluation or a checkpoint must see exactly this step's version."""
        return self._is_evaluation_due(step) or step % self._settings.run.checkpoint_every == 0

    def _is_evaluation_due(self, step: int) -> bool:
        return step % self._settings.run.evaluate_every == 0 or step == self._settings.run.steps

    async def _concluded(self) -> None:
        """Wait until the engines hold the version last offered, and its step is recorded."""
        concluding, self._concluding = self._concluding, None
        if concluding is not None:
            await concluding

    async def _conclude(self, trained: Trained) -> None:
        published = await self._spread(trained.step)
        await self._record(trained, published)

    async def _conclude_here(self, trained: Trained) -> None:
        step, stages, watch = trained.step, trained.stages, Stopwatch()
        published = await self._spread(step)
        stages = replace(stages, publish=stages.publish + watch.lap())
        if self._is_evaluation_due(step):
            await self._evaluate(step=step)
        stages = replace(stages, evaluate=watch.lap())
        is_due = step % self._settings.run.checkpoint_every == 0
        directory = await self._parts.trainer.save(step=step, version=step) if is_due else None
        stages = replace(stages, checkpoint=watch.lap())
        await self._record(replace(trained, stages=stages), published)
        if directory is not None:
            await self._commit(directory, step=step)

    async def _spread(self, version: int) -> PublishedVersion:
        """Wait until every engine holds the version; only then may groups count on it."""
        published = await self._parts.engines.wait(version)
        await self._parts.queue.published(version)
        return published

    async def _record(self, trained: Trained, published: PublishedVersion) -> None:
        await self._drain()
        record = step_record(
            trained.step,
            trained.report,
            trained.stats,
            policy_version=published.version,
            parity_max=published.parity_max,
            stages=trained.stages,
        )
        self._parts.recorder.step(record)
        if record.best_known_reward is None:
            self._rewards.clear()
        else:
            self._rewards.append(record.best_known_reward)

    async def _evaluate(self, *, step: int) -> None:
        tasks = self._parts.evaluation_tasks
        self._evaluated_step = step
        if tasks:
            summaries = await self._parts.environments.evaluate(tasks)
            self._parts.recorder.evaluation(evaluation_record(step, summaries))

    async def _commit(self, directory: str, *, step: int) -> None:
        """Make a written checkpoint the one to return to, together with the queue's state."""
        cut = await self._parts.queue.cut()
        self._parts.recorder.events(cut.drained.events)
        self._parts.recorder.rollouts(cut.drained.summaries)
        self._parts.recorder.checkpoint(step=step, version=step, directory=directory, cut=cut)
        self._committed = (step, directory)
        await self._parts.trainer.prune()

    async def _drain(self) -> Drained:
        drained = await self._parts.queue.drain()
        self._parts.recorder.events(drained.events)
        self._parts.recorder.rollouts(drained.summaries)
        return drained

    async def _finish(self) -> None:
        """Commit the last step done. At the run's end nothing stays in flight; after a stop, what
        is in flight stays so, to be played when the run is resumed."""
        done = self._step - 1
        is_complete = not self._has_more
        if is_complete:
            if self.is_solved and self._evaluated_step != done:
                await self._evaluate(step=done)
            await self._parts.queue.cancel_all()
        step, directory = self._committed
        if done > step:
            directory = await self._parts.trainer.save(step=done, version=done)
        if directory and (done > step or is_complete):
            await self._commit(directory, step=done)
