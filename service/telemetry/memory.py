"""The memory of a run on one machine: that of a process and of all that it has started.

A page that processes share, such as one of Ray's object store, counts once (the kernel's
proportional set size). Called by the supervisor of a run on a Ray of its own.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_KIB = 1024


def memory_of(process_id: int) -> int | None:
    """Return the bytes that a process and its descendants hold; None if the process has ended."""
    try:
        root = psutil.Process(process_id)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    return sum(_share_of(process.pid) for process in processes)


def _share_of(process_id: int) -> int:
    """Return the bytes of memory of one process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KIB


class PeakMemory:
    """The most memory that a process and its descendants have held at one of the measurements."""

    def __init__(self, process_id: int | None) -> None:
        """Start without a measurement. process_id: None: measure nothing."""
        self._process_id = process_id
        self.num_bytes: int | None = None

    def measure(self) -> None:
        """Measure once. This takes milliseconds for each gibibyte."""
        now = None if self._process_id is None else memory_of(self._process_id)
        if now is not None:
            self.num_bytes = max(now, self.num_bytes or 0)
