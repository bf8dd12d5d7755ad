"""Test that ten thousand calls that hang, spin or crash in a pool of four leave nothing open."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.environment.fork_server import WorkerLost
from actors.environment.workers import Pool
from actors.user_code import CallFailed, CallTimedOut

FUNCTIONS = """
import ctypes, time
def hangs(): time.sleep(10**6)
def spins():
    while True: pass
def crashes(): ctypes.string_at(0)
def double(number): return 2 * number
"""
CALLS = {"hangs": 4000, "spins": 3000, "crashes": 3000}
LIMIT_S = 0.2
WITHIN_S = 1200.0


def left() -> tuple[Counter[str], list[int], set[str]]:
    """Return the kinds of open files of this process, its child processes and temporary files."""
    own = psutil.Process()
    kinds = Counter(
        os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
        for number in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{number}").exists()
    )
    below = [each.pid for each in own.children(recursive=True)]
    return kinds, below, set(os.listdir(tempfile.gettempdir()))


@pytest.mark.proof
@pytest.mark.chaos
@pytest.mark.timeout(2400)
async def test_ten_thousand_calls_that_never_answer_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "functions_of_proof.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = left()
    pool = Pool(size=4)
    double = "functions_of_proof.py:double"

    async def usual_s() -> float:
        started = time.monotonic()
        assert await pool.call(double, {"number": 21}, limit_s=20) == 42
        return time.monotonic() - started

    await usual_s()
    usual = sorted([await usual_s() for _ in range(21)])[10]
    ends: Counter[str] = Counter()

    async def call(name: str) -> Any:
        try:
            await pool.call(f"functions_of_proof.py:{name}", {}, limit_s=LIMIT_S)
        except CallTimedOut:
            ends[f"{name} killed"] += 1
        except CallFailed as failed:
            assert isinstance(failed.error, WorkerLost)
            ends[f"{name} died"] += 1

    started = time.monotonic()
    for name, count in CALLS.items():
        await asyncio.gather(*(call(name) for _ in range(count)))
    seconds = time.monotonic() - started
    print(f"{sum(CALLS.values())} calls in {seconds:.0f} s, {dict(ends)}")
    # On a busy machine a call may be killed before it crashes, so the ends of crashes vary.
    assert sum(ends.values()) == sum(CALLS.values())
    assert ends["hangs killed"] == 4000 and ends["spins killed"] == 3000
    assert seconds < WITHIN_S
    assert sum(pool.lost.counts.values()) == sum(CALLS.values())
    await usual_s()
    after = sorted([await usual_s() for _ in range(21)])[10]
    print(f"a call that works: {usual * 1e3:.2f} ms before, {after * 1e3:.2f} ms after")
    assert after < 5 * usual + 0.01
    pool.close()
    assert left()[:2] == before[:2]
    assert not [name for name in left()[2] - before[2] if "rayloom" in name or "worker" in name]
