"""A run as a Ray Serve deployment, for clusters without a command line.

One replica, which starts the run's supervisor, and another one when it dies. When the replica dies,
Serve starts it anew, and the run goes on from its newest checkpoint: the path of `--resume`. It
stays whatever becomes of the run, and so do the run's metrics: a start that is refused is tried
again, for its cause may lie outside; a run that failed is begun again, a few times and ever later;
one that ended, or that another process took over, is left alone.
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
from service.run.start import phase_values, start_endpoint, start_supervisor
from service.run.supervisor import WhenHeld
from service.serve.watcher import SupervisorWatcher
from service.store.place import StoreOptions
from service.store.run_store import LeaseLost, StoreError
from service.store.tables import RunKind
from service.telemetry.endpoint import PORT_LIMIT_S, SUPERVISOR, Push

log = logging.getLogger("ray.serve")

ANSWER_LIMIT_S = 300.0
# A host that Serve ends, for another configuration or for good, gives up a step that takes longer;
# the rest is for the checkpoint of the steps before it.
STOP_GRACE_S = 60.0
SHUTDOWN_LIMIT_S = 300.0
# Before a start that was refused, or a run that failed, is tried again.
PAUSES_S = (10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


class _Attempts:
    """When the next one comes."""

    def __init__(self, *, max_failures: int) -> None:
        self._faults = FaultCount(limit=max_failures)
        self._furthest_step = self._num_pauses = 0

    def refused(self) -> float:
        """Returns: seconds to wait."""
        self._num_pauses += 1
        return PAUSES_S[min(self._num_pauses, len(PAUSES_S)) - 1]

    def failed(self, watcher: SupervisorWatcher | None) -> float | None:
        """watcher: of what failed. Returns: seconds to wait; None when it has failed too often."""
        step = watcher.last.checkpoint_step if watcher and watcher.last else 0
        if step > self._furthest_step:
            self._furthest_step, self._num_pauses = step, 0
            self._faults.progressed()
        return None if self._faults.is_one_too_many() else self.refused()


class RunHost:
    """Keeps the run going. Its health is its own: what the run does is in /readyz and /metrics."""

    def __init__(self, config: Config, run_dir: RunDir, store: StoreOptions) -> None:
        self._config, self._run_dir, self._store = config, run_dir, store
        self._run_id = run_id_of(config, run_dir)
        self._why_down = "the run is starting"
        self._endpoint: Any = None
        self._told_to_go = Event()
        # The checks ask the environment for a first observation in an event loop of their own, and
        # Serve's runs in this thread.
        self._keeping = ThreadPoolExecutor(max_workers=1).submit(self._keep)

    def check_health(self) -> None:
        """Raises: what a bug raised in the keeping of the run."""
        if self._keeping.done():
            self._keeping.result()

    def __del__(self) -> None:
        """Serve calls this when it ends the replica in order: the run ends its step, or gives it up
        after a grace, and commits what is done."""
        self._told_to_go.set()
        wait([self._keeping])

    def why_down(self) -> str:
        """Why no supervisor answers, in a sentence."""
        return self._why_down

    def _keep(self) -> None:
        """Return when the run has ended, or is given up."""
        attempts = _Attempts(max_failures=self._config.run.max_recoveries)
        while True:
            watcher: SupervisorWatcher | None = None
            pause_s: float | None
            try:
                # Kept also after its end: its supervisor goes on answering what it knows.
                watcher = self._watcher = self._start()
                self._tell(f"the run has ended: {watcher.run(self._run_dir).reason}")
                return
            except KeyboardInterrupt:
                # Stopped before the supervisor has answered.
                return
            except ConfigError as refusal:
                why, pause_s = f"the start is refused: {refusal}", attempts.refused()
                self._show(Phase.REFUSED)
            except (LeaseLost, RayError, StoreError, TimeoutError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, LeaseLost):
                    # Begun again, it would take the run back, and so on for ever.
                    self._tell(str(cause))
                    return
                why, pause_s = f"the run failed: {cause}", attempts.failed(watcher)
                if not isinstance(error, RayTaskError):
                    # No supervisor has said so.
                    self._show(Phase.FAILED)
            if pause_s is None:
                self._tell(f"{why}; too often in a row, so it is not begun again")
                return
            self._tell(f"{why}; the next attempt comes in {pause_s:g} s")
            if self._told_to_go.wait(pause_s):
                return
            if watcher is not None:
                watcher.kill()

    def _tell(self, why: str) -> None:
        self._why_down = why
        log.warning("%s", why)

    def _open_endpoint(self) -> None:
        """Once; it stays. Raises: ConfigError for an address that cannot be listened on."""
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
        """Show it in the metrics, until a supervisor shows its own."""
        if self._endpoint is None:
            return
        values = phase_values(phase)
        push = Push(role=SUPERVISOR, epoch=time.time_ns(), number=1, values=values, is_last=True)
        with suppress(RayError):
            ray.get(self._endpoint.push.remote(push), timeout=ANSWER_LIMIT_S)

    def _start(self) -> SupervisorWatcher:
        """Raises: ConfigError."""
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
            # Serve may be quicker than the workers of its cluster.
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
                when_held=WhenHeld.WAIT,
            )
            supervisor = start()
            # Once it answers, the database is there.
            ray.get(supervisor.readiness.remote(), timeout=ANSWER_LIMIT_S)
        return SupervisorWatcher(
            supervisor,
            restart=start,
            max_restarts=config.run.max_recoveries,
            show=lambda _status: None,
            is_stop_asked=self._told_to_go.is_set,
            stop_grace_s=STOP_GRACE_S,
        )


def run_host(config: Config, run_dir: RunDir, store: StoreOptions) -> Any:
    """Bind the run's host, to which the API's deployment is bound, so that Serve keeps both."""
    deployment = serve.deployment(
        name="run",
        num_replicas=1,
        max_ongoing_requests=8,
        # Beside the supervisor: both see the same local disk and the same processes.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: SHARE}},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=SHUTDOWN_LIMIT_S,
    )(RunHost)
    return deployment.bind(config, run_dir, store)
