"""The interface of a tracker, the points that a tracker writes, and the trackers that write files.

TensorBoard's event files are written with tensorboardX, which needs neither torch nor TensorFlow.
If a run continues from a checkpoint, it trains some steps again. An event of the kind START then
makes TensorBoard drop the older values of these steps.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from service.store.lineage import RecordKind, StoredRecord
from service.telemetry.curves import evaluation_curves, step_curves
from service.telemetry.records import EvaluationSample, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One trajectory of a training step as a row in a tracker's table of completions.

    Long texts are shortened in the middle.
    """

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


# Names of columns that differ from the names of the fields.
_COLUMNS = {"task_id": "task", "rollout_id": "rollout", "episode_return": "return"}


def completion_row(completion: Completion) -> dict[str, str | float | Mapping[str, float] | None]:
    """Return a completion as a row of a table: the value for each column's name."""
    names = [each.name for each in fields(Completion)]
    return {_COLUMNS.get(name, name): getattr(completion, name) for name in names}


def sample_row(sample: EvaluationSample) -> dict[str, str | float]:
    """Return an evaluation's sample as a row of a table: the value for each column's name."""
    return {
        "task": sample.task_id,
        "prompt": sample.text.prompt,
        "answer": sample.text.answer,
        "outcome": sample.outcome.value,
        "return": sample.episode_return,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The numbers, and some texts, that a tracker writes for one step or one evaluation."""

    kind: RecordKind
    term: int
    first_step: int
    """First step of the term; values of older terms for this step and later steps are invalid."""
    is_first_of_term: bool
    """Whether this is the first point of the term that the tracker gets."""
    step: int
    wall_time: float
    """Seconds since 1970."""
    curves: Mapping[str, float]
    """The numbers, by the names that the tracker shows, such as train/loss."""
    samples: Sequence[EvaluationSample] = field(default=())
    completions: Sequence[Completion] = field(default=())
    """The step's first completions, at most `trackers.completions`; empty for an evaluation."""


class Tracker(Protocol):
    """The interface of a tracker: an object that writes points to a file or a service.

    One thread makes all calls; the methods may take long and may raise any error.
    """

    def write(self, point: Point) -> None: ...

    def flush(self) -> None:
        """Make all written points durable, and then return.

        A point is durable if it is not lost when this process dies.
        """
        ...

    def close(self, *, is_ended: bool) -> None:
        """Close the tracker, and release its files and connections.

        Args: is_ended: whether the run has ended; False if another process continues the run.
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


# Longer than any line of the file: a point has at most 256 completions of 4,000 characters.
MAX_LINE_BYTES = 2**23


class JsonLines:
    """A tracker that writes each point as a line of JSON.

    If a crash or a full disk cut off the last line, that line is removed.
    """

    def __init__(self, path: Path) -> None:
        """Open the file to append, and remove an incomplete last line. Raises: OSError."""
        # Without a buffer, which would keep bytes that a full disk refuses.
        self._file = path.open("ab+", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - MAX_LINE_BYTES))
        _, _, cut_off = self._file.read().rpartition(b"\n")
        self._file.truncate(size - len(cut_off))

    def write(self, point: Point) -> None:
        """Append a point as a line. Raises: OSError."""
        line = {
            "kind": point.kind,
            "term": point.term,
            "first_step": point.first_step,
            "step": point.step,
            "time": point.wall_time,
            **point.curves,
        }
        if point.samples:
            line["samples"] = [sample_row(each) for each in point.samples]
        if point.completions:
            line["completions"] = [completion_row(each) for each in point.completions]
        content = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        if (num_written := self._file.write(content)) != len(content):
            self._file.truncate(size)
            raise OSError(
                errno.ENOSPC,
                f"only {num_written} of {len(content)} bytes of a line could be written: the disk "
                "or a quota is full; free space",
            )

    def flush(self) -> None:
        """Do nothing: `write` has passed each line to the operating system already."""

    def close(self, *, is_ended: bool) -> None:
        """Close the file. Raises: OSError."""
        self._file.close()


class TensorBoard:
    """A tracker that writes TensorBoard event files, a new one in each process of the run."""

    def __init__(self, directory: Path) -> None:
        """Open a new event file in `directory`. Raises: ImportError; OSError."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar, text

        directory.mkdir(parents=True, exist_ok=True)
        # The default name has only whole seconds, and an existing file would be overwritten.
        self._file = EventsWriter(str(directory / "events"), filename_suffix=f".{time.time_ns()}")
        self._event, self._restart = Event, SessionLog(status=SessionLog.START)
        self._scalar, self._text = scalar, text

    def write(self, point: Point) -> None:
        """Write a point's numbers and texts as events. Raises: OSError."""
        if point.is_first_of_term:
            self._add(point, session_log=self._restart, step=point.first_step)
        for name, value in point.curves.items():
            self._add(point, summary=self._scalar(name, value), step=point.step)
        for number, sample in enumerate(point.samples):
            summary = self._text(f"{point.kind}/sample_{number}", _markdown(sample))
            self._add(point, summary=summary, step=point.step)

    def flush(self) -> None:
        """Write all buffered events to the file. Raises: OSError."""
        self._file.flush()

    def close(self, *, is_ended: bool) -> None:
        """Close the file. Raises: OSError."""
        self._file.close()

    def _add(self, point: Point, **content: object) -> None:
        self._file.write_event(self._event(wall_time=point.wall_time, **content))


def _markdown(sample: EvaluationSample) -> str:
    parts = {"prompt": sample.text.prompt, "answer": sample.text.answer}
    # Markdown shows indented lines unchanged.
    shown = [
        f"**{name}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
        for name, text in parts.items()
    ]
    facts = f"task {sample.task_id}, {sample.outcome}, **return {sample.episode_return:g}**"
    return "\n\n".join([facts, *shown])
