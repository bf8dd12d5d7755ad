"""`rayloom train` and `rayloom serve`: check, start a supervisor, show its run and stop it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from actors.deadline import poll
from service import units
from service.api.settings import HttpSettings, api_address, api_route
from service.cli.display import LineDisplay, LiveDisplay, open_display
from service.cli.outlet import Stages, say, warn
from service.config.file import ConfigError
from service.config.tree import Config
from service.config.trial import Trial
from service.inference.deployment import start_serve_for_engines
from service.inference.replica import session_directory
from service.launch.cluster import joined, seen_from_afar
from service.launch.other_nodes import check_api_place, check_other_nodes
from service.launch.resume import check_lease_free, finished_step, move_finished
from service.launch.run_dir import (
    RunDir,
    check_new,
    default_run_dir,
    prepared_run,
    run_id_of,
    session_secret,
)
from service.launch.signals import EXIT_INTERRUPTED, StopSignals, stopped_in_order
from service.remote_calls import reason_of
from service.run.health import Ending, RunStatus
from service.run.start import (
    POLL_S,
    SupervisorWatcher,
    start_endpoint,
    start_supervisor,
    supervisor_place,
)
from service.run.supervisor import WhenHeld
from service.serve.ingress import check_listens, open_api, start_serve
from service.store.errors import LeaseLost, StoreError
from service.store.place import StoreOptions
from service.trackers.trackers import trackers_of

EXIT_OK, EXIT_FAILED = 0, 1


def run_training(
    config: Config,
    signals: StopSignals,
    stages: Stages,
    *,
    address: str | None = None,
    new_run: Path | None = None,
    resume: Path | None = None,
    checkpoint: str = "",
    takes_over: bool = False,
    api: HttpSettings | None = None,
    store: StoreOptions,
    trial: Trial,
) -> int:
    """Train until the run ends or a signal arrives, and return the exit code.

    address: the Ray cluster to join; None starts a local one.
    new_run, resume: directory of a new run, or of the run to resume; the caller has checked it. If
    both are None, a new directory is chosen.
    checkpoint: with `resume`, the directory name of the checkpoint to return to; empty for the
    newest.
    takes_over: resume a run even if another process holds its lease.
    api: settings for accepting tasks over HTTP; None plays the configuration's own tasks.
    Raises: ConfigError if the run is refused; KeyboardInterrupt if a signal arrives. Both are
    raised only before anything starts.
    """
    signals.check()
    if resume is not None:
        run_dir = RunDir(path=resume)
        try:
            step = finished_step(run_dir, steps=config.run.steps)
            if step is not None and not checkpoint:
                return _report_finished(config, run_dir, step)
            if not takes_over:
                check_lease_free(run_dir)
        except StoreError as error:
            raise ConfigError(f"--resume {run_dir.path}: {error}") from error
    elif new_run is not None:
        run_dir = RunDir(path=new_run)
    else:
        run_dir = default_run_dir(config)
        check_new(run_dir)
    is_local = address is None
    with prepared_run(
        config,
        run_dir,
        is_local=is_local,
        store=store,
        check_stop=signals.check,
        begin=stages.next,
        trial=trial,
        tell=warn,
    ) as model:
        stages.next("starting Ray" if is_local else "joining the cluster")
        # A signal during Ray's start takes effect after it.
        signals.hold()
        with joined(config, address=address):
            if not is_local:
                config = seen_from_afar(config, cwd=Path.cwd())
                check_other_nodes(config, run_dir, model=model)
                if api is not None:
                    check_api_place(config.service)
            stages.next("starting the supervisor")
            return _run(
                config,
                run_dir,
                model,
                signals,
                stages,
                api=api,
                is_local=is_local,
                when_held="take over" if takes_over else "refuse",
                returns_to=checkpoint,
            )


def _run(
    config: Config,
    run_dir: RunDir,
    model: str,
    signals: StopSignals,
    stages: Stages,
    *,
    api: HttpSettings | None,
    is_local: bool,
    when_held: WhenHeld,
    returns_to: str,
) -> int:
    """Run the training in the joined Ray cluster, show it, and return the exit code."""
    signals.install()
    # Serve's messages for developers are in its own log files.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        signals.check()
        run_id = run_id_of(config, run_dir)
        if api is not None or not is_local:
            # On a cluster the next run may need an API, and Serve opens its port only at its start.
            start_serve(host=config.service.host, port=config.service.port)
        if api is not None:
            if api.key_digest is None:
                api = replace(api, session_secret=session_secret(run_dir))
            check_listens(host=config.service.host, port=config.service.port)
        start = partial(
            start_supervisor,
            config,
            run_dir,
            model=model,
            run_id=run_id,
            endpoint=start_endpoint(config, run_id=run_id, place=supervisor_place(run_dir)),
            is_service=api is not None,
            when_held=when_held,
            returns_to=returns_to,
            root_process=os.getpid() if is_local else None,
        )
        supervisor = start()
        # Serve starts while the supervisor imports; it needs Serve only in `run`, which is called
        # later.
        start_serve_for_engines()
        if api is not None:
            route = api_route(run_id, is_local=is_local)
            open_api(run_id, api, route=route)
            where = "" if is_local else " of the cluster's head node"
            say(f"the API listens on {api_address(config.service, route=route)}{where}")
        stages.end()
        display = open_display(environ=os.environ)
        watcher = SupervisorWatcher(
            supervisor,
            restart=start,
            max_restarts=config.run.max_recoveries,
            show=display.update,
            is_stop_asked=lambda: signals.is_asked,
        )
        code = _show_until_done(watcher, display, run_dir, signals, stays=api is not None)
        # The metrics' endpoint ends with this process, so give Prometheus time to read it.
        poll(lambda: signals.is_asked or None, limit_s=config.metrics.stays_s)
        return code
    finally:
        # Only Ray's end remains, which another signal would interrupt.
        signals.ignore()


def _report_finished(config: Config, run_dir: RunDir, step: int) -> int:
    move_finished(run_dir)
    with run_dir.looked_into() as store:
        trackers = trackers_of(config, run_dir, run_id=run_id_of(config, run_dir), store=store)
        if trackers is not None:
            trackers.catch_up(partial(say, err=True))
    say(
        f"all {step} steps are done already; to continue, add --set run.steps=N; "
        f"report: {os.path.relpath(run_dir.report_file)}"
    )
    return EXIT_OK


def _show_until_done(
    watcher: SupervisorWatcher,
    display: LineDisplay | LiveDisplay,
    run_dir: RunDir,
    signals: StopSignals,
    *,
    stays: bool,
) -> int:
    """Show the run until its end, and return the exit code.

    stays: whether the API answers after the run's end, until a signal arrives.
    """
    worker_logs = session_directory() / "logs"
    try:
        with stopped_in_order(tell=partial(_show_stopped, display, run_dir)):
            ending = watcher.run(run_dir)
            if stays:
                _stay(ending, display, signals)
        # The run has ended: a signal from here on changes nothing.
        signals.ignore()
    except (LeaseLost, StoreError, RayTaskError) as error:
        display.close()
        # Ray's error also has the cause's type, but its text is a traceback.
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, LeaseLost):
            return _report_loss(cause, run_dir)
        return _report_failure(str(cause), run_dir, worker_logs=worker_logs)
    except RayError as error:
        display.close()
        reason = f"the supervisor is gone: {reason_of(error)}"
        return _report_failure(reason, run_dir, worker_logs=worker_logs)
    except KeyboardInterrupt:
        display.close()
        return report_interrupt(watcher.last, run_dir, worker_logs=worker_logs)
    display.close()
    is_stopped = signals.is_asked or ending.was_stopped
    return _report_ending(ending, run_dir, is_stopped=is_stopped, last=watcher.last)


def _show_stopped(display: LineDisplay | LiveDisplay, run_dir: RunDir) -> None:
    display.leave()
    say(
        "rayloom: the display is stopped, and the run continues; fg shows it again, `rayloom stop "
        f"{os.path.relpath(run_dir.path)}` ends it"
    )


def _stay(ending: Ending, display: LineDisplay | LiveDisplay, signals: StopSignals) -> None:
    if signals.is_asked or ending.was_stopped:
        return
    display.close()
    say(f"{ending.reason}; the API continues to answer, Ctrl-C ends it")
    while not signals.is_asked:
        time.sleep(POLL_S)


def report_interrupt(last: RunStatus | None, run_dir: RunDir, *, worker_logs: Path) -> int:
    """Print the state of the run after a second stop signal, and return the exit code.

    If the signal ended the run, print how to resume the run. If the run had ended before the
    signal, and only its processes were still running, print how the run ended.
    """
    if last is None or not last.is_done:
        how = f"; resume with {_resume(run_dir)}" if run_dir.may_have_run() else ""
        say(f"interrupted: ended at once{how}", err=True)
        return EXIT_INTERRUPTED
    # The run had ended; only its processes were still running.
    reason = last.exit_reason or ""
    if last.phase == "failed":
        return _report_failure(reason, run_dir, worker_logs=worker_logs)
    ending = Ending(reason=reason, has_report=run_dir.report_file.exists())
    return _report_ending(ending, run_dir, is_stopped=True, last=last)


def _report_ending(
    ending: Ending, run_dir: RunDir, *, is_stopped: bool, last: RunStatus | None
) -> int:
    report = os.path.relpath(run_dir.report_file) if ending.has_report else "not written"
    memory = ""
    if ending.peak_memory_bytes is not None:
        memory = f"memory at most {units.gibibytes(ending.peak_memory_bytes)}; "
    say(f"{ending.reason}; {memory}report: {report}")
    has_all_steps = last is not None and last.step >= last.steps
    if is_stopped and not has_all_steps:
        say(f"resume with {_resume(run_dir)}")
        return EXIT_INTERRUPTED
    return EXIT_OK


def _resume(run_dir: RunDir) -> str:
    return f"--resume {os.path.relpath(run_dir.path)}"


def _report_loss(loss: LeaseLost, run_dir: RunDir) -> int:
    say(
        f"rayloom: another process holds the run now: {loss}\n"
        f"  log: {os.path.relpath(run_dir.log_file)}; the run continues there, nothing to do here",
        err=True,
    )
    return EXIT_FAILED


def _report_failure(reason: str, run_dir: RunDir, *, worker_logs: Path) -> int:
    say(
        f"rayloom: the run failed: {reason}\n"
        f"  log: {os.path.relpath(run_dir.log_file)}; worker logs: {worker_logs}\n"
        f"  resume with {_resume(run_dir)}",
        err=True,
    )
    return EXIT_FAILED
