"""Assertions that two records are the same to the bit, including arrays and their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from actors.expert_records import ExpertRecords
from actors.types import Sample, Trajectory


def assert_same_fields(got: Any, expected: Any) -> None:
    """Check that two dataclasses, which may hold arrays, have the same type and equal fields."""
    assert type(got) is type(expected)
    for each in fields(expected):
        a, b = getattr(got, each.name), getattr(expected, each.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif isinstance(b, ExpertRecords):
            assert_same_fields(a, b)
        else:
            assert a == b


def assert_same_samples(got: Sequence[Sample], expected: Sequence[Sample]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_same_fields(a, b)


def assert_same_trajectory(got: Trajectory, expected: Trajectory) -> None:
    assert_same_samples(got.samples, expected.samples)
    assert_same_fields(replace(got, samples=()), replace(expected, samples=()))
