"""Tests of the memory of a run's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.telemetry.memory import memory_of, memory_shortage

MIB = 1 << 20
CHILD = """
held = bytearray(b"x" * (64 << 20))
print("ready", flush=True)
input()
"""


def test_the_memory_of_a_process_includes_its_children() -> None:
    before = memory_of(os.getpid())
    assert before is not None and before > 0
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        own, both = memory_of(child.pid), memory_of(os.getpid())
        child.communicate(b"\n")
    assert own is not None and both is not None
    assert own >= 64 * MIB and both - before >= 60 * MIB
    assert memory_of(child.pid) is None


@pytest.mark.parametrize(("used", "is_short"), [(91, True), (90, False)])
def test_a_nearly_full_container_is_reported(tmp_path: Path, used: int, is_short: bool) -> None:
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{(used + 5) * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {7 * MIB}\ninactive_file {5 * MIB}\nslab 1\n")
    notice = memory_shortage(tmp_path)
    assert notice.startswith("0.1 GiB of 0.1 GiB of memory are used here") is is_short
    assert bool(notice) is is_short


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None])
def test_without_a_limit_the_memory_of_the_machine_counts(
    tmp_path: Path, limit: str | None
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(str(1 << 59))
        (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    before, notice, after = is_machine_short(), memory_shortage(tmp_path), is_machine_short()
    assert bool(notice) in {before, after}


def is_machine_short() -> bool:
    machine = psutil.virtual_memory()
    return machine.available < 0.1 * machine.total
