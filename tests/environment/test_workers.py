"""Tests of a pool of processes for a user's functions: a bad call does not harm the others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.environment import fork_server, workers
from actors.environment.fork_server import WorkerLost
from actors.environment.workers import Pool
from actors.user_code import CallFailed, CallTimedOut, RaisedInWorker, describe, task_id

FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

def double(number): return 2 * number
async def double_later(number):
    await asyncio.sleep(0.01)
    return 2 * number
def own_loop(number): return asyncio.run(double_later(number))
def in_main_thread(): return threading.current_thread() is threading.main_thread()
def hangs(): time.sleep(10**6)
def spins():
    while True: pass
def crashes(): ctypes.string_at(0)
def exits(): os._exit(11)
def leaves(): sys.exit("enough")
def breaks(): raise KeyError("a key")
def no_pickle(): return lambda: None
def takes(mib): return len(bytearray(mib * 2**20))
def alarmed():
    def ring(*_): raise TimeoutError("rung")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(10)
    except TimeoutError as error:
        return str(error)
def parent_and_self(): return os.getppid(), os.getpid()
def has_child():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
def hangs_with_child(path):
    open(path, "w").write(str(has_child()))
    hangs()
def modules(): return [each for each in ("ray", "torch", "vllm") if each in sys.modules]

class Desk:
    def __init__(self): self.items = []
    def put(self, item):
        self.items.append(item)
        return len(self.items)
    def hang(self): hangs()
    async def wait(self): await asyncio.sleep(1000)
    async def count(self): return len(self.items)
def number_of(desk): return len(desk.items)
"""
LIMIT_S = 20.0


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "functions_of_test.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "functions_of_test.py:"


@pytest.fixture
def made() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(**options: Any) -> Pool:
        pools.append(Pool(**options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def descendants() -> list[int]:
    return [each.pid for each in psutil.Process().children(recursive=True)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_a_call_runs_in_the_main_thread_of_another_process(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=2)

    async def call(name: str, **arguments: Any) -> Any:
        return await pool.call(functions + name, arguments, limit_s=LIMIT_S)

    assert await call("double", number=21) == 42
    assert await call("double_later", number=21) == 42
    assert await call("own_loop", number=21) == 42
    assert await call("in_main_thread") is True
    assert await call("alarmed") == "rung"
    assert await call("modules") == []
    _, own = await call("parent_and_self")
    assert own != os.getpid()
    assert await asyncio.gather(*(call("double", number=each) for each in range(50))) == [
        2 * each for each in range(50)
    ]
    assert pool.num_workers <= 2 and all(each > 2**20 for each in pool.resident_bytes)


async def test_a_thread_that_a_module_starts_runs_in_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Pool]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "threads_of_test.py").write_text(
        "import asyncio, threading\n"
        "loop = asyncio.new_event_loop()\n"
        "threading.Thread(target=loop.run_forever, daemon=True).start()\n"
        "async def later(): return 42\n"
        "def call(): return asyncio.run_coroutine_threadsafe(later(), loop).result()\n"
    )
    monkeypatch.setattr(fork_server, "preloaded", {"threads_of_test.py:call": None})
    assert await made(size=1).call("threads_of_test.py:call", {}, limit_s=LIMIT_S) == 42


async def test_an_exception_of_a_call_is_returned_as_text_and_its_worker_stays(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=1)
    workers_seen = set()
    for name, words in (
        ("breaks", "KeyError: 'a key'"),
        ("leaves", "SystemExit: enough"),
        ("no_pickle", "pickle"),
        ("absent", "absent"),
    ):
        with pytest.raises(CallFailed) as raised:
            await pool.call(functions + name, {}, limit_s=LIMIT_S)
        assert isinstance(raised.value.error, RaisedInWorker)
        assert words in describe(raised.value.error)
        workers_seen.add(tuple(await pool.call(functions + "parent_and_self", {}, limit_s=LIMIT_S)))
    with pytest.raises(CallFailed, match="pickle"):
        await pool.call(functions + "double", {"number": lambda: None}, limit_s=LIMIT_S)
    assert len(workers_seen) == 1


@pytest.mark.parametrize("name", ["hangs", "spins"])
async def test_a_call_at_its_limit_is_ended_and_other_calls_succeed(
    functions: str, made: Callable[..., Pool], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = made(size=2)
    good = functions + "double"
    assert await pool.call(good, {"number": 1}, limit_s=LIMIT_S) == 2
    bad = [pool.call(functions + name, {}, limit_s=0.5) for _ in range(4)]
    answers = [pool.call(good, {"number": each}, limit_s=LIMIT_S) for each in range(4)]
    task_id.set("task 7")
    found = await asyncio.gather(*bad, *answers, return_exceptions=True)
    assert all(isinstance(each, CallTimedOut) for each in found[:4])
    assert found[4:] == [0, 2, 4, 6]
    assert pool.lost.counts == {(functions + name, "task 7", "killed"): 4}
    assert len([each for each in caplog.messages if name in each and "task 7" in each]) == 1


@pytest.mark.parametrize(
    ("name", "how"), [("crashes", "ended by SIGSEGV"), ("exits", "ended itself with status 11")]
)
async def test_only_the_call_that_ends_its_process_fails(
    functions: str, made: Callable[..., Pool], name: str, how: str
) -> None:
    pool = made(size=2)
    found = await asyncio.gather(
        *(pool.call(functions + name, {}, limit_s=LIMIT_S) for _ in range(3)),
        *(pool.call(functions + "double", {"number": 1}, limit_s=LIMIT_S) for _ in range(3)),
        return_exceptions=True,
    )
    for error in found[:3]:
        assert isinstance(error, CallFailed) and isinstance(error.error, WorkerLost)
        assert how in str(error)
    assert found[3:] == [2, 2, 2]
    assert pool.lost.counts == {(functions + name, "", "died"): 3}
    (lost,) = pool.lost.calls
    assert (lost.function, lost.end, lost.count, lost.tasks) == (functions + name, "died", 3, ())
    assert how in lost.why


async def test_sleeping_calls_make_the_pool_grow_and_busy_ones_do_not(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=100)
    sleeping = [
        asyncio.ensure_future(pool.call(functions + "hangs", {}, limit_s=LIMIT_S))
        for _ in range(30)
    ]
    assert await pool.call(functions + "double", {"number": 1}, limit_s=LIMIT_S) == 2
    for each in sleeping:
        each.cancel()
    await asyncio.wait(sleeping)
    await until(lambda: pool.num_workers < 10)
    busy = [
        asyncio.ensure_future(pool.call(functions + "spins", {}, limit_s=LIMIT_S))
        for _ in range(30)
    ]
    await asyncio.sleep(0.5)
    assert pool.num_workers <= 3 * (os.cpu_count() or 1) + 2
    for each in busy:
        each.cancel()
    await asyncio.wait(busy)


async def test_memory_is_bounded_for_each_worker(functions: str, made: Callable[..., Pool]) -> None:
    pool = made(size=1, memory_mib=64)
    assert await pool.call(functions + "takes", {"mib": 8}, limit_s=LIMIT_S) == 8 * 2**20
    with pytest.raises(CallFailed, match="MemoryError"):
        await pool.call(functions + "takes", {"mib": 1000}, limit_s=LIMIT_S)
    assert await pool.call(functions + "takes", {"mib": 8}, limit_s=LIMIT_S) == 8 * 2**20


async def test_processes_that_a_call_started_end_with_its_worker(
    functions: str, made: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = made(size=1)
    file = tmp_path / "child"
    with pytest.raises(CallTimedOut):
        await pool.call(functions + "hangs_with_child", {"path": str(file)}, limit_s=1.0)
    child = int(file.read_text())
    await until(lambda: not psutil.pid_exists(child))


async def test_instances_of_several_episodes_share_a_worker_and_end_with_it(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=1)
    homes = [pool.home() for _ in range(3)]
    desks = [await each.call(functions + "Desk", {}, limit_s=LIMIT_S, keeps=True) for each in homes]

    async def put(number: int, item: str) -> Any:
        call = {"instance": desks[number], "method": "put", "arguments": {"item": item}}
        return await homes[number].call("worker:call_method", call, limit_s=LIMIT_S)

    assert [await put(0, "a"), await put(0, "b"), await put(1, "c")] == [1, 2, 1]
    found = await homes[0].call(functions + "number_of", {"desk": desks[0]}, limit_s=LIMIT_S)
    assert found == 2 and pool.num_workers == 1
    homes[1].close()
    await asyncio.sleep(0)
    with pytest.raises(CallFailed, match="KeyError"):
        await put(1, "d")
    hang = {"instance": desks[0], "method": "hang", "arguments": {}}
    with pytest.raises(CallTimedOut):
        await homes[0].call("worker:call_method", hang, limit_s=0.3, about=functions + "Desk.hang")
    with pytest.raises(WorkerLost, match=r"Desk\.hang"):
        await put(2, "e")
    homes[0].close()
    fresh = pool.home()
    assert await fresh.call(functions + "double", {"number": 2}, limit_s=LIMIT_S) == 4


async def test_coroutines_of_several_episodes_run_concurrently_and_are_cancelled(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=1)
    first, second = pool.home(is_loop=True), pool.home(is_loop=True)
    desks = [
        await each.call(functions + "Desk", {}, limit_s=LIMIT_S, keeps=True)
        for each in (first, second)
    ]
    waiting = asyncio.ensure_future(
        first.call(
            "worker:call_method",
            {"instance": desks[0], "method": "wait", "arguments": {}},
            limit_s=1.0,
        )
    )
    count = {"instance": desks[1], "method": "count", "arguments": {}}
    assert await second.call("worker:call_method", count, limit_s=LIMIT_S) == 0
    assert not waiting.done()
    with pytest.raises(CallTimedOut):
        await waiting
    assert await second.call("worker:call_method", count, limit_s=LIMIT_S) == 0
    hang = {"instance": desks[0], "method": "hang", "arguments": {}}
    with pytest.raises(CallTimedOut):
        await first.call("worker:call_method", hang, limit_s=0.3)
    with pytest.raises(WorkerLost):
        await second.call("worker:call_method", count, limit_s=LIMIT_S)


@pytest.mark.parametrize("is_loop", [False, True])
async def test_the_end_of_a_shared_worker_is_counted_once_with_its_kind(
    functions: str, made: Callable[..., Pool], is_loop: bool
) -> None:
    pool = made(size=1)

    async def call_in_both(name: str, limit_s: float) -> list[Any]:
        homes = [pool.home(is_loop=is_loop) for _ in range(2)]
        return await asyncio.gather(
            *(each.call(functions + name, {}, limit_s=limit_s) for each in homes),
            return_exceptions=True,
        )

    task_id.set("task 7")
    found = await call_in_both("exits", LIMIT_S)
    assert all(isinstance(each, WorkerLost) for each in found)
    assert pool.lost.counts == {(functions + "exits", "task 7", "died"): 1}
    await call_in_both("hangs", 0.3)
    ends = {what for function, _, what in pool.lost.counts if "hangs" in function}
    assert ends == {"cancelled" if is_loop else "killed"}


async def test_the_counts_of_a_pool_are_reported_after_its_end(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_pools", threading.local())
    assert workers.report() == ((), 0)
    for task in ("a", "b", "c", "d", "d"):
        task_id.set(task)
        with pytest.raises(CallFailed):
            await workers.pool().call(functions + "exits", {}, limit_s=LIMIT_S)
    assert await workers.pool().call(functions + "double", {"number": 1}, limit_s=LIMIT_S) == 2
    (before,), resident_bytes = workers.report()
    assert (before.count, before.tasks) == (5, ("a", "b", "c")) and resident_bytes > 2**20
    outdated = workers.pool()
    monkeypatch.syspath_prepend("elsewhere")
    assert workers.pool() is not outdated
    assert workers.report() == ((before,), 0)


async def test_only_calls_of_a_module_fail_if_importing_it_fails(
    functions: str, made: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_of_test.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "breaks_of_test.py").write_text("1 / 0\n")
    names = ["ends_of_test.py:f", "breaks_of_test.py:f", functions + "double"]
    monkeypatch.setattr(fork_server, "preloaded", dict.fromkeys(names))
    pool = made(size=2)
    assert await pool.call(functions + "double", {"number": 1}, limit_s=LIMIT_S) == 2
    with pytest.raises(CallFailed, match="status 3"):
        await pool.call("ends_of_test.py:f", {}, limit_s=LIMIT_S)
    with pytest.raises(CallFailed, match="ZeroDivisionError"):
        await pool.call("breaks_of_test.py:f", {}, limit_s=LIMIT_S)


def test_a_pool_serves_several_event_loops_in_turn(
    functions: str, made: Callable[..., Pool]
) -> None:
    pool = made(size=2)

    async def once() -> Any:
        hanging = asyncio.ensure_future(pool.call(functions + "hangs", {}, limit_s=LIMIT_S))
        await asyncio.sleep(0)
        found = await pool.call(functions + "double", {"number": 1}, limit_s=LIMIT_S)
        assert not hanging.done()
        return found

    assert [asyncio.run(once()) for _ in range(3)] == [2, 2, 2]


KILLED = """
import asyncio
from actors.environment.workers import pool

def call(name, **arguments):
    return pool().call("functions_of_test.py:" + name, arguments, limit_s=100)

async def main():
    hanging = [
        asyncio.ensure_future(call("hangs_with_child", path=f"child{number}"))
        for number in range(2)
    ]
    print(*await call("parent_and_self"), flush=True)
    await asyncio.wait(hanging)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_process_leaves_no_child_process(
    functions: str, tmp_path: Path, number: signal.Signals
) -> None:
    repository = str(Path(__file__).parents[2])
    paths = os.pathsep.join([repository, str(tmp_path)])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        seen = [int(each) for each in process.stdout.readline().split()]
        files = [tmp_path / f"child{each}" for each in range(2)]
        await until(lambda: all(each.exists() and each.read_text() for each in files))
        below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        assert set(seen) <= set(below)
        process.send_signal(number)

    def is_gone(pid: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    await until(lambda: all(map(is_gone, below)))


async def test_a_lost_worker_is_replaced_quickly(functions: str, made: Callable[..., Pool]) -> None:
    pool = made(size=1)
    double = functions + "double"
    await pool.call(double, {"number": 1}, limit_s=LIMIT_S)
    times = []
    for _ in range(3):
        with suppress(CallFailed):
            await pool.call(functions + "exits", {}, limit_s=LIMIT_S)
        started = time.monotonic()
        await pool.call(double, {"number": 1}, limit_s=LIMIT_S)
        times.append(time.monotonic() - started)
    assert min(times) < 0.3


async def test_closing_leaves_no_process_and_no_open_file(functions: str) -> None:
    before = len(os.listdir("/proc/self/fd")), descendants()
    pool = Pool(size=2)
    await pool.call(functions + "double", {"number": 1}, limit_s=LIMIT_S)
    assert (len(os.listdir("/proc/self/fd")), descendants()) != before
    pool.close()
    assert (len(os.listdir("/proc/self/fd")), descendants()) == before
