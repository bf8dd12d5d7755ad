"""What operators ask of a run, and what they are answered. Plain values: they travel by Ray.

Made by `service.run.control` in the supervisor; the API's routes turn them into bodies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.environment.settings import Sampling
from service.store.controls import Pause
from service.telemetry.records import EvaluationRecord


class RefusalCode(StrEnum):
    """Why something was refused."""

    UNKNOWN = "unknown"
    GONE = "gone"
    """It was there, and is no more."""
    CONFLICT = "conflict"
    """Not now: the run is in another state."""
    INVALID = "invalid"


class ControlRefused(Exception):
    """Nothing was done; the text says why, and what would be."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The work that continues while something is paused."""

    admitted: int
    """Rollouts that have a place in the window and have not left."""
    playing: int
    """Rollouts of them that are handed out."""
    waiting: int
    """Rollouts of them that have ended and that no step has taken."""
    step: int | None
    """The step that is being trained; None: none."""
    engines_held: int
    """Engines that hold their turns."""
    engines: int
    """Live engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlView:
    """The pauses of a run, and the work that continues."""

    phase: str
    pauses: tuple[Pause, ...]
    in_flight: InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """A checkpoint that the run's database knows."""

    id: str
    """The name of its directory."""
    step: int
    policy_version: int
    term: int
    committed_at: float
    """Seconds since 1970."""
    num_bytes: int | None
    """Bytes of its files; None: the files are gone."""
    why_not: str
    """Why the run cannot go back to it; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Held-out tasks to be played now."""

    sampling: Sampling
    num_tasks: int | None
    """The first so many; None: all, or task_ids."""
    task_ids: tuple[str, ...]
    """These, in place of the first ones."""


class OperationStatus(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A request that takes longer than its answer. Only this supervisor knows it, and it keeps only
    the newest ones.
    """

    id: str
    kind: str
    """checkpoint, return, evaluation."""
    created_at: float
    """Seconds since 1970."""
    status: OperationStatus = OperationStatus.RUNNING
    ended_at: float | None = None
    detail: str = ""
    """What it waits for, its result, or why it failed."""
    checkpoint: str = ""
    """The checkpoint's id, once it is there, or that it goes back to."""
    evaluation: EvaluationRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """An engine, and since when it has held its version."""

    id: str
    version: int | None
    """Loaded policy version; None: none yet."""
    since: float | None
    """Seconds since 1970; None: since before the weight board began to look."""
    is_held: bool
    """Its turns are frozen: generation is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """A policy version that something still holds."""

    version: int
    is_trained: bool
    """The trainer's newest one."""
    is_published: bool
    """The one that engines load, or have."""
    is_republished: bool
    """Not of a step of its own: the weights of the version before, published once more."""
    checkpoints: tuple[str, ...]
    """Ids of the checkpoints that contain this version."""
    replicas: tuple[ReplicaView, ...]
    """Replicas that hold this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesView:
    """Which version is where."""

    term: int
    trained_version: int | None
    """The trainer's version; None: the trainer is being started."""
    published_version: int | None
    policies: tuple[PolicyView, ...] = field(default=())
    """Newest first."""
    starting: tuple[ReplicaView, ...] = ()
    """Engines that hold no version of this term yet."""
