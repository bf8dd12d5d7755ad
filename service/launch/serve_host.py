"""A run as a Ray Serve deployment, for clusters without a command line.

One replica, which starts the run's supervisor and owns it. When either dies, Serve starts the
replica anew, and the run goes on from its newest checkpoint: the path of `--resume`. A run that
another process holds is waited for, and one that was taken over stays with who has it.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError

from service.config.file import ConfigError
from service.config.tree import Config
from service.launch.cluster import check_places, prepare_environment
from service.launch.other_nodes import check_other_nodes
from service.launch.placement import HEAD_NODE, SHARE
from service.launch.run_dir import RunDir, check_new, check_resumable, prepared_run, run_id_of
from service.run.health import Ending
from service.run.supervisor import WhenHeld, start_endpoint, start_supervisor
from service.store.place import StoreOptions
from service.store.run_store import LeaseLost, StoreError
from service.store.tables import RunKind

log = logging.getLogger("ray.serve")

ANSWER_LIMIT_S = 300.0


class RunHost:
    """Its health is the run's: a run that failed is begun again, one that ended is not."""

    def __init__(self, config: Config, run_dir: RunDir, store: StoreOptions) -> None:
        """Raises: ConfigError, which Serve shows as the reason of the failed deployment."""
        # The checks ask the environment for a first observation in an event loop of their own, and
        # Serve's runs in this thread.
        with ThreadPoolExecutor(max_workers=1) as pool:
            self._supervisor = pool.submit(_start, config, run_dir, store).result()
        self._running: Any = self._supervisor.run.remote()
        self._ending: Ending | None = None

    def check_health(self) -> None:
        """Raises: what the run raised."""
        if self._ending is not None:
            return
        ended, _ = ray.wait([self._running], timeout=0)
        if not ended:
            return
        try:
            self._ending = ray.get(self._running)
        except RayTaskError as error:
            if not isinstance(error.cause, LeaseLost):
                raise RuntimeError(f"the run failed: {error}") from error
            # Restarted, it would take the run back, and so on for ever.
            self._ending = Ending(reason=str(error.cause), has_report=False)
        except RayError as error:
            raise RuntimeError(f"the run failed: {error}") from error
        log.info("the run has ended: %s", self._ending.reason)


def _start(config: Config, run_dir: RunDir, store: StoreOptions) -> Any:
    prepare_environment(config)
    try:
        has_run = run_dir.has_run()
    except StoreError as error:
        raise ConfigError(f"run directory {run_dir.path}: {error}") from error
    if has_run:
        check_resumable(run_dir, config, kind=RunKind.SERVE)
    else:
        check_new(run_dir)
    with prepared_run(config, run_dir, is_local=False, store=store) as model:
        # Serve may be quicker than the workers of its cluster.
        check_places(config, limit_s=config.inference.start_deadline_s)
        check_other_nodes(config, run_dir, model=model)
        run_id = run_id_of(config, run_dir)
        supervisor = start_supervisor(
            config,
            run_dir,
            model=model,
            run_id=run_id,
            endpoint=start_endpoint(config, run_dir, run_id=run_id),
            is_service=True,
            when_held=WhenHeld.WAIT,
        )
        # Once it answers, the database is there.
        ray.get(supervisor.readiness.remote(), timeout=ANSWER_LIMIT_S)
        return supervisor


def run_host(config: Config, run_dir: RunDir, store: StoreOptions) -> Any:
    """What the API's deployment is bound to, so that Serve keeps both."""
    deployment = serve.deployment(
        name="run",
        num_replicas=1,
        max_ongoing_requests=1,
        # Beside the supervisor: both see the same local disk and the same processes.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: SHARE}},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=60.0,
    )(RunHost)
    return deployment.bind(config, run_dir, store)
