"""Functions that skip a test if the machine lacks a tool, and fail it in CI."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; if CI is set, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def need_package(module: str, extra: str) -> None:
    """Skip the test if an optional package is missing; if CI is set, fail it."""
    if importlib.util.find_spec(module) is None:
        skip_or_fail(f"needs {module}: pip install 'rayloom[{extra}]'")
