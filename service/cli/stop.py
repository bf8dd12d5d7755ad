"""`rayloom stop`: stop the runs of a cluster, and wait until they have ended.

Without --grace, each run first trains its current step to the end.

People use this command, and so does the hook that Kubernetes calls before it ends the head's pod.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from service.cli.outlet import say
from service.config.file import ConfigError, load_config
from service.launch.cluster import attached
from service.launch.run_dir import RunDir, run_id_of, run_name_of
from service.remote_calls import NAMESPACE
from service.store.errors import StoreError
from service.store.lineage import newest_records

EXIT_OK, EXIT_LATE = 0, 1
# Seconds after the grace for a checkpoint, the report and the end of the actors.
END_LIMIT_S = 120.0
ANSWER_LIMIT_S = 20.0
LOOK_EVERY_S = 0.5


def stop_runs(*, address: str, name: str | None, grace_s: float | None) -> int:
    """Stop runs of a cluster, wait until they have ended, and return the exit code.

    The code is 0 if there was nothing to stop. name: the `run.name` of the runs, or the directory
    of one run; None stops all runs of the cluster. grace_s: see `Supervisor.stop`.
    Raises: ConfigError if a directory has no run or does not exist, or no cluster answers.
    """
    # No run's name has a slash.
    directory = name if name is not None and ("/" in name or Path(name).is_dir()) else None
    asked = name if directory is None else _run_id(directory)
    ended = "" if directory is None else _ended(directory)
    with ExitStack() as stack:
        try:
            stack.enter_context(attached(address))
        except ConfigError:
            if not ended:
                raise
            say(ended)
            return EXIT_OK
        running = _supervisors(asked)
        if not running:
            say(ended or "there is no run to stop" + (f" with the name {name}" if name else ""))
        for run_id, supervisor in running.items():
            with suppress(RayError, GetTimeoutError):
                ray.get(supervisor.stop.remote(grace_s), timeout=ANSWER_LIMIT_S)
            say(f"{run_id}: stopping")
        started = time.monotonic()
        while running:
            for run_id, supervisor in list(running.items()):
                if _has_ended(supervisor):
                    say(f"{run_id}: has ended")
                    del running[run_id]
            if grace_s is not None and time.monotonic() - started > grace_s + END_LIMIT_S:
                break
            time.sleep(LOOK_EVERY_S)
    for run_id in running:
        say(
            f"rayloom: {run_id} has not ended {END_LIMIT_S:g} s after its grace "
            f"period of {grace_s:g} s; "
            "if it is killed now, it can be resumed from its newest checkpoint",
            err=True,
        )
    return EXIT_LATE if running else EXIT_OK


def _run_id(directory: str) -> str:
    run_dir = RunDir(path=Path(directory))
    if not run_dir.config_file.is_file():
        is_there = run_dir.path.exists()
        problem = f"has no {run_dir.config_file.name}" if is_there else "does not exist"
        raise ConfigError(
            f"stop: {directory} {problem}, expected a run's directory, or the name of a run; "
            "correct it"
        )
    return run_id_of(load_config(run_dir.config_file), run_dir)


def _ended(directory: str) -> str:
    """Return a sentence about a run whose lease was released; empty for another run.

    A lease also counts as released if its owner was a process of this machine and is gone. The
    owner on another machine that is only silent may be suspended, so that its run has not ended.
    The cluster may still have a supervisor of the run, for example one that waits for the lease.
    """
    run_dir = RunDir(path=Path(directory))
    try:
        if not run_dir.has_run():
            return ""
        with run_dir.looked_into() as store:
            if store.live_owner(tolerance_s=math.inf) is not None:
                return ""
            record, _ = newest_records(store)
    except StoreError:
        return ""
    step, steps = record.step if record else 0, load_config(run_dir.config_file).run.steps
    how = f"; it can be continued with --resume {directory}" if step < steps else ""
    return f"the run in {directory} has ended (step {step} of {steps}){how}"


def _supervisors(name: str | None) -> dict[str, Any]:
    """Return supervisors by run id. name: the name of runs or the id of one run; None means all."""
    found = {}
    for each in list_named_actors(all_namespaces=True):
        run_name = run_name_of(each["name"])
        is_asked = run_name is not None and name in (None, run_name, each["name"])
        if each["namespace"] == NAMESPACE and is_asked:
            with suppress(ValueError):
                found[each["name"]] = ray.get_actor(each["name"], namespace=NAMESPACE)
    return found


def _has_ended(supervisor: Any) -> bool:
    """Return whether a run has ended; a run whose supervisor is gone counts as ended."""
    try:
        return bool(ray.get(supervisor.is_over.remote(), timeout=ANSWER_LIMIT_S))
    except GetTimeoutError:
        return False
    except RayError:
        return True
