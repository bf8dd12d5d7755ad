"""A service without engines and trainer: real submission queue, store, recorder and window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from actors.metrics import Metrics
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import Group
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome, Task
from service.backlog.queue import SubmissionQueue
from service.config.sections import ServiceSettings
from service.intake.submission import RolloutRequest
from service.run.recorder import RunRecorder
from service.store.run_store import RunStore
from service.worker_thread import WorkerThread
from worlds.builders.queue_builders import cut, end, finalise_all, make_settings, take_all
from worlds.builders.record_builders import step_record

GROUPS_PER_STEP = 2
TakenStep = tuple[int, list[Group]]


def request(name: str, *, seed: int = 1, num_samples: int = 2) -> RolloutRequest:
    task = Task(task_id=name, environment="guessing", seed=seed)
    return RolloutRequest.of(task, asked_samples=num_samples, default_samples=num_samples)


@dataclass
class Service:
    """One process of a service; `restart` returns the process that follows it after a kill -9."""

    directory: Path
    settings: ServiceSettings = field(default_factory=lambda: ServiceSettings(max_waiting_tasks=8))
    step: int = 0
    queue: QueueState = field(init=False)
    taken: TakenStep | None = None

    def __post_init__(self) -> None:
        self.store = RunStore(f"sqlite:///{self.directory / 'run.db'}")
        thread = WorkerThread("store")
        self.submissions = SubmissionQueue(
            self.store,
            thread=thread,
            settings=self.settings,
            groups_per_step=GROUPS_PER_STEP,
            policy=OutcomePolicy(),
        )
        self.recorder = RunRecorder(
            self.store, Metrics(), thread=thread, num_steps=100, submissions=self.submissions
        )

    async def begin(self, *, passed_over: Collection[str] = ()) -> Service:
        """Take a lease and begin its term. passed_over: checkpoints that cannot be read."""
        lease = self.store.acquire_lease(owner="service", passed_over=passed_over)
        await self.recorder.begin_term(lease)
        snapshot = lease.queue_snapshot
        self.step = lease.parent.step if lease.parent else 0
        self.queue = QueueState(make_settings(step=GROUPS_PER_STEP, lag=1), snapshot=snapshot)
        if snapshot is not None:
            self.queue.set_loaded_version(self.step)
        for group_id in self.submissions.groups_to_cancel:
            self.queue.cancel_group(group_id)
        return self

    async def restart(self, *, passed_over: Collection[str] = ()) -> Service:
        self.store.close()
        return await Service(self.directory, settings=self.settings).begin(passed_over=passed_over)

    async def admit(self) -> list[str]:
        """Give tasks to the group numbers that need one; return the tasks' ids."""
        requests = await self.submissions.fill(self.queue.admissible())
        self.queue.admit(requests)
        self.drain()
        return [request.task.task_id for request in requests]

    def play(self, *, outcome: Outcome = Outcome.COMPLETED) -> int:
        """End every pending rollout with the outcome; return how many there were."""
        assignments = take_all(self.queue, environments=("guessing",))
        for assignment in assignments:
            assert end(self.queue, assignment, outcome=outcome, version=self.step)
        self.drain()
        return len(assignments)

    def take(self) -> None:
        """Take the groups of the next step, if it is complete; `train` trains them."""
        self.taken = self.taken or self.queue.take_step()

    async def train(self) -> list[str]:
        """Train and publish the next step, if it is complete; return its rollouts."""
        self.take()
        if self.taken is None:
            return []
        rollouts = finalise_all(self.queue, *self.taken)
        self.taken = None
        self.step += 1
        self.queue.set_loaded_version(self.step)
        self.drain()
        await self.recorder.step(step_record(self.step))
        return rollouts

    async def cancel(self, name: str) -> str | None:
        """Cancel a task as the supervisor does; return the task's status after that."""

        async def evict(group_id: str) -> bool:
            is_evicted = self.queue.cancel_group(group_id)
            # The ledger may show the eviction before the answer arrives.
            self.drain()
            return is_evicted

        view = await self.submissions.cancel(name, evict=evict)
        return None if view is None else view.status.value

    async def commit(self) -> None:
        snapshot, drained = cut(self.queue)
        self.recorder.events(drained.events)
        self.recorder.rollouts(drained.summaries)
        await self.recorder.checkpoint(
            step=self.step, version=self.step, directory=f"step-{self.step}", snapshot=snapshot
        )

    def drain(self) -> None:
        drained = self.queue.drain()
        self.recorder.events(drained.events)
        self.recorder.rollouts(drained.summaries)

    async def prune(self, *, keep: int = 1) -> None:
        """Forget what no kept checkpoint needs, as after a checkpoint."""
        kept = self.store.checkpoints()[:keep]
        await self.recorder.forget(kept, journal_steps=0, max_policy_age=1, keep_checkpoints=3)

    async def status(self, name: str) -> str:
        view = await self.submissions.view(name)
        assert view is not None
        return view.status.value
