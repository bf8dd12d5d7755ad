"""The host on Ray Serve: its health is the run's, but a run that was taken over is left alone."""

from __future__ import annotations

import pytest
import ray

from service.launch.serve_host import RunHost
from service.run.health import RunFailed
from service.store.run_store import LeaseLost

pytestmark = pytest.mark.usefixtures("cluster")


@ray.remote(num_cpus=0)
def run_that_raises(error: Exception) -> None:
    raise error


def host_of(error: Exception) -> RunHost:
    """A host whose run has ended with an error."""
    host = RunHost.__new__(RunHost)
    host._ending, host._running = None, run_that_raises.remote(error)
    ray.wait([host._running], timeout=60.0)
    return host


def test_a_run_that_another_process_took_over_is_not_begun_again() -> None:
    host = host_of(LeaseLost("taken over by elsewhere:7 (term 2)"))
    for _ in range(2):
        host.check_health()
    assert host._ending is not None and "elsewhere:7" in host._ending.reason


def test_a_run_that_failed_is_begun_again() -> None:
    host = host_of(RunFailed("no update was finite"))
    with pytest.raises(RuntimeError, match="no update was finite"):
        host.check_health()
