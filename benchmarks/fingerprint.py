"""Where a benchmark ran: the machine, the versions, the load beside it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np


def fingerprint() -> dict[str, object]:
    """The environment as a flat dict for one JSON line."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
