"""What the loop needs of the parts, as Protocols; `service.run.parts` implements them over Ray.

Every call may raise `PartLost` when the part behind it has died or does not answer within its
deadline; the supervisor answers that with a return to the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.merge.actor import BuiltStep
from actors.trainer.statistics import StepStats
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.ledger import LedgerEvent, Settlement
from actors.trajectory_queue.messages import Drained, QueueCut, StepInput, Vacancy
from actors.types import Task, TrajectorySummary
from service.telemetry.records import EvaluationRecord, StepRecord


class PartLost(Exception):
    """A part of the run died or hangs; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """parity_max: largest |trainer - engine| on the fixed prompt over the engines, nats."""

    version: int
    num_engines: int
    parity_max: float | None
    wall_s: float


class QueuePort(Protocol):
    async def admissible(self, *, timeout_s: float) -> Sequence[Vacancy]: ...
    async def admit(self, groups: Sequence[GroupRequest]) -> None: ...
    async def take_step(self, *, timeout_s: float) -> StepInput | None: ...
    async def settle(self, step: int, settlements: Sequence[Settlement]) -> None: ...
    async def lost(self, rollout_ids: Sequence[str]) -> None: ...
    async def published(self, version: int) -> None: ...
    async def drain(self) -> Drained: ...
    async def cut(self) -> QueueCut: ...
    async def cancel_all(self) -> None: ...


class MergePort(Protocol):
    async def plan(self, step_input: StepInput, *, version: int) -> Sequence[Any]:
        """Returns: a reference to the rows that each rank must score before `build`.

        version: what the trainer holds. Raises: PayloadsLost.
        """
        ...

    async def build(
        self, step_input: StepInput, *, version: int, scores: Sequence[Any] = ()
    ) -> BuiltStep:
        """scores: what the trainer said of the plan. Raises: PayloadsLost."""
        ...


class TrainerPort(Protocol):
    async def score(self, shards: Sequence[Any]) -> Sequence[Any]:
        """Returns: of each rank, a reference to its scores."""
        ...

    async def step(self, built: BuiltStep) -> StepStats: ...

    async def save(self, *, step: int, version: int) -> str:
        """Write a checkpoint durably; returns its directory's name."""
        ...

    async def prune(self) -> None:
        """Remove the oldest checkpoints; called once a newer one is committed."""
        ...


class EnginesPort(Protocol):
    async def offer(self, version: int) -> None:
        """Make the trainer's weights, as `version`, what the engines load next."""
        ...

    async def wait(self, version: int) -> PublishedVersion:
        """Wait until every engine holds the version last offered, and compare them with it."""
        ...

    async def num_ready(self) -> int:
        """Engines that hold the current version."""
        ...


class EnvironmentsPort(Protocol):
    async def evaluate(self, tasks: Sequence[Task]) -> list[TrajectorySummary]: ...


class Recorder(Protocol):
    """Where the loop writes; raises LeaseLost when a newer epoch has taken over."""

    def notice(self, text: str) -> None: ...
    def rollouts(self, summaries: Sequence[TrajectorySummary]) -> None: ...
    def events(self, events: Sequence[LedgerEvent]) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def evaluation(self, record: EvaluationRecord) -> None: ...
    def checkpoint(self, *, step: int, version: int, directory: str, cut: QueueCut) -> None: ...
