"""The settings of the training loop, and the actors and objects that the loop calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.environment.evaluation import EvaluationSet
from service.config.tree import Config
from service.run.pauses import Pauses
from service.run.task_feed import ConfiguredTasks, Curriculum
from service.store.lineage import Checkpoint

if TYPE_CHECKING:
    # These import Ray, torch and vLLM, which the loop itself does not need.
    from service.backlog.queue import SubmissionQueue
    from service.run.actor_pool import EnvironmentPool
    from service.run.engines import Publisher
    from service.run.recorder import RunRecorder
    from service.run.restartable_merge import RestartableMerge
    from service.run.restartable_queue import RestartableQueue
    from service.run.restartable_trainer import RestartableTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The settings of a term's loop, and the actors and objects that the loop calls.

    Tests replace the actors and objects by small fakes.
    """

    config: Config
    term: int
    parent: Checkpoint | None
    """The checkpoint from which this term continues; None for a fresh start."""
    has_clients: bool = False
    """Whether clients submit the tasks; then groups that cannot be trained do not end the run."""
    commit_after_s: float = 60.0
    """Seconds after which a loop that waits for a step commits evicted rollouts.

    Only a run with clients does this; it also commits them after `MAX_UNCOMMITTED` evictions. If
    the commit must write a checkpoint's files, both limits are multiplied by FILES_FACTOR.
    """

    queue: RestartableQueue
    merge: RestartableMerge
    trainer: RestartableTrainer
    publisher: Publisher
    environments: EnvironmentPool
    recorder: RunRecorder
    tasks: ConfiguredTasks | SubmissionQueue
    evaluation_sets: Sequence[EvaluationSet]
    pauses: Pauses
    prune_checkpoints: Callable[[], Awaitable[None]]
    """Function that removes the oldest checkpoints; called after a newer one is committed."""
    curriculum: Curriculum | None = None
    """The curriculum of `tasks`; it learns from each step, and each checkpoint stores it.

    None if tasks are not chosen by a curriculum.
    """
