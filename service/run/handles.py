"""The settings of a loop, and the actors and objects that it calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actors.algorithm import AlgorithmSettings
from actors.environment.evaluation import EvaluationSet
from actors.trajectory_queue.messages import StepInput
from service.config.tree import RunSettings
from service.run.health import FailureLimits
from service.run.pauses import Pauses
from service.run.task_feed import Curriculum, TaskFeed

if TYPE_CHECKING:
    # These import Ray, torch and vLLM, which the loop itself does not need.
    from actors.merge.actor import BuiltStep
    from service.run.engines import Publisher
    from service.run.environment_pool import EnvironmentPool
    from service.run.recorder import RunRecorder
    from service.run.restartable_queue import RestartableQueue
    from service.run.restartable_trainer import RestartableTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The loop's settings, and the point from which this term continues."""

    term: int

    run: RunSettings
    algorithm: AlgorithmSettings
    first_step: int
    """First step of this term: the checkpoint's step + 1, or 1."""
    failures: FailureLimits
    has_clients: bool = False
    """Whether clients submit the tasks; then groups that cannot be trained do not end the run."""
    checkpoint: str = ""
    """Name of the checkpoint from which this term continues; empty for a fresh start."""
    max_uncommitted: int = 1000
    """Number of evicted rollouts after which a waiting service commits the evictions.

    It also commits them after `commit_after_s`. If files must be written, both limits are
    multiplied by FILES_FACTOR.
    """
    commit_after_s: float = 60.0


class Merge(Protocol):
    """The merge actor's calls. They raise PayloadsLost; `build` also raises ScoresLost."""

    async def plan(self, step_input: StepInput, version: int) -> Sequence[Any]: ...
    async def build(
        self,
        step_input: StepInput,
        version: int,
        scores: Sequence[Any],
        republished: Sequence[int],
    ) -> BuiltStep: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """The actors and objects that the loop calls; tests replace them by small fakes."""

    queue: RestartableQueue
    merge: Merge
    trainer: RestartableTrainer
    publisher: Publisher
    environments: EnvironmentPool
    recorder: RunRecorder
    tasks: TaskFeed
    evaluation_sets: Sequence[EvaluationSet]
    pauses: Pauses

    prune_checkpoints: Callable[[], Awaitable[None]]
    """Removes the oldest checkpoints; called after a newer one is committed."""

    curriculum: Curriculum | None = None
    """The curriculum of `tasks`; it learns from each step, and each checkpoint stores it."""
