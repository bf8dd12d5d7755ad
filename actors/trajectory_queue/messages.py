"""What goes in and out of the queue beside the vocabulary: frozen values, no Ray, no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.trajectory_queue.failures import FailedGroups
from actors.trajectory_queue.groups import GroupSnapshot
from actors.trajectory_queue.ledger import LedgerCounts, LedgerEvent, LedgerSnapshot
from actors.trajectory_queue.window import WindowSnapshot
from actors.types import TrajectorySummary


class ActorReleased(ValueError):
    """An environment actor that was released asks for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """A group number that wants a task. replacement: how often it was filled before."""

    group_number: int
    replacement: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrajectory:
    """One trajectory of a step: row `row` of StepInput.blocks[block]."""

    summary: TrajectorySummary
    block: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """A closed group: the members whose disposition is train, train_clamped or mask."""

    group_id: str
    group_number: int
    trajectories: tuple[StepTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """P closed groups. blocks: references to TrajectoryBlock, each once."""

    step: int
    groups: tuple[StepGroup, ...]
    blocks: tuple[Any, ...]

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(t.summary.rollout_id for group in self.groups for t in group.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """A look at the queue. Counts are rollouts unless they say groups.

    num_waiting: finished, not yet taken by a step; num_taken: in a step that is not settled.
    num_refused: late results that changed nothing. num_retries: attempts that were repeated.
    admissible_end: group numbers below it may be admitted.
    """

    num_pending: int
    num_handed_out: int
    num_waiting: int
    num_taken: int
    waiting_bytes: int
    num_groups: int
    num_closed_groups: int
    num_replaced_groups: int
    num_refused: int
    num_retries: int
    published: int
    next_step: int
    oldest_group: int
    admissible_end: int
    ledger: LedgerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What happened since the last drain, in order. summaries: of every accepted attempt.

    failed_groups: as things stand now, not since the last drain; None: the last group was usable.
    """

    events: tuple[LedgerEvent, ...]
    summaries: tuple[TrajectorySummary, ...]
    failed_groups: FailedGroups | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """From it a queue starts again: all that was admitted and not settled is pending.

    replacements: by group number not settled, how often it was filled before; variance_refills:
    how often of these because the returns were all equal.
    """

    window: WindowSnapshot
    ledger: LedgerSnapshot
    groups: tuple[GroupSnapshot, ...]
    replacements: Mapping[int, int]
    variance_refills: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "window": self.window.to_json(),
            "ledger": self.ledger.to_json(),
            "groups": [group.to_json() for group in self.groups],
            "replacements": _keys_to_text(self.replacements),
            "variance_refills": _keys_to_text(self.variance_refills),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QueueSnapshot:
        return cls(
            window=WindowSnapshot.from_json(data["window"]),
            ledger=LedgerSnapshot.from_json(data["ledger"]),
            groups=tuple(GroupSnapshot.from_json(group) for group in data["groups"]),
            replacements=_keys_to_numbers(data["replacements"]),
            # A run that began without dynamic sampling has stored none.
            variance_refills=_keys_to_numbers(data.get("variance_refills", {})),
        )


def _keys_to_text(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(number): count for number, count in counts.items()}


def _keys_to_numbers(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCut:
    """The queue between two calls: the snapshot, and what was drained up to it and not before.

    Stored together, they hold every event once: those from last_event_seq + 1 on come later.
    """

    snapshot: QueueSnapshot
    drained: Drained

    @property
    def last_event_seq(self) -> int:
        return self.snapshot.ledger.next_seq - 1
