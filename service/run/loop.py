"""The training loop: admit groups, collect a step, merge, train, publish, and repeat.

Each term has one loop of two coroutines. `_admit` assigns tasks to free group numbers. `_train`
passes closed groups through the merge actor and the trainer, and publishes the weights.

The queue's admission window decides how far rollouts run ahead of training. Invariant: a version is
published only after the engines have loaded the version before it. Every call of a handle may raise
`ActorLost`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from actors.deadline import ActorLost, beside, race
from actors.environment.evaluation import EvaluationSet
from actors.merge.groups import PayloadsLost, ScoresLost
from actors.trainer.agreement import StepAbandoned
from actors.trajectory_queue.groups import FailedGroups
from actors.trajectory_queue.messages import StepInput
from actors.types import TrajectorySummary
from actors.weights.logprob_check import LogprobCheck
from service.run.checkpoint_writer import CheckpointWriter
from service.run.health import FailureWatch, RunFailed, WeightsMoved
from service.run.loop_parts import LoopParts
from service.store.lineage import Checkpoint
from service.store.tables import Pausable
from service.telemetry.evaluation import evaluation_file, evaluation_record, sampling_of_parts
from service.telemetry.records import StageSeconds, StepRecord, finished_record, step_record
from service.telemetry.summary import AVERAGED_STEPS

if TYPE_CHECKING:
    # These import Ray, torch and vLLM, which the loop itself does not need.
    from actors.merge.actor import BuiltStep

POLL_S = 1.0
# A trainer group that is being replaced cannot abandon a step, so the next group is asked again.
ASK_AGAIN_S = 1.0
MAX_SCORINGS = 3
Answer = TypeVar("Answer")


class Stopwatch:
    """A clock that returns the seconds since it was last read."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        return elapsed


class Loop:
    """The training loop of one term.

    Before it starts, the live engines must have loaded the weights with which the term begins.
    """

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._run_settings = parts.config.run
        self._step = 1 if parts.parent is None else parts.parent.step + 1
        self._checkpoints = CheckpointWriter(parts, call_trainer=self._with_published)
        self._failures = FailureWatch(parts.config)
        self._loading: asyncio.Task[None] | None = None
        """The task that waits until the engines have a step's weights, and then records the step.

        None if no such task runs.
        """
        self._is_stopping = asyncio.Event()
        self._is_grace_over = asyncio.Event()
        self._rewards: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self._knows_best: dict[str, bool] = {}
        """Whether an environment of a mixture has declared a best return, by its name."""
        self._evaluated_step: int | None = None
        self._step_in_hand: int | None = None
        self._paused_s = 0.0
        """Seconds for which training was paused while the loop waited for the current step."""

    @property
    def step_in_hand(self) -> int | None:
        """The step that is being trained; None while a step is collected."""
        return self._step_in_hand

    @property
    def is_solved(self) -> bool:
        """Whether the mean return of the last steps has reached `run.stop_at_reward`.

        False if `run.stop_at_reward` is not set.
        """
        goal = self._run_settings.stop_at_reward
        if goal is None or len(self._rewards) < AVERAGED_STEPS:
            return False
        return sum(self._rewards) / AVERAGED_STEPS >= goal

    @property
    def _has_more(self) -> bool:
        return self._step <= self._run_settings.steps and not self.is_solved

    def stop(self, *, grace_s: float | None = None) -> None:
        """Let `run` finish the current step and write a checkpoint; then `run` returns.

        grace_s: seconds that the current step may still take; None for no limit. A step that takes
        longer is abandoned, unless one of its updates was applied already.
        A resumed run plays the rollouts of an abandoned step again. Sessions and uploads are not
        played again: the run reads their trajectories from the database.
        """
        self._is_stopping.set()
        if grace_s is not None:
            asyncio.get_running_loop().call_later(grace_s, self._is_grace_over.set)

    async def checkpoint(self) -> Checkpoint:
        """Request a checkpoint after the current step; return the checkpoint once it is committed.

        The checkpoint is of the last finished step. If that step is committed already, nothing is
        written. If a checkpoint fails because a rank is lost, it is written again. Raises:
        ActorLost if the term ends first.
        """
        return await self._checkpoints.request(self._step - 1)

    async def run(self) -> None:
        """Train until the last step or `stop`; then commit a checkpoint and end unfinished work.

        Raises: RunFailed, after the last finished step is committed; ActorLost.
        """
        try:
            await self._run()
        finally:
            await self._checkpoints.end()

    async def _run(self) -> None:
        failure: RunFailed | None = None
        try:
            await beside(self._train(), self._admit())
        except RunFailed as error:
            failure = error
            await self._join_loading()
        except StepAbandoned:
            self._parts.recorder.notice(
                f"step {self._step} is abandoned, because the grace period is over; its "
                "rollouts are played again when the run is resumed"
            )
            await self._join_loading()
        finally:
            if self._loading is not None:
                self._loading.cancel()
                await asyncio.gather(self._loading, return_exceptions=True)
        await self._finish()
        if failure is not None:
            raise failure

    async def _admit(self) -> None:
        parts, gate = self._parts, self._parts.pauses.gate(Pausable.ADMISSION)
        while not self._is_stopping.is_set() and self._has_more:
            await gate.until_open()
            slots = await parts.queue.admissible(POLL_S)
            with gate.passing() as is_open:
                groups = await parts.tasks.fill(slots) if slots and is_open else []
                if groups:
                    await parts.queue.admit(groups)

    async def _train(self) -> None:
        if self._checkpoints.newest is None:
            await self._evaluate(step=0)
        while self._has_more and not self._is_stopping.is_set():
            watch = Stopwatch()
            step_input = await self._collect()
            if step_input is None:
                break
            self._step_in_hand = self._step
            collect_s = watch.lap() - self._paused_s
            try:
                built, score_s = await self._unless_grace_is_over(self._build(step_input))
            except PayloadsLost as loss:
                self._parts.recorder.notice(f"step {self._step}: {loss}; they are played again")
                await self._parts.queue.replay_lost(loss.rollout_ids)
                self._step_in_hand = None
                continue
            for notice in built.notices:
                self._parts.recorder.notice(notice)
            merge_s = watch.lap() - score_s
            stages = StageSeconds(collect=collect_s, merge=merge_s, score=score_s)
            await self._train_step(built, stages)
            self._step += 1
            self._step_in_hand = None
            self._failures.check_logprobs()
        await self._join_loading()
        self._failures.check_logprobs()

    async def _collect(self) -> StepInput | None:
        """Wait for the closed groups of a step; return None if the run ends first."""
        begun_at, self._paused_s = time.monotonic(), 0.0
        while self._has_more and not self._is_stopping.is_set():
            if self._checkpoints.is_requested:
                await self._join_loading()
                await self._checkpoints.save_requested(self._step - 1)
            step_input = await self._take_step()
            if step_input is not None:
                return step_input
            if self._loading is not None and self._loading.done():
                await self._join_loading()
            if self._checkpoints.is_written:
                await self._checkpoints.join()
            if self._loading is None and self._checkpoints.is_due(self._step - 1, begun_at):
                await self._checkpoints.commit_evicted(self._step - 1)
            await self._check_failures(self._parts.queue.failed_groups)
        return None

    async def _take_step(self) -> StepInput | None:
        """Return a step's closed groups; None if training is paused or none came within POLL_S."""
        gate = self._parts.pauses.gate(Pausable.TRAINING)
        with gate.passing() as is_open:
            if is_open:
                return await self._parts.queue.take_step(POLL_S)
        watch = Stopwatch()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await gate.until_open()
        self._paused_s += watch.lap()
        return None

    async def _build(self, step_input: StepInput) -> tuple[BuiltStep, float]:
        """Build a step's batch; return it, and the seconds in which the trainer scored it.

        Raises: PayloadsLost.
        """
        merge, trainer = self._parts.merge, self._parts.trainer
        if not self._parts.config.algorithm.scores_first:
            return await merge.build(step_input, trainer.version, (), trainer.republished), 0.0
        for _ in range(MAX_SCORINGS):
            shards = await merge.plan(step_input, trainer.version)
            watch = Stopwatch()
            scores = await self._with_published(partial(trainer.score, shards))
            score_s = watch.lap()
            with suppress(ScoresLost):
                return (
                    await merge.build(step_input, trainer.version, scores, trainer.republished),
                    score_s,
                )
        raise ActorLost(f"step {step_input.step}: its scores were lost {MAX_SCORINGS} times")

    async def _check_failures(self, failed: FailedGroups | None) -> None:
        if self._parts.has_clients:
            return
        # The number of ready engines matters only if groups have failed.
        num_ready = 0 if failed is None else await self._parts.publisher.num_ready()
        self._failures.check_groups(failed, num_engines_ready=num_ready, now=time.monotonic())

    async def _train_step(self, built: BuiltStep, stages: StageSeconds) -> None:
        """Train a built step, publish its weights, and report its rollouts' outcomes to the queue.

        The step is recorded once the engines have loaded its weights, perhaps during the next step.
        """
        parts, step, watch = self._parts, self._step, Stopwatch()
        giving_up = asyncio.create_task(self._give_up_after_grace())
        try:
            stats = await self._with_published(
                partial(parts.trainer.step, built.shards, num_bytes=built.num_bytes)
            )
        finally:
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
        stages = replace(stages, train=watch.lap())
        await self._join_loading()
        version = await self._publish()
        outcomes = built.outcomes_after(is_all_skipped=stats.is_all_skipped)
        dropped = await parts.queue.finalise(step, outcomes)
        report = built.report_after(is_all_skipped=stats.is_all_skipped, dropped=dropped)
        if parts.curriculum is not None:
            parts.curriculum.learn(built.returns)
        stages = replace(stages, publish=watch.lap())
        trained = step_record(step, report, stats, version=version, stages=stages)
        # Synchronous training samples nothing while the engines load, so it waits for them here.
        if not self._parts.config.algorithm.is_synchronous and not self._is_any_due(step):
            self._loading = asyncio.create_task(self._load_and_record(trained), name="load")
        else:
            await self._load_and_checkpoint(trained)
        for notice in (
            self._failures.constant_reward(step, report),
            self._failures.untrained_tokens(step, report),
        ):
            if notice is not None:
                parts.recorder.notice(notice)
        self._failures.check_merge(step, built.report, notices=built.notices)
        self._failures.check_step(step, was_trained=not stats.is_all_skipped)

    async def _unless_grace_is_over(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Return a call's answer; raise StepAbandoned if the grace period of a stop ends first."""
        async with race(call, self._is_grace_over.wait()) as (working, _):
            if not working.done():
                # The ranks may still execute the call; end it, as a checkpoint needs them.
                await self._parts.trainer.abandon()
                raise StepAbandoned("the grace period of the stop has ended")
            answer: Answer = working.result()
            return answer

    async def _give_up_after_grace(self) -> None:
        """Make the ranks abandon their step after the grace period of a stop."""
        await self._is_grace_over.wait()
        while True:
            # Ranks that have applied an update of the step finish it instead.
            await self._parts.trainer.abandon()
            await asyncio.sleep(ASK_AGAIN_S)

    async def _with_published(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Call the trainer, and return its answer.

        If a restart has changed the ranks' weights, publish these weights and repeat the call.
        """
        while True:
            try:
                return await call()
            except WeightsMoved as moved:
                self._parts.recorder.notice(str(moved))
                await self._join_loading()
                await self._parts.publisher.wait_until_loaded(await self._publish())

    async def _publish(self) -> int:
        while True:
            version = self._parts.trainer.version
            with suppress(WeightsMoved):
                await self._parts.publisher.publish(version)
                return version

    def _is_any_due(self, step: int) -> bool:
        return self._is_evaluation_due(step) or step % self._run_settings.checkpoint_every == 0

    def _is_evaluation_due(self, step: int) -> bool:
        return step % self._run_settings.evaluate_every == 0 or step == self._run_settings.steps

    async def _join_loading(self) -> None:
        """Wait until the engines have the last published version, and its step is recorded."""
        loading, self._loading = self._loading, None
        if loading is not None:
            await loading

    async def _load_and_record(self, trained: StepRecord) -> None:
        """Record a step once the engines have loaded its weights; meanwhile the next step runs."""
        await self._record(trained, await self._wait_until_loaded(trained))

    async def _load_and_checkpoint(self, trained: StepRecord) -> None:
        """Record a step once its weights are loaded; evaluate and write a checkpoint if due."""
        step, stages, watch = trained.step, trained.stages, Stopwatch()
        check = await self._wait_until_loaded(trained)
        stages = replace(stages, publish=stages.publish + watch.lap())
        if self._is_evaluation_due(step):
            await self._evaluate(step=step)
        stages = replace(stages, evaluate=watch.lap())
        is_due = step % self._run_settings.checkpoint_every == 0
        if is_due:
            await self._checkpoints.begin(step)
        stages = replace(stages, checkpoint=watch.lap())
        await self._record(replace(trained, stages=stages), check)
        if is_due:
            await self._checkpoints.commit_when_written(step)

    async def _wait_until_loaded(self, trained: StepRecord) -> LogprobCheck | None:
        check = await self._parts.publisher.wait_until_loaded(trained.policy_version)
        # The window counts steps: a version that was published again does not move it.
        await self._parts.queue.set_loaded_version(trained.step)
        return check

    async def _record(self, trained: StepRecord, check: LogprobCheck | None) -> None:
        record = finished_record(trained, check)
        await self._parts.recorder.step(record)
        for name, each in record.environments.items():
            if each.reward_mean is not None:
                is_known = each.scaled_reward_mean is not None
                self._knows_best[name] = self._knows_best.get(name, False) or is_known
        # Returns that are divided by the best one and returns that are not have no common mean.
        is_mixed = len({*self._knows_best.values()}) > 1
        if record.best_known_reward is None or is_mixed:
            self._rewards.clear()
        else:
            self._rewards.append(record.best_known_reward)
        # Do this after the record is stored: it shows by how much trainer and engines differ.
        if notice := self._failures.note_logprobs(trained.step, check):
            self._parts.recorder.notice(notice)

    async def _evaluate(self, *, step: int) -> None:
        self._evaluated_step = step
        if not self._parts.evaluation_sets:
            return
        if self._parts.pauses.holds_generation:
            # Waiting for the resume would delay the record and the checkpoint of a finished step.
            self._parts.recorder.notice(
                f"step {step}: its evaluation is left out, because generation is paused"
            )
            return
        parts: list[TrajectorySummary] = []
        sets = self._parts.evaluation_sets
        with suppress(StepAbandoned):
            for each in sets:
                summaries = await self._evaluate_set(each, step=step)
                parts += summaries if each.is_part else []
            if any(each.is_part for each in sets):
                version, sampling = self._parts.trainer.version, sampling_of_parts(sets)
                record = evaluation_record(step, parts, version=version, sampling=sampling)
                await self._parts.recorder.evaluation(record)

    async def _evaluate_set(self, found: EvaluationSet, *, step: int) -> list[TrajectorySummary]:
        version, name = self._parts.trainer.version, found.name
        what = f"term-{self._parts.term:04d}{f'-{name}' if name else ''}"
        summaries = await self._unless_grace_is_over(
            self._parts.environments.evaluate(
                found.tasks, found.sampling, file=evaluation_file(step, what)
            )
        )
        record = evaluation_record(
            step, summaries, version=version, sampling=found.sampling, name=name
        )
        await self._parts.recorder.evaluation(record)
        return summaries

    async def _finish(self) -> None:
        """Commit the last finished step; if the run is complete, cancel the rollouts in flight."""
        done = self._step - 1
        is_complete = not self._has_more
        if is_complete:
            if self.is_solved and self._evaluated_step != done:
                await self._evaluate(step=done)
            await self._parts.queue.cancel_all()
        # After a stop, the rollouts in flight are kept for the resume.
        await self._checkpoints.finish(done, is_complete=is_complete)
