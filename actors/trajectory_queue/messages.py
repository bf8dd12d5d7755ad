"""Arguments and results of the queue's methods: frozen values, no Ray, no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from actors.trajectory_queue.groups import FailedGroups, GroupSnapshot
from actors.trajectory_queue.ledger import LedgerCounts, LedgerEvent, LedgerSnapshot
from actors.trajectory_queue.window import WindowSnapshot
from actors.types import Task, TrajectorySummary


class Side(StrEnum):
    """A side that waits for the queue: environment actors fill it, the training loop empties it."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class ActorReleased(ValueError):
    """An actor that was released requests rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """A group number that has no task."""

    group_number: int
    replacement: int
    """Number of earlier groups of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrajectory:
    """One trajectory of a step: row `row` of StepInput.blocks[block]."""

    rollout_id: str
    block: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """P closed groups, which a step has taken."""

    step: int
    """Counted from 1."""

    groups: tuple[tuple[StepTrajectory, ...], ...]
    """For each group the members whose disposition is not drop."""

    blocks: tuple[Any, ...]
    """References to TrajectoryBlock, each once."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(member.rollout_id for group in self.groups for member in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupToScore:
    """A group whose rollouts have all ended, and which an environment actor scores together."""

    group_id: str
    group_number: int
    task: Task
    trajectories: tuple[StepTrajectory, ...]
    """The usable members of the group, in its order."""
    blocks: tuple[Any, ...]
    """References to the blocks that hold the trajectories, as in `StepInput`."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(member.rollout_id for member in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The queue's numbers. Counts are rollouts unless they say groups."""

    num_handed_out: int

    num_waiting: int
    """Finished, not yet taken by a step."""

    waiting_bytes: int
    num_replaced_groups: int

    num_refused: int
    """Late results that changed nothing."""

    num_retries: int
    """Attempts that were repeated."""

    loaded_version: int
    """The version that every ready engine holds."""

    ledger: LedgerCounts

    oldest_s: float | None = None
    """Seconds that the oldest finished trajectory has waited for a step; None: none waits."""

    blocked_s: Mapping[Side, float] = field(default_factory=dict)
    """Seconds since the queue was opened: for producers, the time in which they had free slots and
    only the bounds kept a rollout from them, summed; for the consumer, the time without a complete
    step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The events and summaries since the last drain, in order."""

    events: tuple[LedgerEvent, ...]
    summaries: tuple[TrajectorySummary, ...]
    """The summary of every accepted attempt."""
    failed_groups: FailedGroups | None = None
    """The failures up to now, not since the last drain; None: the last group was usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The state from which a queue starts again, without the trajectories that it held."""

    window: WindowSnapshot = field(default_factory=WindowSnapshot)
    ledger: LedgerSnapshot = field(default_factory=LedgerSnapshot)
    groups: tuple[GroupSnapshot, ...] = ()

    replacements: Mapping[int, int] = field(default_factory=dict)
    """How often each group number that is not finalised was filled before."""

    variance_refills: Mapping[int, int] = field(default_factory=dict)
    """The number of these refills that replaced a group of equal returns."""

    @property
    def last_event_seq(self) -> int:
        """Number of the newest ledger event that is in the snapshot; -1: none."""
        return self.ledger.next_seq - 1

    def without_task_data(self) -> QueueSnapshot:
        """Return the snapshot of a cut: with the tasks' ids, without their data."""
        groups = (replace(group, task=replace(group.task, data={})) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def with_tasks(self, tasks: Mapping[int, Task]) -> QueueSnapshot:
        """Restore the tasks. tasks: by group number, those that the groups were admitted with."""
        groups = tuple(replace(group, task=tasks[group.number]) for group in self.groups)
        assert [group.task.task_id for group in groups] == [g.task.task_id for g in self.groups]
        return replace(self, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCut:
    """The queue's state, and the events that were drained in the same call.

    So each ledger event is recorded once: with this cut up to the snapshot's last_event_seq, later
    ones after it. A cut is made at every poll, so that it contains only what happened since the
    last one.
    """

    opening: int
    """Number of the opening of the queue that made it."""
    number: int
    """0, 1, 2, … over the cuts of one opening."""
    snapshot: QueueSnapshot | None
    """Without the tasks' data, which the caller of `admit` has; None: unchanged since the last
    cut.
    """
    drained: Drained
