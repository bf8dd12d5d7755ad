"""What a client submits, and what it is told of it. Plain values, no HTTP, no Ray.

A submission is one task and how many rollouts of it are wanted; its id is the client's. It has a
place in the line; once a group number is free, the group of its rollouts is admitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

from actors.types import Task, TrajectorySummary


class Status(StrEnum):
    """Where a rollout stands, or a submission as a whole.

    queued: accepted, its group not admitted yet. running: admitted; being played, or to be played
    again. finished: played, waiting for its training step. trained, evicted: it has left, and the
    checkpoint that holds it may still be to come. cancelled: at the client's request.
    """

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    TRAINED = "trained"
    EVICTED = "evicted"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One task of a request, before it has a place. min_usable_samples: as GroupRequest's."""

    task: Task
    num_samples: int
    min_usable_samples: int | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the content, by which a repeated submission is told from a changed one."""
        content = {
            "environment": self.task.environment,
            "seed": self.task.seed,
            "data": self.task.data,
            "num_samples": self.num_samples,
            "min_usable_samples": self.min_usable_samples,
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An accepted one. place: 1, 2, 3, … in the order of acceptance, never given twice."""

    wanted: Wanted
    place: int
    accepted_at: float
    is_cancelled: bool = False

    @property
    def id(self) -> str:
        return self.wanted.task.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What the last attempt of a rollout came to. versions: oldest and newest, None: no token."""

    rollout_id: str
    attempt: int
    outcome: str
    reward: float
    num_turns: int
    num_sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    detail: str = ""

    @classmethod
    def of(cls, summary: TrajectorySummary) -> RolloutResult:
        return cls(
            rollout_id=summary.rollout_id,
            attempt=summary.attempt,
            outcome=summary.outcome.value,
            reward=summary.episode_return,
            num_turns=summary.num_turns,
            num_sampled_tokens=summary.num_sampled,
            oldest_version=summary.oldest_version,
            newest_version=summary.newest_version,
            detail=summary.detail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout as a client sees it. step: the training step that it left with.

    reason: why it was evicted. result: None until an attempt of it has ended.
    """

    index: int
    status: Status
    result: RolloutResult | None = None
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionView:
    """A submission as a client sees it.

    num_ahead: submissions that will be admitted before it; 0 for one that is not queued.
    reward: mean return of its ended rollouts, None before the first.
    """

    id: str
    place: int
    status: Status
    num_ahead: int
    rollouts: tuple[RolloutView, ...]

    @property
    def reward(self) -> float | None:
        rewards = [item.result.reward for item in self.rollouts if item.result is not None]
        return sum(rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line before the window. capacity: submissions that may wait in it."""

    waiting: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitReply:
    """What became of a request: it is accepted whole, or nothing of it is.

    views: one for each task, in order; new_ids: those that were not known before. conflicts: ids
    that are known with another content. refusal: why nothing can be taken in now, with
    retry_after_s where waiting helps, and is_too_large where only a smaller request does.
    """

    views: tuple[SubmissionView, ...] = ()
    new_ids: frozenset[str] = frozenset()
    conflicts: tuple[str, ...] = ()
    refusal: str = ""
    retry_after_s: int | None = None
    is_too_large: bool = False
    line: Line = field(default_factory=lambda: Line(waiting=0, capacity=0))


def as_plain(task: Task) -> Mapping[str, Any]:
    """A task as JSON keeps it."""
    return {
        "task_id": task.task_id,
        "environment": task.environment,
        "seed": task.seed,
        "data": dict(task.data),
    }
