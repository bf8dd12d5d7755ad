"""Tests of the last message and the exit code of commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from rich.console import Console
from sqlalchemy import update
from worlds.builders.record_builders import status_of
from worlds.builders.store_builders import write_under_way
from worlds.runs.stored_run import BEFORE, unpack_run

from service.cli import stop
from service.cli.display import LineDisplay
from service.cli.train import _show_until_done, report_interrupt
from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.launch.signals import stop_signals
from service.run.health import Cursor, Ending, RunStatus
from service.run.start import SupervisorWatcher
from service.store import tables
from service.store.errors import LeaseLost, StoreError
from service.store.run_store import RunStore

STOPPED = status_of(2, phase="finished", is_done=True, exit_reason="stopped after step 2 of 120")
COMPLETE = status_of(120, phase="finished", is_done=True, exit_reason="all 120 steps are done")
FAILED = status_of(2, phase="failed", is_done=True, exit_reason="the trainer died")
SLOW = (pytest.mark.proof, pytest.mark.slow)


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        (status_of(2), 130, "ended at once; resume with --resume"),
        (STOPPED, 130, "stopped after step 2 of 120; report"),
        (COMPLETE, 0, "all 120 steps are done; report"),
        (FAILED, 1, "the run failed: the trainer died"),
    ],
    ids=["running", "stopped", "complete", "failed"],
)
def test_a_second_signal_reports_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: RunStatus, code: int, words: str
) -> None:
    (tmp_path / "rayloom.db").touch()
    found = report_interrupt(last, RunDir(path=tmp_path), worker_logs=Path("/tmp/ray/s/logs"))
    told = capsys.readouterr()
    text = told.out + told.err
    assert found == code and words in text
    assert ("ended at once" in text) == (last.phase == "training")
    assert ("resume with --resume" in text) == (last is not COMPLETE)
    assert ("worker logs: /tmp/ray/s/logs" in text) == (last is FAILED)


@pytest.mark.parametrize("answers", [True, False], ids=["a cluster", "no cluster"])
def test_a_stop_of_an_ended_run_says_so_and_one_of_a_live_run_asks_the_cluster(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
) -> None:
    @contextmanager
    def attached(address: str) -> Iterator[None]:
        if not answers:
            raise ConfigError(f"--address {address}: no Ray cluster answers there")
        yield

    monkeypatch.setattr(stop, "attached", attached)
    monkeypatch.setattr(stop, "_supervisors", lambda asked: {})
    run_dir = unpack_run(tmp_path, BEFORE)
    run, config = str(run_dir.path), run_dir.config_file.read_text()
    assert stop.stop_runs(address="auto", name=run, grace_s=None) == 0
    assert capsys.readouterr().out == f"the run in {run} has ended (step 2 of 2)\n"
    run_dir.config_file.write_text(config.replace("steps: 2\n", "steps: 6\n"))
    assert stop.stop_runs(address="auto", name=run, grace_s=None) == 0
    words = f"the run in {run} has ended (step 2 of 6); it can be continued with --resume {run}\n"
    assert capsys.readouterr().out == words

    store = RunStore(run_dir.database_url, may_be_older=True)
    store.move_forward()
    term = store.acquire_lease(owner="elsewhere:7").term
    # An owner on another machine that does not renew its lease may be suspended.
    for silent_s in (0, 600):
        with write_under_way(store) as connection:
            connection.execute(update(tables.leases).values(renewed_at=time.time() - silent_s))
        if answers:
            assert stop.stop_runs(address="auto", name=run, grace_s=None) == 0
            assert "there is no run to stop" in capsys.readouterr().out
        else:
            with pytest.raises(ConfigError, match="no Ray cluster answers"):
                stop.stop_runs(address="auto", name=run, grace_s=None)
    store.release(term)
    store.close()
    assert stop.stop_runs(address="auto", name=run, grace_s=None) == 0
    assert "has ended (step" in capsys.readouterr().out


def test_a_run_that_never_answered_is_ended_without_advice_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_interrupt(None, RunDir(path=tmp_path), worker_logs=tmp_path) == 130
    assert capsys.readouterr().err == "interrupted: ended at once\n"


@pytest.mark.parametrize("cause", [StoreError("it stayed away"), LeaseLost("elsewhere:7 has it")])
def test_the_error_that_ended_the_supervisor_is_shown_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: None, cause: Exception
) -> None:
    @ray.remote(num_cpus=0)
    def raises() -> None:
        raise cause

    class Watcher(SupervisorWatcher):
        def run(self, run_dir: RunDir) -> Ending:
            ray.get(raises.remote())
            raise AssertionError("it has raised")

    watcher = Watcher(None, restart=print, max_restarts=0, show=print, is_stop_asked=lambda: False)
    display = LineDisplay(Console())
    with stop_signals() as signals:
        code = _show_until_done(watcher, display, RunDir(path=tmp_path), signals, stays=False)
    told = capsys.readouterr().err
    assert code == 1 and str(cause) in told
    assert "Traceback" not in told and "ray::" not in told


def test_a_supervisor_that_cannot_start_is_reported_by_its_error_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: None
) -> None:
    @ray.remote(num_cpus=0)
    class Supervisor:
        def __init__(self) -> None:
            raise OSError("no room for run.log")

        def run(self) -> None: ...

        def status(self, cursor: Cursor) -> None: ...

    watcher = SupervisorWatcher(
        Supervisor.remote(),
        restart=print,
        max_restarts=0,
        show=print,
        is_stop_asked=lambda: False,
    )
    with stop_signals() as signals:
        code = _show_until_done(
            watcher, LineDisplay(Console()), RunDir(path=tmp_path), signals, stays=False
        )
    # Lines of Ray precede the message, because the driver of this test shows Ray's logs.
    told = capsys.readouterr().err.partition("rayloom: ")[2].splitlines()
    assert code == 1
    assert told[0] == "the run failed: the supervisor is gone: OSError: no room for run.log"
    assert told[1].lstrip().startswith("log: ")


STAYS = """
import threading, time

threading.Thread(target=time.sleep, args=(1000,), name="feeder").start()

def score(completion, answer):
    return float(completion.strip() == answer)
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("check",), 0),
        pytest.param(("try", "--answer", "answer"), 0, marks=SLOW),
        pytest.param(("check", "--answer", "none"), 2, marks=SLOW),
    ],
)
def test_a_command_ends_despite_a_users_thread_that_does_not_end(
    tmp_path: Path, command: tuple[str, ...], code: int
) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    options = ["--dataset", "rows.jsonl", "--reward", "stays.py:score"]
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *command, *options],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if command == ("check",):
        assert "the threads feeder are still running and end with this command" in done.stderr
        assert "parser of calls" in done.stdout
