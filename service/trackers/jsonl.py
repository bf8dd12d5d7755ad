"""A tracker that appends each point as a JSON line to a file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from service.trackers.tracker import Point, completion_row

# Larger than any point with its texts, which are 256 completions of 4,000 characters.
MAX_LINE_BYTES = 2**23


class JsonLines:
    """A file of whole lines; a line that a crash or a full disk cut off is removed."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises: OSError."""
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
            line["samples"] = [
                {
                    "task": sample.task_id,
                    "prompt": sample.text.prompt,
                    "answer": sample.text.answer,
                    "outcome": sample.outcome,
                    "return": sample.episode_return,
                }
                for sample in point.samples
            ]
        if point.completions:
            line["completions"] = [completion_row(each) for each in point.completions]
        content = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        if (num_written := self._file.write(content)) != len(content):
            self._file.truncate(size)
            raise OSError(
                errno.ENOSPC, f"{num_written} of {len(content)} bytes of a line were written"
            )

    def flush(self) -> None:
        """Do nothing, because each line has already been passed to the operating system."""

    def close(self, *, is_ended: bool) -> None:
        """Close the file. Raises: OSError."""
        self._file.close()
