"""What a tracker is, and what it is given: the points of a run's curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.store.lineage import RecordKind, StoredRecord
from service.telemetry.curves import evaluation_curves, step_curves
from service.telemetry.records import EvaluationSample, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step's numbers, or an evaluation's."""

    kind: RecordKind
    term: int
    first_step: int
    """Of the term: what older ones have of this step and later ones is void."""
    is_first_of_term: bool
    """Of all that was ever written."""
    step: int
    wall_time: float
    """Unix seconds."""
    curves: Mapping[str, float]
    samples: Sequence[EvaluationSample] = field(default=())


class Tracker(Protocol):
    """Writes points, in one thread. Its methods may take long, and may raise anything."""

    def write(self, point: Point) -> None: ...

    def flush(self) -> None:
        """Return once what was written outlives this process."""
        ...

    def close(self, *, is_ended: bool) -> None:
        """Release everything. is_ended: False: another process has already continued the run."""
        ...


def point_of(stored: StoredRecord, *, is_first_of_term: bool) -> Point:
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
    )
