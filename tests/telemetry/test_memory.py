"""The memory of a run's processes."""

from __future__ import annotations

import os
import subprocess
import sys

from service.telemetry.memory import memory_of

MIB = 1 << 20
CHILD = """
held = bytearray(b"x" * (64 << 20))
print("ready", flush=True)
input()
"""


def test_the_memory_of_a_process_has_that_of_its_children() -> None:
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
