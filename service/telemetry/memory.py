"""Measure the memory of a run on one machine: a process and all its descendants.

A memory page that processes share, such as a page of Ray's object store, counts once (the kernel's
proportional set size). A run measures its memory only if it has started its own Ray. Every run
calls `memory_shortage` after it has restarted one of its actors.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from service import units

_KIB = 1024
_CGROUP = Path("/sys/fs/cgroup")
# Ray's memory monitor ends processes above 0.95, unless RAY_memory_usage_threshold says otherwise.
_SHORT = 0.9


def memory_of(process_id: int) -> int | None:
    """Return the bytes that a process and its descendants use; None if the process has ended."""
    try:
        root = psutil.Process(process_id)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    return sum(_share_of(process.pid) for process in processes)


def _share_of(process_id: int) -> int:
    """Return the proportional set size of one process in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KIB


def memory_shortage(cgroup: Path = _CGROUP) -> str:
    """Return a notice if more than nine tenths of this machine's memory is used, otherwise "".

    Ray does not report why it restarts an actor, so this notice is the only hint that Ray's memory
    monitor may have ended the actor.
    Args: cgroup: directory of the container's cgroup (version 2); the cgroup's limit counts instead
    of the machine's memory if it is lower.
    """
    machine = psutil.virtual_memory()
    used, total = machine.total - machine.available, machine.total
    try:
        limit = int((cgroup / "memory.max").read_text())
        statistics = (cgroup / "memory.stat").read_text().splitlines()
        cached = sum(
            int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")
        )
        if limit < total:
            used, total = int((cgroup / "memory.current").read_text()) - cached, limit
    except (OSError, ValueError):
        # No container, or one without a limit ("max").
        pass
    if used <= _SHORT * total:
        return ""
    return (
        f"{units.gibibytes(used)} of {units.gibibytes(total)} of memory are used here, and Ray "
        "ends processes of a machine that is nearly full: end other programs, or lower "
        "trainer.tokens_per_micro_batch, inference.kv_cache_gib or rollouts.num_actors"
    )


class PeakMemory:
    """The largest memory that a process and its descendants had in any call of `measure`."""

    def __init__(self, process_id: int | None) -> None:
        """Start without a measurement; if process_id is None, `measure` does nothing."""
        self._process_id = process_id
        self.num_bytes: int | None = None

    def measure(self) -> None:
        """Measure the memory once, which takes milliseconds per GiB, and keep the largest value."""
        now = None if self._process_id is None else memory_of(self._process_id)
        if now is not None:
            self.num_bytes = max(now, self.num_bytes or 0)
