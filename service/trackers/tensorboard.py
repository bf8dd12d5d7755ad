"""Write TensorBoard's event files with tensorboardX, which needs neither torch nor TensorFlow.

A term that continues from a checkpoint begins with a restart mark, so that TensorBoard drops the
older values for the term's first step and later steps.
"""

from __future__ import annotations

import time
from pathlib import Path

from service.telemetry.records import EvaluationSample
from service.trackers.tracker import Point


class TensorBoard:
    """A tracker with one event file for each process that writes the run."""

    def __init__(self, directory: Path) -> None:
        """Open an event file. Raises: ImportError; OSError."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar, text

        directory.mkdir(parents=True, exist_ok=True)
        # The default name has only whole seconds, and an existing file would be overwritten.
        self._file = EventsWriter(str(directory / "events"), filename_suffix=f".{time.time_ns()}")
        self._event, self._restart = Event, SessionLog(status=SessionLog.START)
        self._scalar, self._text = scalar, text

    def write(self, point: Point) -> None:
        """Write a point. Raises: OSError."""
        if point.is_first_of_term:
            self._add(point, session_log=self._restart, step=point.first_step)
        for name, value in point.curves.items():
            self._add(point, summary=self._scalar(name, value), step=point.step)
        for number, sample in enumerate(point.samples):
            summary = self._text(f"{point.kind}/sample_{number}", _markdown(sample))
            self._add(point, summary=summary, step=point.step)

    def flush(self) -> None:
        """Flush the file. Raises: OSError."""
        self._file.flush()

    def close(self, *, is_ended: bool) -> None:
        """Close the file. Raises: OSError."""
        self._file.close()

    def _add(self, point: Point, **content: object) -> None:
        self._file.write_event(self._event(wall_time=point.wall_time, **content))


def _markdown(sample: EvaluationSample) -> str:
    """Return a sample as Markdown; its texts are indented, so that they are shown unchanged."""
    parts = {"prompt": sample.text.prompt, "answer": sample.text.answer}
    shown = [
        f"**{name}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
        for name, text in parts.items()
    ]
    facts = f"task {sample.task_id}, {sample.outcome}, **return {sample.episode_return:g}**"
    return "\n\n".join([facts, *shown])
