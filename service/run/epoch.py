"""One epoch of a run: the parts it starts from a checkpoint (or afresh), its loop, and their end.

An epoch ends with the run, with a stop, or with the loss of a part; the supervisor then starts the
next one from the newest committed checkpoint. So a resumed run and a recovered one are one path.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from actors.merge.actor import MergeActor
from actors.trainer.group import Deadlines, TrainerGroup, TrainerRankLost
from actors.trainer.manifest import CheckpointError, claim
from actors.trajectory_queue.actor import TrajectoryQueue
from actors.trajectory_queue.messages import QueueSnapshot, QueueStats
from service.config.settings_of import (
    environment_settings,
    failure_limits,
    journal_settings,
    merge_settings,
    queue_settings,
    trainer_settings,
)
from service.config.task_source import open_tasks
from service.config.tree import Config
from service.intake.queue import SubmissionQueue
from service.run.engines import Engines
from service.run.environment_pool import EnvironmentPool, PoolSettings
from service.run.loop import Loop, LoopSettings, Parts
from service.run.parts import EngineParts, MergeParts, QueueParts, TrainerParts
from service.run.ports import PartLost
from service.run.status import Phase
from service.run.task_feed import ConfiguredTasks
from service.store.run_store import Lease, RunStore
from service.telemetry.recorder import RunRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlaces:
    """Where a run's model, checkpoints and journal lie, as every node sees them."""

    model: str
    checkpoints: Path
    journal: Path


class ParentUnusable(Exception):
    """The checkpoint that the epoch was to go on from cannot be loaded. directory: its name."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return self.reason


class Epoch:
    """Made once per lease; `run` it, then `stop` it, whatever happened."""

    def __init__(
        self,
        config: Config,
        places: RunPlaces,
        *,
        lease: Lease,
        engines: Engines,
        store: RunStore,
        recorder: RunRecorder,
        intake: SubmissionQueue | None = None,
    ) -> None:
        """intake: where the tasks come from; None: the configuration's own."""
        self._config = config
        self._places = places
        self._lease = lease
        self._engines = engines
        self._store = store
        self._recorder = recorder
        self._intake = intake
        queue_class: Any = TrajectoryQueue
        self._queue_actor = queue_class.remote(queue_settings(config), self._snapshot())
        self.queue = QueueParts(self._queue_actor)
        self._group = TrainerGroup(
            trainer_settings(config, model=places.model, checkpoint_dir=places.checkpoints),
            deadlines=Deadlines(step_s=config.trainer.step_deadline_s),
            gpus_per_rank=config.trainer.gpus_per_rank,
        )
        self._merge_actor: ActorHandle | None = None
        self._pool: EnvironmentPool | None = None
        self._loop: Loop | None = None
        self._stop_asked = asyncio.Event()

    @property
    def is_training(self) -> bool:
        """Whether the start is over, so that there is a step in hand."""
        return self._loop is not None

    @property
    def is_solved(self) -> bool:
        """Whether the run ended before its last step, because its reward was high enough."""
        return self._loop is not None and self._loop.is_solved

    @property
    def first_step(self) -> int:
        return self._lease.parent.step + 1 if self._lease.parent else 1

    def request_stop(self) -> None:
        """Give up a start that is under way, or end after the step in hand."""
        self._stop_asked.set()
        if self._loop is not None:
            self._loop.stop()

    async def run(self) -> None:
        """Start the parts and train, until the end or a stop.

        Raises: PartLost; GivenUp; LeaseLost; TrainerStartFailed for a rank that cannot start
            however often; ParentUnusable; CheckpointError for one that cannot be written.
        """
        engine_parts = await self._start_unless_stopped()
        if engine_parts is None:
            return
        self._recorder.phase(Phase.TRAINING, "")
        assert self._pool is not None
        self._loop = Loop(self._parts(engine_parts), self._loop_settings())
        training = asyncio.create_task(self._loop.run())
        watching = [
            asyncio.create_task(self._pool.watch()),
            asyncio.create_task(self._watch_trainer()),
        ]
        try:
            await asyncio.wait({training, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for watch in watching:
                if watch.done():
                    watch.result()
            await training
        finally:
            for task in (training, *watching):
                task.cancel()
            await asyncio.gather(training, *watching, return_exceptions=True)

    async def _watch_trainer(self) -> None:
        """Raises: PartLost."""
        try:
            await self._group.watch()
        except TrainerRankLost as error:
            raise PartLost(str(error)) from error

    async def stop(self, *, is_orderly: bool) -> None:
        """End this epoch's actors; the engines stay.

        Only parts that are sound, and that began to train, have something to hand over.
        """
        if is_orderly and self.is_training:
            assert self._pool is not None
            await self._pool.stop()
            await self._group.stop()
        else:
            if self._pool is not None:
                self._pool.kill()
            self._group.kill()
        for actor in (self._merge_actor, self._queue_actor):
            if actor is not None:
                ray.kill(actor)

    async def stats(self) -> QueueStats:
        return await self.queue.stats()

    def _snapshot(self) -> QueueSnapshot | None:
        return self._lease.queue_snapshot

    async def _start_unless_stopped(self) -> EngineParts | None:
        """Start; None when a stop was asked for before the start was over."""
        if self._stop_asked.is_set():
            return None
        starting = asyncio.create_task(self._start())
        stopped = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            return None if stopped.done() else starting.result()
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)

    async def _start(self) -> EngineParts:
        config, version = self._config, self.first_step - 1
        self._recorder.starting("engines and trainer")
        claim(self._places.checkpoints, self._lease.term)
        await self._engines.open_epoch(self._lease.term)
        try:
            await self._group.start()
            await self._load_parent()
        except TrainerRankLost as error:
            raise PartLost(str(error)) from error
        self._merge_actor = self._start_merge_actor()
        engine_parts = EngineParts(
            self._group,
            self._engines.board,
            epoch=self._lease.term,
            deadline_s=config.inference.publish_deadline_s,
        )
        await engine_parts.offer(version)
        # Its actors import while the engines start; they play from `watch` on.
        self._pool = EnvironmentPool(
            PoolSettings(
                num_actors=config.rollouts.num_actors,
                settings_of=partial(environment_settings, config),
                tokenizer_path=self._places.model,
                make_policy=self._engines.make_policy,
                epoch=self._lease.term,
                frozen_after_s=config.rollouts.frozen_after_s,
            ),
            queue_actor=self._queue_actor,
            queue=self.queue,
            told=self._recorder,
        )
        await self._cancel_again()
        self._recorder.starting("waiting for the engines")
        await self._engines.wait_ready(deadline_s=config.inference.start_deadline_s)
        await engine_parts.wait(version)
        return engine_parts

    def _start_merge_actor(self) -> ActorHandle:
        """Behind the trainer's start, which tells the shape of the model."""
        config, merge_class = self._config, cast(Any, MergeActor)
        actor: ActorHandle = merge_class.options(num_cpus=0).remote(
            replace(merge_settings(config), shape=self._group.shape),
            journal_settings(config, directory=self._places.journal, epoch=self._lease.term),
        )
        return actor

    async def _cancel_again(self) -> None:
        """What was cancelled after the checkpoint is in the restored queue once more."""
        for group_id in self._intake.groups_to_cancel if self._intake else ():
            await self.queue.cancel_group(group_id)

    async def _load_parent(self) -> None:
        parent = self._lease.parent
        if parent is None:
            return
        try:
            await self._group.load(self._places.checkpoints / parent.directory)
        except CheckpointError as error:
            raise ParentUnusable(parent.directory, str(error)) from error

    def _parts(self, engines: EngineParts) -> Parts:
        assert self._pool is not None and self._merge_actor is not None
        config, algorithm = self._config, self._config.algorithm
        tasks = open_tasks(config)
        own = ConfiguredTasks(
            tasks,
            group_size=algorithm.group_size,
            min_usable_samples=algorithm.min_usable_samples,
        )
        return Parts(
            queue=self.queue,
            merge=MergeParts(self._merge_actor),
            trainer=TrainerParts(
                self._group,
                self._store,
                epoch=self._lease.term,
                keep=config.run.keep_checkpoints,
            ),
            engines=engines,
            environments=self._pool,
            tasks=self._intake or own,
            evaluation_tasks=tasks.held_out(config.tasks.evaluation_tasks),
            recorder=self._recorder,
        )

    def _loop_settings(self) -> LoopSettings:
        run, parent = self._config.run, self._lease.parent
        return LoopSettings(
            first_step=self.first_step,
            steps=run.steps,
            checkpoint_every=run.checkpoint_every,
            evaluate_every=run.evaluate_every,
            overlaps_publish=self._config.algorithm.max_lag > 0,
            failures=failure_limits(self._config) if self._intake is None else None,
            scores_first=self._config.algorithm.scores_first,
            # A service ends with its steps: clients may still bring what it cannot do yet.
            stop_at_reward=run.stop_at_reward if self._intake is None else None,
            checkpoint=parent.directory if parent else "",
        )
