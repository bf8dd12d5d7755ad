"""Describe the machine and the software versions for a benchmark's line of JSON."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_environment(*packages: str) -> dict[str, object]:
    """Return processor, cores, threads, versions, and the load of the machine over the last minute.

    Args: packages: distributions whose versions matter for the measurement.
    """
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "load_1min": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
