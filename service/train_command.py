"""`rayloom train`: check, start a supervisor, show it, stop it in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray
import typer
from ray.exceptions import RayError, RayTaskError

from service.cluster import joined
from service.config import Config
from service.config_file import load_config
from service.model_command import build_tiny_for
from service.preflight import check_before_start, check_model_source
from service.progress import open_display
from service.run_dir import RunDir, check_resumable, create, default_run_dir, write_config
from service.status import RunStatus
from service.supervisor import Cursor, start_supervisor

POLL_S = 0.5
STATUS_DEADLINE_S = 60.0
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the user asked for."""

    config_path: Path
    overrides: tuple[str, ...] = ()
    model: str | None = None
    address: str | None = None
    run_dir: Path | None = None
    resume: Path | None = None


def run_training(request: TrainRequest) -> int:
    """Train until the end, or until a signal; returns the exit code.

    Raises: ConfigError before anything starts.
    """
    config = load_config(request.config_path, _overrides(request))
    run_dir = _open_run_dir(request, config)
    model = _model_path(config, run_dir)
    check_before_start(config, model_path=model)
    write_config(run_dir, config)
    with joined(config, address=request.address), _stop_signals() as interrupted:
        supervisor = start_supervisor(config, run_dir, model=model, run_id=_run_id(config, run_dir))
        return _show_until_done(supervisor, run_dir, interrupted)


def _overrides(request: TrainRequest) -> tuple[str, ...]:
    if request.model is None:
        return request.overrides
    return (*request.overrides, f"model.path={request.model}", "model.tiny=null")


def _open_run_dir(request: TrainRequest, config: Config) -> RunDir:
    if request.resume is not None:
        run_dir = RunDir(path=request.resume.absolute())
        check_resumable(run_dir, config)
        return run_dir
    if config.model.path is not None:
        check_model_source(config.model.path)
    chosen = RunDir(path=request.run_dir) if request.run_dir else default_run_dir(config)
    run_dir = RunDir(path=chosen.path.absolute())
    create(run_dir)
    return run_dir


def _model_path(config: Config, run_dir: RunDir) -> str:
    if config.model.tiny is not None:
        return build_tiny_for(config.model.tiny, run_dir.tiny_model)
    assert config.model.path is not None
    path = Path(config.model.path).expanduser()
    return str(path.absolute()) if path.is_dir() else config.model.path


def _run_id(config: Config, run_dir: RunDir) -> str:
    """One name for a run, whoever runs it, so that what a dead run left can be found and ended."""
    digest = blake2b(str(run_dir.path).encode(), digest_size=4).hexdigest()
    return f"rayloom-{config.run.name}-{digest}"


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks for an orderly end; the second one raises."""
    interrupted = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_until_done(supervisor: Any, run_dir: RunDir, interrupted: threading.Event) -> int:
    running = supervisor.run.remote()
    display = open_display(environ=os.environ)
    cursor, is_stop_sent = Cursor(), False
    try:
        while True:
            finished, _ = ray.wait([running], timeout=POLL_S)
            if interrupted.is_set() and not is_stop_sent:
                supervisor.stop.remote()
                is_stop_sent = True
            status = _status(supervisor, cursor)
            if status is not None:
                display.update(status)
                cursor = _advance(cursor, status)
            if finished:
                break
        reason = ray.get(running)
    except RayTaskError as error:
        display.close()
        return _report_failure(str(error.cause), run_dir)
    except RayError as error:
        display.close()
        return _report_failure(f"the supervisor is gone: {error}", run_dir)
    except KeyboardInterrupt:
        display.close()
        typer.echo(
            f"interrupted twice: ended at once; go on with --resume {run_dir.path}", err=True
        )
        return EXIT_INTERRUPTED
    display.close()
    typer.echo(f"{reason}; report: {os.path.relpath(run_dir.report_file)}")
    if is_stop_sent:
        typer.echo(f"go on with --resume {os.path.relpath(run_dir.path)}")
        return EXIT_INTERRUPTED
    return EXIT_OK


def _status(supervisor: Any, cursor: Cursor) -> RunStatus | None:
    try:
        status: RunStatus = ray.get(supervisor.status.remote(cursor), timeout=STATUS_DEADLINE_S)
    except RayError:
        # `run` says what happened.
        time.sleep(POLL_S)
        return None
    return status


def _advance(cursor: Cursor, status: RunStatus) -> Cursor:
    return Cursor(
        steps=cursor.steps + len(status.records),
        evaluations=cursor.evaluations + len(status.evaluations),
        notices=cursor.notices + len(status.notices),
    )


def _report_failure(reason: str, run_dir: RunDir) -> int:
    typer.echo(
        f"rayloom: the run failed: {reason}\n"
        f"  log: {os.path.relpath(run_dir.log_file)}; worker logs: the newest session of Ray's "
        f"temporary directory\n  go on with --resume {os.path.relpath(run_dir.path)}",
        err=True,
    )
    return EXIT_FAILED
