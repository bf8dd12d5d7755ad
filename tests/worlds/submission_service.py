"""A service without engines and trainer: the real submission queue, store, recorder, window."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from actors.metrics import Metrics
from actors.outcomes import OutcomePolicy
from actors.trajectory_queue.groups import Group
from actors.trajectory_queue.messages import QueueCut
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome, Task
from service.intake.queue import SubmissionQueue
from service.intake.submission import RolloutRequest
from service.store.run_store import RunStore
from service.telemetry.recorder import RunRecorder
from worlds.queue_builders import end, finalise_all, make_settings, take_all
from worlds.record_builders import step_record

GROUPS_PER_STEP = 2
TakenStep = tuple[int, list[Group]]


def request(name: str, *, seed: int = 1, num_samples: int = 2) -> RolloutRequest:
    task = Task(task_id=name, environment="guessing", seed=seed)
    return RolloutRequest(task=task, num_samples=num_samples)


@dataclass
class Service:
    """One process of a service: `restart` is what a kill -9 and a new start make of it."""

    directory: Path
    capacity: int = 8
    step: int = 0
    queue: QueueState = field(init=False)
    taken: TakenStep | None = None

    def __post_init__(self) -> None:
        self.store = RunStore(f"sqlite:///{self.directory / 'run.db'}")
        self.submissions = SubmissionQueue(
            self.store,
            capacity=self.capacity,
            groups_per_step=GROUPS_PER_STEP,
            policy=OutcomePolicy(),
        )
        self.recorder = RunRecorder(
            self.store, Metrics(), num_steps=100, submissions=self.submissions
        )

    def begin(self) -> Service:
        lease = self.store.acquire_lease(owner="service")
        self.recorder.begin_term(lease)
        snapshot = lease.queue_snapshot
        self.step = lease.parent.step if lease.parent else 0
        self.queue = QueueState(make_settings(step=GROUPS_PER_STEP, lag=1), snapshot=snapshot)
        if snapshot is not None:
            self.queue.set_loaded_version(self.step)
        for group_id in self.submissions.groups_to_cancel:
            self.queue.cancel_group(group_id)
        return self

    def restart(self) -> Service:
        self.store.close()
        return Service(self.directory, capacity=self.capacity).begin()

    async def admit(self) -> list[str]:
        """Give tasks to the group numbers that want one; the tasks' ids."""
        requests = await self.submissions.fill(self.queue.admissible())
        self.queue.admit(requests)
        self.drain()
        return [request.task.task_id for request in requests]

    def play(self, *, outcome: Outcome = Outcome.COMPLETED) -> int:
        """Let every pending rollout end so; how many there were."""
        assignments = take_all(self.queue)
        for assignment in assignments:
            assert end(self.queue, assignment, outcome=outcome, version=self.step)
        self.drain()
        return len(assignments)

    def take(self) -> None:
        """Let the next step take its groups, where it is complete; `train` goes on with it."""
        self.taken = self.taken or self.queue.take_step()

    def train(self) -> list[str]:
        """Train the next step and publish it; its rollouts, none where it is not complete."""
        self.take()
        if self.taken is None:
            return []
        rollouts = finalise_all(self.queue, *self.taken)
        self.taken = None
        self.step += 1
        self.queue.set_loaded_version(self.step)
        self.drain()
        self.recorder.step(step_record(self.step))
        return rollouts

    async def cancel(self, name: str) -> str | None:
        """As the supervisor does it; how the task stands then."""

        async def evict(group_id: str) -> bool:
            is_evicted = self.queue.cancel_group(group_id)
            # The ledger may tell of it before the answer comes.
            self.drain()
            return is_evicted

        view = await self.submissions.cancel(name, evict=evict)
        return None if view is None else view.status.value

    def commit(self) -> None:
        cut = QueueCut(drained=self.queue.drain(), snapshot=self.queue.snapshot())
        self.recorder.events(cut.drained.events)
        self.recorder.rollouts(cut.drained.summaries)
        self.recorder.checkpoint(
            step=self.step, version=self.step, directory=f"step-{self.step}", cut=cut
        )

    def drain(self) -> None:
        drained = self.queue.drain()
        self.recorder.events(drained.events)
        self.recorder.rollouts(drained.summaries)

    def status(self, name: str) -> str:
        view = self.submissions.view(name)
        assert view is not None
        return view.status.value
