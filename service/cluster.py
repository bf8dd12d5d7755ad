"""A local Ray for one run, or an existing cluster by address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from service.config.file import ConfigError
from service.config.preflight import gpus_wanted
from service.config.tree import Config

MIB = 1 << 20
NAMESPACE = "rayloom"


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
        # Also after half a start. Of an existing cluster only this driver's part ends.
        ray.shutdown(wait_for_processes=True)


def _start_local(config: Config) -> None:
    # Processes share the cores by their thread counts; Ray's own count must only admit them all.
    logical_cpus = max(psutil.cpu_count() or 1, int(cpus_wanted(config)) + 1)
    memory = psutil.virtual_memory().total
    store_bytes = min(int(0.3 * memory), (config.queue.max_mib + 512) * MIB)
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=logical_cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        runtime_env={"env_vars": {"PYTHONPATH": _import_path()}},
    )


def _join(address: str) -> None:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({first_line}); expected the "
            "address of a running head node, such as auto or HOST:6379"
        ) from error


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
