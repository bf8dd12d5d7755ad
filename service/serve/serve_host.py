"""A run as a Ray Serve deployment, for clusters on which nobody runs the command line.

The deployment has one replica, which starts the run's supervisor and replaces a dead supervisor. If
the replica dies, Serve restarts it, and the run resumes from its newest checkpoint. A refused start
is tried again, because its cause may be outside the run. A failed run is started again, a limited
number of times and with growing pauses. A run that finished, or that another process took over, is
not started again. The replica and the run's metrics stay available after the run's end.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError

from actors.deadline import poll
from service.config.file import ConfigError
from service.config.preflight import check_metrics_address
from service.config.tree import Config
from service.launch.cluster import check_places, on_this_node, prepare_environment
from service.launch.other_nodes import check_other_nodes
from service.launch.placement import HEAD_NODE, SHARE
from service.launch.run_dir import RunDir, check_new, check_resumable, prepared_run, run_id_of
from service.report.document import Phase
from service.run.health import FaultCount
from service.run.start import SupervisorWatcher, phase_values, start_endpoint, start_supervisor
from service.store.errors import LeaseLost, StoreError
from service.store.place import StoreOptions
from service.store.tables import RunKind
from service.telemetry.endpoint import PORT_LIMIT_S, SUPERVISOR, Push

log = logging.getLogger("ray.serve")

ANSWER_LIMIT_S = 300.0
# When Serve ends the host (for a new configuration or at the end), a step that takes longer than
# this is abandoned; the rest of Serve's time is for the checkpoint of the previous steps.
STOP_GRACE_S = 60.0
SHUTDOWN_LIMIT_S = 300.0
# Pauses before a refused start or a failed run is tried again.
PAUSES_S = (10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


class _Attempts:
    """The pauses between attempts to start the run, and the limit of failed attempts."""

    def __init__(self, *, max_failures: int) -> None:
        self._faults = FaultCount(limit=max_failures)
        self._furthest_step = self._num_pauses = 0

    def refused(self) -> float:
        """Count a refused start, and return the seconds to wait before the next attempt."""
        self._num_pauses += 1
        return PAUSES_S[min(self._num_pauses, len(PAUSES_S)) - 1]

    def failed(self, watcher: SupervisorWatcher | None) -> float | None:
        """Count a failed run, and return the seconds to wait before the next attempt.

        watcher: the watcher of the failed run; None if the run did not start.
        Returns: None if the run has failed too often.
        """
        step = watcher.last.checkpoint_step if watcher and watcher.last else 0
        if step > self._furthest_step:
            self._furthest_step, self._num_pauses = step, 0
            self._faults.progressed()
        self._faults.count()
        return None if self._faults.are_too_many else self.refused()


class RunHost:
    """The Ray Serve replica that starts the run, and restarts it after failures.

    Serve's health check concerns only this replica; /readyz and /metrics show the run's state.
    """

    def __init__(self, config: Config, run_dir: RunDir, store: StoreOptions) -> None:
        self._config, self._run_dir, self._store = config, run_dir, store
        self._run_id = run_id_of(config, run_dir)
        self._why_down = "the run is starting"
        self._endpoint: Any = None
        self._must_end = Event()
        # Run this in another thread: the checks run an environment's reset in their own event
        # loop, and Serve's event loop runs in this thread.
        self._keeping = ThreadPoolExecutor(max_workers=1).submit(self._keep)

    def check_health(self) -> None:
        """Raise the error that has ended the thread that starts the run, if there is one."""
        if self._keeping.done():
            self._keeping.result()

    def __del__(self) -> None:
        """Stop the run; Serve calls this when it shuts the replica down gracefully.

        The run finishes its step, or abandons it after a grace period, and commits its progress.
        """
        self._must_end.set()
        wait([self._keeping])

    def why_down(self) -> str:
        """Return the reason why the run's supervisor does not answer, as a sentence."""
        return self._why_down

    def _keep(self) -> None:
        """Start the run again and again, until it has ended or has failed too often."""
        attempts = _Attempts(max_failures=self._config.run.max_recoveries)
        while True:
            watcher: SupervisorWatcher | None = None
            pause_s: float | None
            try:
                # The watcher is kept after the run's end, so that the supervisor still answers.
                watcher = self._watcher = self._start()
                self._log(f"the run has ended: {watcher.run(self._run_dir).reason}")
                return
            except KeyboardInterrupt:
                # The run was stopped before the supervisor had answered.
                return
            except ConfigError as refusal:
                why, pause_s = f"the start is refused: {refusal}", attempts.refused()
                self._show("refused")
            except (LeaseLost, RayError, StoreError, TimeoutError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, LeaseLost):
                    # A new attempt would take the run back, and the two would alternate forever.
                    self._log(str(cause))
                    return
                why, pause_s = f"the run failed: {cause}", attempts.failed(watcher)
                if not isinstance(error, RayTaskError):
                    # No supervisor has reported the failure.
                    self._show("failed")
            if pause_s is None:
                self._log(f"{why}; too often in a row, so it is not started again")
                return
            self._log(f"{why}; the next attempt is in {pause_s:g} s")
            if self._must_end.wait(pause_s):
                return
            if watcher is not None:
                watcher.kill()

    def _log(self, why: str) -> None:
        self._why_down = why
        log.warning("%s", why)

    def _open_endpoint(self) -> None:
        if self._endpoint is not None:
            return
        config = self._config

        def is_free() -> bool | None:
            with suppress(ConfigError):
                check_metrics_address(config)
                return True
            return None

        # The endpoint of the previous host may still be closing.
        if poll(is_free, limit_s=PORT_LIMIT_S) is None:
            check_metrics_address(config)
        place = {"scheduling_strategy": on_this_node()}
        self._endpoint = start_endpoint(config, run_id=self._run_id, place=place)

    def _show(self, phase: Phase) -> None:
        """Show a phase of the run in the metrics, until a supervisor reports a phase."""
        if self._endpoint is None:
            return
        values = phase_values(phase)
        push = Push(role=SUPERVISOR, epoch=time.time_ns(), number=1, values=values, is_last=True)
        with suppress(RayError):
            ray.get(self._endpoint.push.remote(push), timeout=ANSWER_LIMIT_S)

    def _start(self) -> SupervisorWatcher:
        config, run_dir = self._config, self._run_dir
        self._open_endpoint()
        prepare_environment(config)
        try:
            has_run = run_dir.has_run()
        except StoreError as error:
            raise ConfigError(f"run directory {run_dir.path}: {error}") from error
        if has_run:
            check_resumable(run_dir, config, kind=RunKind.SERVE)
        else:
            check_new(run_dir)
        with prepared_run(config, run_dir, is_local=False, store=self._store) as model:
            # Serve may have started before the cluster's workers.
            check_places(config, limit_s=config.inference.start_deadline_s)
            check_other_nodes(config, run_dir, model=model, has_endpoint=True)
            start = partial(
                start_supervisor,
                config,
                run_dir,
                model=model,
                run_id=self._run_id,
                endpoint=self._endpoint,
                is_service=True,
                when_held="wait",
            )
            supervisor = start()
            # When the supervisor answers, the database exists.
            ray.get(supervisor.readiness.remote(), timeout=ANSWER_LIMIT_S)
        return SupervisorWatcher(
            supervisor,
            restart=start,
            max_restarts=config.run.max_recoveries,
            show=lambda _status: None,
            is_stop_asked=self._must_end.is_set,
            stop_grace_s=STOP_GRACE_S,
        )


def run_host(config: Config, run_dir: RunDir, store: StoreOptions) -> Any:
    """Return the Ray Serve deployment of a run's `RunHost`, bound to its arguments.

    The deployment of the API takes the result as its `host`.
    """
    deployment = serve.deployment(
        name="run",
        num_replicas=1,
        max_ongoing_requests=8,
        # On the supervisor's node, so that both see the same local disk and the same processes.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: SHARE}},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=SHUTDOWN_LIMIT_S,
    )(RunHost)
    return deployment.bind(config, run_dir, store)
