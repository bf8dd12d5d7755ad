"""A local Ray for one run, or an existing cluster by address."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.limits import MIB
from service.config.file import ConfigError
from service.config.preflight import gpus_wanted
from service.config.tree import Config
from service.launch.signals import kept_from_children

NAMESPACE = "rayloom"
# Of an AF_UNIX socket's path, without its closing zero.
MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
_FALLBACK_TEMP_DIR = "/tmp"
# The longest of Ray's sockets, as its own sessions are named.
_SESSION = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def cpus_wanted(config: Config) -> float:
    """What the run's processes reserve of Ray; small parts reserve nothing."""
    return (
        config.inference.num_replicas * config.inference.cpus_per_replica
        + config.trainer.num_ranks
        + config.rollouts.num_actors
    )


def prepare_environment(config: Config) -> None:
    """Set what Ray and vLLM read from the process environment, before either starts."""
    defaults = {
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def joined(config: Config, *, address: str | None) -> Iterator[None]:
    """Join the cluster at `address`, or start a local Ray and stop it at the end.

    Raises: ConfigError when the cluster cannot be reached or lacks what the run asks for.
    """
    prepare_environment(config)
    try:
        if address is None:
            _start_local(config)
        else:
            _join(address)
        _check_resources(config)
        yield
    finally:
        # Also after a start that failed. On an existing cluster only this driver's actors end.
        ray.shutdown(wait_for_processes=True)


def short_temp_dir(asked: str) -> str | None:
    """Where Ray puts its session; None for its own choice. asked: what it would take.

    Raises: ConfigError when neither that nor /tmp will do.
    """
    longest = len(os.fsencode(os.path.join(asked, "ray", _SESSION)))
    if longest <= MAX_SOCKET_PATH:
        return None
    if os.access(_FALLBACK_TEMP_DIR, os.W_OK | os.X_OK):
        return os.path.join(_FALLBACK_TEMP_DIR, "ray")
    raise ConfigError(
        f"the temporary directory {asked} is too long for Ray's sockets ({longest} bytes, expected "
        f"at most {MAX_SOCKET_PATH}) and {_FALLBACK_TEMP_DIR} cannot be written; set RAY_TMPDIR to "
        "a shorter path"
    )


def _temp_dir() -> str | None:
    asked = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or _FALLBACK_TEMP_DIR
    chosen = short_temp_dir(asked)
    if chosen is not None:
        # vLLM and others make sockets in the temporary directory too.
        os.environ["TMPDIR"] = tempfile.tempdir = _FALLBACK_TEMP_DIR
    return chosen


def _start_local(config: Config) -> None:
    try:
        with kept_from_children():
            _init_local(config)
    except ConfigError:
        raise
    except Exception as error:
        # Ray raises plain Exceptions, for a full disk as for a port that is taken.
        raise ConfigError(
            f"a local Ray did not start ({_first_line(error)}); expected it to come up here; look "
            "into the newest session of its temporary directory, free memory and disk, or "
            "join a cluster with --address"
        ) from error


def _init_local(config: Config) -> None:
    # Processes share the cores by their thread counts; Ray's own count must only admit them all.
    logical_cpus = max(psutil.cpu_count() or 1, int(cpus_wanted(config)) + 1)
    memory = psutil.virtual_memory().total
    # Set in os.environ, not runtime_env, which makes Ray discard its prestarted workers.
    os.environ["PYTHONPATH"] = _import_path()
    store_bytes = min(int(0.3 * memory), (config.queue.max_mib + 512) * MIB)
    start_ray(
        address="local",
        namespace=NAMESPACE,
        num_cpus=logical_cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        _temp_dir=_temp_dir(),
    )


def start_ray(**options: Any) -> None:
    """`ray.init` of a node of its own; tried again after the time limit of its start.

    Ray gives a node 30 s to come up, whatever the load, and no setting changes that.
    """
    try:
        _init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        _init(**options)


def _init(**options: Any) -> None:
    """`ray.init`, whose own handler of SIGTERM ends the process with the signal's number."""
    try:
        ray.init(**options)
    except SystemExit as end:
        raise KeyboardInterrupt from end


def _join(address: str) -> None:
    try:
        _init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except Exception as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({_first_line(error)}); expected "
            "the address of a running head node, such as auto or HOST:6379"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_resources(config: Config) -> None:
    have = ray.cluster_resources()
    for name, wanted in (("CPU", cpus_wanted(config)), ("GPU", gpus_wanted(config))):
        if wanted > have.get(name, 0):
            raise ConfigError(
                f"the run asks for {wanted:g} {name}s, the cluster has {have.get(name, 0):g}; "
                "lower the numbers of engines, ranks or environment actors, or add nodes"
            )


def _import_path() -> str:
    """The user's own environments are imported from where the command was started."""
    parts = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(part for part in parts if part)
