"""Arguments and results of the queue's methods, as frozen dataclasses without token arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from actors.trajectory_queue.groups import FailedGroups, GroupSnapshot
from actors.trajectory_queue.ledger import LedgerCounts, LedgerEvent, LedgerSnapshot
from actors.trajectory_queue.window import WindowSnapshot
from actors.types import Task, TrajectorySummary

Side = Literal["producer", "consumer"]
"""A side of the queue: environment actors produce, the training loop consumes."""


class ActorReleased(ValueError):
    """An actor requested rollouts after it was released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """A group number to which a task can be admitted now."""

    group_number: int
    replacement: int
    """Number of earlier groups with this group number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrajectory:
    """One trajectory of a step: row `row` of StepInput.blocks[block]."""

    rollout_id: str
    block: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The groups that a step has taken from the queue, `groups_per_step` in number.

    The groups are closed: all their rollouts have ended.
    """

    step: int
    """The step's number, counted from 1."""

    groups: tuple[tuple[StepTrajectory, ...], ...]
    """The finished members of each group."""

    blocks: tuple[Any, ...]
    """References to the blocks (TrajectoryBlock), each once."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(member.rollout_id for group in self.groups for member in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupToScore:
    """A group whose rollouts have all ended and which an environment actor scores as a whole."""

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
    """Statistics of the queue. Counts are of rollouts unless the field's name says groups."""

    num_handed_out: int

    num_waiting: int
    """Number of rollouts that have finished and that no step has taken yet."""

    waiting_bytes: int
    num_replaced_groups: int

    num_refused: int
    """Number of late results, which were refused."""

    num_retries: int
    """Number of repeated attempts."""

    loaded_version: int
    """The version that every ready engine holds."""

    ledger: LedgerCounts

    oldest_s: float | None = None
    """Seconds that the oldest finished trajectory has waited for a step; None if none waits."""

    blocked_s: Mapping[Side, float] = field(default_factory=dict)
    """Seconds of waiting since the queue was opened. Producers: the sum of the times in which an
    actor had free slots and only the bounds kept rollouts from it. Consumer: the time in which the
    training loop waited for a complete step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The state from which a queue restarts, without the trajectories that it held."""

    window: WindowSnapshot = field(default_factory=WindowSnapshot)
    ledger: LedgerSnapshot = field(default_factory=LedgerSnapshot)
    groups: tuple[GroupSnapshot, ...] = ()

    replacements: Mapping[int, int] = field(default_factory=dict)
    """Number of earlier groups with the same group number, by group number; only for groups whose
    step is not finalised.
    """

    variance_refills: Mapping[int, int] = field(default_factory=dict)
    """Number of groups that were replaced because of equal returns, by group number."""

    @property
    def last_event_seq(self) -> int:
        """The `seq` of the newest ledger event that the snapshot includes; -1 without an event."""
        return self.ledger.next_seq - 1

    def without_task_data(self) -> QueueSnapshot:
        """Return this snapshot without the tasks' data, which a cut omits; the tasks' ids stay."""
        groups = (replace(group, task=replace(group.task, data={})) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def with_tasks(self, tasks: Mapping[int, Task]) -> QueueSnapshot:
        """Restore the data of the tasks. tasks: the task of each group, by group number."""
        groups = tuple(replace(group, task=tasks[group.number]) for group in self.groups)
        assert [group.task.task_id for group in groups] == [g.task.task_id for g in self.groups]
        return replace(self, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCut:
    """A report on the queue: its state, and the events since the previous report (the last cut).

    Every answer to the training loop contains a cut. Each ledger event is in exactly one cut. All
    events up to the snapshot's last_event_seq are in this cut or in earlier cuts.
    `QueueState.drain` fills the fields up to `failed_groups`; the queue actor fills the others.
    """

    events: tuple[LedgerEvent, ...] = ()
    """The ledger's events since the last cut, in order."""
    summaries: tuple[TrajectorySummary, ...] = ()
    """The summary of every attempt that was accepted since the last cut, in order."""
    failed_groups: FailedGroups | None = None
    """The groups that have failed since the last usable group, including failures before the last
    cut; None if no group has failed since then.
    """
    opening: int = 0
    """The number with which the queue that made the cut was opened."""
    number: int = 0
    """The cut's number within the opening, from 0."""
    snapshot: QueueSnapshot | None = None
    """The state without the tasks' data, which the caller of `admit` has; None if it is unchanged
    since the last cut.
    """
