"""The protocol of trackers, and the points of a run's curves that they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from service.store.lineage import RecordKind, StoredRecord
from service.telemetry.curves import evaluation_curves, step_curves
from service.telemetry.records import EvaluationSample, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A trajectory of a training step as a row of a table, without the middle of long texts."""

    task_id: str
    rollout_id: str
    prompt: str
    """The prompt of the trajectory's first turn, with special tokens."""
    completion: str
    """The text after `prompt` in the trajectory's first sample."""
    outcome: str
    episode_return: float
    rewards: Mapping[str, float]
    """Each component of the reward, summed over the trajectory's turns."""
    advantage: float | None
    """Mean advantage over the trajectory's trained tokens; None if it was not trained."""
    untrained: str
    """The reason why the trajectory was not trained; empty if it was trained."""


COMPLETION_COLUMNS = (
    "task",
    "rollout",
    "prompt",
    "completion",
    "outcome",
    "return",
    "rewards",
    "advantage",
    "untrained",
)


def completion_row(completion: Completion) -> dict[str, str | float | Mapping[str, float] | None]:
    """Return the values of a completion by their names in `COMPLETION_COLUMNS`."""
    values = [getattr(completion, each.name) for each in fields(Completion)]
    return dict(zip(COMPLETION_COLUMNS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The numbers of a step or of an evaluation."""

    kind: RecordKind
    term: int
    first_step: int
    """First step of the term; older terms' values for this step and later ones are invalid."""
    is_first_of_term: bool
    """Whether the tracker has no earlier point of this term."""
    step: int
    wall_time: float
    """Seconds since 1970."""
    curves: Mapping[str, float]
    samples: Sequence[EvaluationSample] = field(default=())
    completions: Sequence[Completion] = field(default=())
    """The step's first completions, at most `trackers.completions`; empty for an evaluation."""


class Tracker(Protocol):
    """A writer of points, which one thread calls.

    Its methods may take long and may raise any error.
    """

    def write(self, point: Point) -> None: ...

    def flush(self) -> None:
        """Return once everything that was written is safe if this process ends."""
        ...

    def close(self, *, is_ended: bool) -> None:
        """Release all resources.

        is_ended: whether the run has ended; False if another process continues it.
        """
        ...


def point_of(
    stored: StoredRecord, *, is_first_of_term: bool, completions: Sequence[Completion] = ()
) -> Point:
    record, (term, step, _) = stored.record, stored.place
    samples: Sequence[EvaluationSample] = ()
    if isinstance(record, StepRecord):
        curves = step_curves(record)
    else:
        prefix = f"{stored.kind.value}/{record.name}" if record.name else stored.kind.value
        curves, samples = evaluation_curves(record, prefix=prefix), record.samples
    return Point(
        kind=stored.kind,
        term=term,
        first_step=stored.first_step,
        is_first_of_term=is_first_of_term,
        step=step,
        wall_time=record.wall_time,
        curves=curves,
        samples=samples,
        completions=completions,
    )
