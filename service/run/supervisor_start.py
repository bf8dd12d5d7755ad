"""Starts a run's supervisor under the run's name, for the command line and for the run's host."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray

from service.config.tree import Config
from service.launch.cluster import NAMESPACE
from service.launch.run_dir import RunDir
from service.run.supervisor import Supervisor

NAME_LIMIT_S = 30.0
# A trace of what Ray gives to the head node alone.
HEAD_NODE = {"node:__internal_head__": 0.001}


def start_supervisor(
    config: Config,
    run_dir: RunDir,
    *,
    model: str,
    run_id: str,
    is_service: bool = False,
    on_head: bool = False,
) -> Any:
    """Start the supervisor as an actor named after the run; it ends with the process that did.

    One of the same name is what an earlier start of this run left on the cluster: it is ended.
    on_head: of the cluster, where a Kubernetes Service finds its metrics.
    """
    actor_class = ray.remote(Supervisor)
    deadline = time.monotonic() + NAME_LIMIT_S
    while True:
        with suppress(ValueError):
            ray.kill(ray.get_actor(run_id, namespace=NAMESPACE))
        try:
            return actor_class.options(
                num_cpus=0,
                max_restarts=0,
                name=run_id,
                namespace=NAMESPACE,
                resources=HEAD_NODE if on_head else {},
            ).remote(config, run_dir, model=model, run_id=run_id, is_service=is_service)
        except ValueError:
            # The name is given back a moment after the death.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
