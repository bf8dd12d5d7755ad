"""Where a measurement was taken: one mapping for the JSON line of every benchmark."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_environment() -> dict[str, object]:
    """Processor, cores, threads, versions, and how busy the machine was over the last minute."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
