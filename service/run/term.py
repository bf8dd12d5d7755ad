"""One term of a run: start the actors, run the loop, and end the actors.

A term is the time under one lease of the run's database. It ends when the run ends or is stopped,
or when an actor is lost that cannot be replaced in place. The next term, of a recovered or a
resumed run, continues from the newest committed checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.deadline import ActorLost, beside, race, retry
from actors.environment.evaluation import EvaluationSet
from actors.environment.settings import Sampling
from actors.environment.tasks import TaskSource
from actors.limits import GIB
from actors.merge.actor import MergeActor
from actors.merge.journal import Journal
from actors.trainer.checkpoint import CheckpointError, CheckpointNotWritten, claim
from actors.trainer.group import TrainerGroup, remove_reservations, reservation_name
from actors.trajectory_queue.settings import QueueStateSettings
from actors.types import SESSION, UPLOADED, Task, TokenIds, TrajectorySummary
from actors.weights.logprob_check import CheckText, LogprobCheck, bounds_dtype, start_text
from service.backlog.queue import SubmissionQueue
from service.config.tasks import held_out_tasks, open_sets, open_tasks
from service.config.tree import Config
from service.gateway.sampling import GatewaySettings
from service.gateway.sessions import Gateway
from service.inference.settings import AUTO
from service.launch.cluster import alive_nodes, on_this_node
from service.launch.placement import Role, describe_places, resources_of, roles_of
from service.launch.resume import kept_commits, prune_directories
from service.launch.run_dir import RunDir
from service.remote_calls import await_reply
from service.run.actor_pool import (
    EnvironmentPool,
    EvaluationFiles,
    GatewayPool,
    evaluation_idle_s,
    start_environment_actor,
)
from service.run.engines import Engines, Publisher, watch_board
from service.run.health import RunFailed
from service.run.loop import Loop
from service.run.loop_parts import LoopParts
from service.run.pauses import Pauses
from service.run.recorder import RunRecorder
from service.run.restartable_merge import RestartableMerge
from service.run.restartable_queue import RestartableQueue
from service.run.restartable_trainer import RestartableTrainer
from service.run.task_feed import ConfiguredTasks, Curriculum
from service.store.database import PATIENCE_S
from service.store.leases import Lease
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore

log = logging.getLogger("rayloom.term")

# Number of tasks whose first prompts make up the text of the log-probability check, and the seconds
# for which these prompts may delay a start.
MAX_OPENING_TASKS, PROMPTS_GRACE_S = 16, 5.0
# Number of requests that may wait in the gateway for their group's admission or for their turn.
MAX_HELD_REQUESTS = 20_000


class ParentUnusable(Exception):
    """Raised if the checkpoint from which the term continues cannot be loaded."""

    def __init__(self, directory: str, reason: str) -> None:
        """Create the error. directory: name of the checkpoint's directory."""
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return self.reason


class Term:
    """One term of a run: its actors and its training loop; call `run`, then always `stop`."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        model: str,
        run_id: str,
        lease: Lease,
        engines: Engines,
        store: RunStore,
        recorder: RunRecorder,
        pauses: Pauses,
        submissions: SubmissionQueue | None = None,
        roles_before: frozenset[Role] = frozenset(),
    ) -> None:
        """Start the queue's process, and prepare everything else.

        Args: model: path or hub name of the model. submissions: the source of tasks; None uses the
        tasks of the configuration. roles_before: the roles that nodes offered in earlier terms.
        The actors of a role in `roles_before` wait if no node offers the role now.
        """
        self._config = config
        self.engines_read_text = config.engine_reads_text
        """Whether the engines read text besides tokens, which structured outputs need."""
        self._run_dir = run_dir
        self._model = model
        self._run_id = run_id
        self._lease = lease
        self._engines = engines
        self._store = store
        self._recorder = recorder
        self._pauses = pauses
        self._submissions = submissions
        queue_settings = QueueStateSettings(
            algorithm=config.algorithm,
            queue=config.queue,
            num_steps=config.run.steps,
            policies=config.policies,
            durable=frozenset({SESSION, UPLOADED}),
            scores_groups=frozenset(
                name for name, each in config.environments.items() if each.scores_groups
            ),
        )
        nodes = alive_nodes()
        self.roles = roles_of(nodes, before=roles_before)
        log.info("%s", describe_places(self.roles, nodes))
        self.queue = RestartableQueue(
            queue_settings, lease.queue_snapshot, recorder=recorder, strategy=on_this_node()
        )
        ranks = config.rank_settings(model=model, checkpoint_dir=run_dir.checkpoints)
        self._trainer = RestartableTrainer(
            partial(
                TrainerGroup,
                ranks,
                resources=resources_of("rayloom_trainer", self.roles),
                reservation=reservation_name(run_id, lease.term),
            ),
            parent=run_dir.checkpoints / lease.parent.directory if lease.parent else None,
            first_step=self.first_step,
            max_kept_bytes=config.trainer.max_replay_mib * 2**20,
            on_restart=partial(recorder.replaced, "trainer"),
            on_check=recorder.ranks,
            on_republish=self._send_republished,
        )
        self._merge: RestartableMerge | None = None
        self._pool: EnvironmentPool | None = None
        self._gateways: GatewayPool | None = None
        """The pool with the run's one gateway; None if the run has no clients."""
        self._is_queue_open = False
        self._num_ahead = 0
        """Version of the weights minus number of the step when the term began."""
        self._loop: Loop | None = None
        self.evaluation_tasks: Sequence[Task] = ()
        """The held-out tasks of the run; empty until training begins."""
        self._evaluation_sets: Sequence[EvaluationSet] = ()
        self._stop_asked = asyncio.Event()
        self._opening_tasks: asyncio.Task[TaskSource] | None = None
        self._notices: list[str] = []
        """Notices for the user that were made while the tasks were opened."""

    @property
    def is_training(self) -> bool:
        """Whether training has begun; stays True after training has ended."""
        return self._loop is not None

    @property
    def is_solved(self) -> bool:
        """Whether training ended before the last step, because the reward reached its goal."""
        return self._loop is not None and self._loop.is_solved

    @property
    def first_step(self) -> int:
        return self._lease.parent.step + 1 if self._lease.parent else 1

    @property
    def step_in_hand(self) -> int | None:
        """Number of the step that is being trained; None while no step is."""
        return self._loop.step_in_hand if self._loop is not None else None

    @property
    def trained_version(self) -> int | None:
        """Version of the trainer's weights; None before training begins."""
        return self._trainer.version if self.is_training else None

    @property
    def republished(self) -> Sequence[int]:
        """Versions that replaced the version before them without a new training step.

        Each comes from a restart of the trainer: the new ranks' weights differed from the lost
        ranks' weights, so the new weights were published under the next version number.
        """
        return self._trainer.republished

    @property
    def gateway(self) -> ActorHandle | None:
        """The handle of the gateway, the actor that serves sessions; None if there is none."""
        return None if self._gateways is None else next(iter(self._gateways.actors.values()))

    def request_stop(self, *, grace_s: float | None = None) -> None:
        """Abort the start, or end the term after the current step.

        grace_s: after this many seconds, a step whose update is not applied yet is abandoned; None
        sets no limit.
        """
        self._stop_asked.set()
        if self._loop is not None:
            self._loop.stop(grace_s=grace_s)

    async def checkpoint(self) -> Checkpoint:
        """Request a checkpoint from the loop; return the checkpoint once it is committed.

        The term must be training.
        """
        assert self._loop is not None
        return await self._loop.checkpoint()

    async def evaluate(
        self, tasks: Sequence[Task], sampling: Sampling, *, file: str, slots_share: float
    ) -> list[TrajectorySummary]:
        """Play tasks, and return a summary of each rollout, as `EnvironmentPool.evaluate` does.

        The term must be training.
        """
        assert self._pool is not None
        return await self._pool.evaluate(tasks, sampling, file=file, slots_share=slots_share)

    async def apply_generation_pause(self) -> None:
        """Stop queue and engines if generation is paused; if it is not, let them continue.

        If the queue is not open yet, `_start` calls this method again once it is. Raises:
        ActorLost.
        """
        is_held = self._pauses.holds_generation
        await self._engines.hold(is_held)
        if self._is_queue_open:
            await self.queue.hold(is_held)

    async def run(self) -> None:
        """Start the actors, and train until the run's end or a stop.

        Raises: ActorLost; RunFailed; LeaseLost; TrainerStartFailed if a rank can never start;
            ParentUnusable; CheckpointError if a checkpoint cannot be written.
        """
        publisher = await self._start_unless_stopped()
        if publisher is None:
            return
        self._recorder.training(str(self._pauses))
        assert self._pool is not None
        by_model: dict[str, Any] = {"model_path": self._model, "tell": self._notices.append}
        tasks = await self._open_tasks()
        self._evaluation_sets = await asyncio.to_thread(open_sets, self._config, tasks, **by_model)
        for notice in self._notices:
            self._recorder.notice(notice)
        if self._stop_asked.is_set():
            return
        self.evaluation_tasks = held_out_tasks(self._config, tasks)
        self._loop = Loop(self._loop_parts(publisher, tasks))
        # `watch` of a pool also calls each actor's `run`, so the actors play only from here on.
        await beside(
            self._loop.run(),
            self._pool.watch(),
            self._trainer.watch(),
            watch_board(self._engines.board),
            *([self._gateways.watch()] if self._gateways else []),
        )

    async def stop(self, *, is_orderly: bool) -> None:
        """End this term's actors; the engines keep running for the next term.

        is_orderly: whether no actor was lost. If no actor was lost and training has begun, the
        actors first send their rollouts to the queue.
        """
        if is_orderly and self.is_training:
            assert self._pool is not None
            await asyncio.gather(
                self._pool.stop(), *([self._gateways.stop()] if self._gateways else [])
            )
            await self._trainer.stop()
        else:
            for pool in (self._pool, self._gateways):
                if pool is not None:
                    pool.kill()
            self._trainer.kill()
        if self._merge is not None:
            self._merge.kill()
        self.queue.kill()

    async def _start_unless_stopped(self) -> Publisher | None:
        if self._stop_asked.is_set():
            return None
        async with race(self._start(), self._stop_asked.wait()) as (starting, stopped):
            return None if stopped.done() else starting.result()

    async def _start(self) -> Publisher:
        config = self._config
        self._recorder.starting("engines and trainer")
        term = self._lease.term
        await self._claim_checkpoints()
        await asyncio.to_thread(remove_reservations, self._run_id, before_term=term)
        # Start the engines first, because they take longest.
        with self._recorder.stage("deploying the engines"):
            await self._engines.open_term(
                term, resources=resources_of("rayloom_inference", self.roles)
            )
        # Then reserve the ranks' resources, which must be on one node. Then the queue and
        # environment actors import while ranks and engines start; `EnvironmentPool.watch` lets the
        # actors play.
        await self._trainer.reserve()
        self._pool = EnvironmentPool(
            config.num_environment_actors,
            self._start_environment_actor,
            term=term,
            frozen_after_s=config.rollouts.frozen_after_s,
            queue=self.queue,
            recorder=self._recorder,
            evaluation_idle_s=evaluation_idle_s(config),
            files=EvaluationFiles(
                self._run_dir.evaluations,
                keep=config.evaluation.keep_results,
                notice=self._recorder.notice,
            ),
        )
        opening = asyncio.create_task(self._opening_prompts())
        try:
            await asyncio.gather(self._start_trainer(), self.queue.open())
            # The prompts are here by now, unless environments are slow or have no node yet.
            await asyncio.wait({opening}, timeout=PROMPTS_GRACE_S)
        finally:
            opening.cancel()
        prompts = () if opening.cancelled() or not opening.done() else opening.result()
        self._is_queue_open = True
        await self.apply_generation_pause()
        version = self._trainer.version
        self._num_ahead = version - (self.first_step - 1)
        if self._submissions is not None:
            self._gateways = GatewayPool(
                1,
                self._start_gateway,
                term=term,
                frozen_after_s=config.rollouts.frozen_after_s,
                queue=self.queue,
                recorder=self._recorder,
            )
        self._merge = RestartableMerge(
            self._start_merge_actor,
            on_restart=partial(self._recorder.replaced, "merge_actor"),
        )
        publisher = Publisher(
            self._trainer,
            self._engines.board,
            term=self._lease.term,
            quiet_limit_s=config.inference.start_deadline_s,
            measure=self._recorder.publishing,
            text=self._check_text(prompts),
            # An engine samples one token after a prompt.
            most_tokens=config.model.max_context_tokens - 1,
            check_every=config.trainer.logprob_check_every,
            dtype=bounds_dtype(config.model.dtype, config.trainer.dtype),
            is_quantised=config.inference.is_quantised,
        )
        with self._recorder.stage("first publication and the trainer's check"):
            await publisher.publish(version)
        await self._cancel_again()
        self._recorder.starting("waiting for the engines")
        await self._engines.wait_ready()
        with self._recorder.stage("comparing engines and trainer"):
            check = await publisher.check_start(version)
        self._heed_check(check)
        return publisher

    async def _opening_prompts(self) -> Sequence[TokenIds]:
        """Return the prompts of the first tasks, for the log-probability check.

        Return () if the check is off, or if no environment actor answers.
        """
        assert self._pool is not None
        if self._config.trainer.logprob_check_tokens == 0 or not self._pool.actors:
            return ()
        tasks = await self._open_tasks()
        first = [tasks.task(index) for index in range(MAX_OPENING_TASKS)]
        num_tokens = self._config.model.max_context_tokens
        return await self._pool.opening_prompts(first, num_tokens=num_tokens)

    def _check_text(self, prompts: Sequence[TokenIds]) -> CheckText | None:
        config, shape = self._config, self._trainer.shape
        if config.trainer.logprob_check_tokens == 0 or shape is None:
            return None
        return start_text(
            prompts,
            max_context_tokens=config.model.max_context_tokens,
            limit=config.trainer.logprob_check_tokens,
            is_on_cpu=config.inference.is_on_cpu,
            vocab_size=shape.vocab_size,
            temperatures=[each.rollouts.temperature for each in config.members.values()],
        )

    def _heed_check(self, check: LogprobCheck | None) -> None:
        """Raise RunFailed if the check at the start found differing log-probabilities."""
        if check is None:
            self._recorder.notice(
                "trainer and engines were not compared: no engine has scored the text in time; "
                "lower trainer.logprob_check_tokens"
            )
            return
        for each in check.comparisons:
            log.info("log-probability check of the start: %s", each)
        if check.is_beyond:
            raise RunFailed(
                f"the start is refused: {check}; to train nevertheless, set "
                "trainer.logprob_check_tokens to 0"
            )

    async def _open_tasks(self) -> TaskSource:
        """Return the run's tasks; the first call opens them, and later calls wait for the first."""
        if self._opening_tasks is None:
            self._opening_tasks = asyncio.create_task(
                asyncio.to_thread(
                    open_tasks, self._config, model_path=self._model, tell=self._notices.append
                )
            )
        return await asyncio.shield(self._opening_tasks)

    async def _claim_checkpoints(self) -> None:
        """Claim the directory of checkpoints, so that older terms can no longer write there.

        Raises: CheckpointError if a newer term has claimed the directory, or the disk stays full.
        """
        directory = self._run_dir.checkpoints

        async def attempt() -> None:
            await asyncio.to_thread(claim, directory, self._lease.term)

        try:
            await retry(attempt, on=OSError, limit_s=PATIENCE_S)
        except OSError as error:
            raise CheckpointNotWritten(f"checkpoints {directory}: {error}") from error

    def _start_environment_actor(self, actor_id: str) -> ActorHandle:
        return start_environment_actor(
            self._config,
            actor_id=actor_id,
            model=self._model,
            make_policy=self._engines.make_policy,
            queue=self.queue.actor,
            resources=resources_of("rayloom_environments", self.roles),
        )

    def _start_gateway(self, actor_id: str) -> ActorHandle:
        config = self._config
        actor_class = ray.remote(Gateway).options(
            num_cpus=0,
            max_concurrency=MAX_HELD_REQUESTS,
            # The run's database may be a file on this node.
            scheduling_strategy=on_this_node(),
        )
        return actor_class.remote(
            GatewaySettings(
                sessions=config.sessions,
                rollouts=config.rollouts,
                algorithm=config.algorithm,
                max_context_tokens=config.model.max_context_tokens,
                chat_template=config.model.chat_template,
                default_limits=config.service.key_limits,
                finds_parser=config.inference.tool_parser == AUTO,
                num_ahead=self._num_ahead,
                republished=self._trainer.republished,
                shape=self._trainer.shape,
            ),
            actor_id=actor_id,
            tokenizer_path=self._model,
            make_policy=self._engines.make_policy,
            queue=self.queue.actor,
            database_url=self._run_dir.database_url,
            run_id=self._run_id,
            term=self._lease.term,
        )

    async def _send_republished(self, versions: tuple[int, ...]) -> None:
        """Send the versions that were published without a new step to the gateway."""
        if (gateway := self.gateway) is not None:
            # A gateway that replaces a dead one gets the versions with its settings.
            with suppress(ActorLost):
                await await_reply(
                    gateway.set_republished.remote(versions),
                    name="gateway",
                    deadline_s=self._config.rollouts.frozen_after_s,
                )

    def _start_merge_actor(self) -> ActorHandle:
        """Start a merge actor. The trainer must have started, because its shape is needed."""
        settings = self._config.step_settings(shape=self._trainer.shape)
        actor_class = ray.remote(MergeActor).options(num_cpus=0, scheduling_strategy=on_this_node())
        return actor_class.remote(settings, self._journal())

    def _journal(self) -> Journal | None:
        config = self._config
        if config.run.journal_steps == 0:
            return None
        return Journal(
            directory=self._run_dir.journal,
            term=self._lease.term,
            keep_steps=config.run.journal_steps,
            keep_bytes=int(config.run.journal_gib * GIB),
            max_policy_age=config.algorithm.max_policy_age,
            group_rule=config.group_rule,
        )

    async def _cancel_again(self) -> None:
        """Cancel the groups that clients cancelled after the restored checkpoint was written."""
        for group_id in self._submissions.groups_to_cancel if self._submissions else ():
            await self.queue.cancel_group(group_id)

    async def _start_trainer(self) -> None:
        parent = self._lease.parent
        try:
            with self._recorder.stage("trainer"):
                await self._trainer.start()
        except CheckpointError as error:
            assert parent is not None
            raise ParentUnusable(parent.directory, str(error)) from error

    def _loop_parts(self, publisher: Publisher, tasks: TaskSource) -> LoopParts:
        assert self._pool is not None and self._merge is not None
        config, algorithm = self._config, self._config.algorithm
        has_clients = self._submissions is not None
        if has_clients:
            # A run with clients ends only with its last step: harder tasks may still be submitted.
            config = replace(config, run=replace(config.run, stop_at_reward=None))
        curriculum = None
        if self._config.curriculum.is_on and self._submissions is None:
            curriculum = Curriculum(self._config.curriculum, tasks, results=self._lease.curriculum)
        own = ConfiguredTasks(
            tasks,
            group_size=algorithm.group_size,
            min_usable_samples=algorithm.min_usable_samples,
            curriculum=curriculum,
        )
        return LoopParts(
            config=config,
            term=self._lease.term,
            parent=self._lease.parent,
            has_clients=has_clients,
            queue=self.queue,
            merge=self._merge,
            trainer=self._trainer,
            publisher=publisher,
            environments=self._pool,
            recorder=self._recorder,
            tasks=self._submissions or own,
            evaluation_sets=self._evaluation_sets,
            pauses=self._pauses,
            prune_checkpoints=self._prune_checkpoints,
            curriculum=curriculum,
        )

    async def _prune_checkpoints(self) -> None:
        """Remove the database's rows that are no longer needed, then the outdated checkpoints."""
        config, directory = self._config, self._run_dir.checkpoints
        kept = await asyncio.to_thread(
            kept_commits,
            directory,
            self._store,
            term=self._lease.term,
            keep=config.run.keep_checkpoints,
            keep_best=config.run.keep_best,
            collapsed_since=self._recorder.collapsed_since,
        )
        if kept:
            await self._recorder.forget(
                kept,
                keep_checkpoints=config.run.keep_checkpoints,
                journal_steps=config.run.journal_steps,
                max_policy_age=config.algorithm.max_policy_age,
            )
            await asyncio.to_thread(
                prune_directories, directory, kept, uploading=self._recorder.uploading
            )
