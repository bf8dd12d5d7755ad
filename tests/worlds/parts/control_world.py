"""An operator's control over a real store and recorder; the term and the engines are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from actors.deadline import ActorLost
from actors.environment.settings import Sampling
from actors.environment.tasks import GeneratedTasks
from actors.metrics import Metrics
from actors.types import Outcome, Task, TrajectorySummary
from actors.weights.board import BoardStatus, ReplicaReport
from service.access.keys import NamedKey
from service.api.problems import RunUnavailable
from service.api.schemas import ReadyAnswer
from service.launch.run_dir import RunDir
from service.run.control import Control
from service.run.health import readiness
from service.run.recorder import RunRecorder
from service.store.errors import LeaseLost, StoreError
from service.store.leases import Lease
from service.store.lineage import Checkpoint
from service.store.run_store import RunStore
from service.worker_thread import WorkerThread
from worlds.builders.store_builders import commit
from worlds.builders.trajectory_builders import make_summary
from worlds.runs.run_driver import write_checkpoint


@dataclass
class ScriptedTerm:
    """A term that trains, reduced to what the control calls."""

    is_training: bool = True
    step_in_hand: int | None = 7
    trained_version: int | None = 3
    republished: tuple[int, ...] = ()
    num_held_out: int = 3
    evaluation_tasks: Sequence[Task] = field(init=False)
    engines_read_text: bool = True
    is_held: bool = False
    commit: asyncio.Future[Checkpoint] = field(default_factory=asyncio.Future)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[str], Sampling, str, float]] = field(default_factory=list)
    passes_after: int = 2
    """The number of each task's first sample that passes."""
    control: Control | None = None

    def __post_init__(self) -> None:
        self.evaluation_tasks = GeneratedTasks("guessing", run_seed=0).held_out(self.num_held_out)

    async def checkpoint(self) -> Checkpoint:
        return await self.commit

    async def apply_generation_pause(self) -> None:
        assert self.control is not None
        self.is_held = self.control.pauses.holds_generation

    async def evaluate(
        self, tasks: Sequence[Task], sampling: Sampling, *, file: str, slots_share: float
    ) -> list[TrajectorySummary]:
        await self.go_on.wait()
        self.asked.append(([task.task_id for task in tasks], sampling, file, slots_share))
        return [
            played(task.task_id, reward=float(number >= self.passes_after))
            for task in tasks
            for number in range(sampling.num_samples)
        ]


def played(task_id: str, *, reward: float, num_sampled: int = 4, version: int = 3) -> Any:
    """Make the summary of an evaluation's sample."""
    return replace(
        make_summary("g000000.0-0", outcome=Outcome.COMPLETED),
        task_id=task_id,
        episode_return=reward,
        best_return=None,
        num_sampled=num_sampled,
        newest_version=version,
    )


@dataclass
class ScriptedEngines:
    """A pair of engines, as the weight board reports them."""

    term: ScriptedTerm
    term_number: int = 1
    is_lost: bool = False

    async def status(self) -> BoardStatus:
        if self.is_lost:
            raise ActorLost("the board does not answer")
        return BoardStatus(
            term=self.term_number,
            version=3,
            replicas=(
                ReplicaReport(
                    replica_id="a", num_workers=1, term=self.term_number, version=3,
                    loaded_at=90.0, is_held=self.term.is_held,
                ),
                ReplicaReport(
                    replica_id="b", num_workers=1, term=self.term_number, version=2,
                    is_held=self.term.is_held,
                ),
            ),
            now=100.0,
        )  # fmt: skip


@dataclass
class World:
    """One process of a run; `restart` returns the process that follows it after a kill -9."""

    directory: Path

    def __post_init__(self) -> None:
        self.place = RunDir(path=self.directory)
        self.store = RunStore(f"sqlite:///{self.directory / 'run.db'}")
        thread = WorkerThread("store")
        self.metrics = Metrics()
        self.recorder = RunRecorder(self.store, self.metrics, thread=thread, num_steps=100)
        self.term = ScriptedTerm()
        self.engines = ScriptedEngines(self.term)
        self.control = Control(
            self.store,
            thread=thread,
            recorder=self.recorder,
            engines=cast(Any, self.engines),
            checkpoints=self.place.checkpoints,
            read_queue=lambda: None,
        )
        self.term.control = self.control

    async def begin(self) -> Lease:
        """Take a lease, as the supervisor does, and train."""
        lease = self.store.acquire_lease(owner="here", returns_to=self.control.returns_to)
        self.recorder.term_number = lease.term
        await self.recorder.begin_term(lease)
        await self.control.begin_term(lease)
        self.engines.term_number = lease.term
        self.control.term = cast(Any, self.term)
        self.recorder.training(str(self.control.pauses))
        return lease

    async def restart(self) -> World:
        self.store.close()
        world = World(self.directory)
        await world.begin()
        return world

    def commit(self, step: int) -> str:
        """Commit a checkpoint; return its id."""
        term = self.recorder.term_number
        directory = write_checkpoint(self.place, step, term).name
        commit(self.store, term=term, step=step, directory=directory)
        return directory


@dataclass
class AskedControl:
    """The control, as the supervisor's client calls it."""

    control: Control
    is_gone: bool = False

    def __getattr__(self, call: str) -> Any:
        async def ask(*arguments: Any, **named: Any) -> Any:
            if self.is_gone:
                raise RunUnavailable("the run does not answer")
            try:
                return await getattr(self.control, call)(*arguments, **named)
            except (LeaseLost, StoreError) as error:
                raise RunUnavailable(str(error)) from error

        return ask


@dataclass
class LocalControl:
    """The port of the control's routes, in this process."""

    world: World
    stops: list[float | None] = field(default_factory=list)
    is_gone: bool = False
    named_keys: Sequence[NamedKey] = ()

    @property
    def control(self) -> AskedControl:
        return AskedControl(self.world.control, is_gone=self.is_gone)

    async def keys(self) -> Sequence[NamedKey]:
        return self.named_keys

    async def stop(self, grace_s: float | None) -> None:
        self.stops.append(grace_s)

    async def readiness(self) -> ReadyAnswer:
        recorder = self.world.recorder
        return readiness(
            phase=recorder.current_phase, detail=recorder.phase_detail, policy_version=3,
            engines_ready=2, engines_expected=2, behind_s=0.0, publish_limit_s=30.0,
            store_away_s=0.0,
        )  # fmt: skip
