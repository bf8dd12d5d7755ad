"""Whether two records are the same to the bit, arrays and their types included."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from actors.merge.buffer import fill
from actors.types import Trajectory


def assert_same_fields(got: Any, expected: Any) -> None:
    """Field by field, of dataclasses that hold arrays."""
    for each in fields(expected):
        a, b = getattr(got, each.name), getattr(expected, each.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def assert_same_trajectory(got: Trajectory, expected: Trajectory) -> None:
    """The lineage counts as the one that comparing the turns finds."""
    assert got.lineage == (expected.lineage or fill(expected.turns).lineage())
    for each in fields(Trajectory):
        if each.name not in ("turns", "lineage"):
            assert getattr(got, each.name) == getattr(expected, each.name)
    for a, b in zip(got.turns, expected.turns, strict=True):
        assert_same_fields(a, b)
