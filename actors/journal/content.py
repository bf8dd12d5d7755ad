"""What the header and the arrays of a journal file have to be before anything is made of them.

A file may be damaged, or tampered with; whoever reads it looks for that, and is not to fall over
it. Called by `codec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.merge.advantages import Baseline
from actors.trajectory_queue.columns import SAMPLE_DTYPE, TURN_DTYPE

# One row a sample, of trajectory `row`; num_*: how many of its items lie in the arrays.
ENTRY_DTYPE = np.dtype(
    [
        ("row", np.int32),
        ("num_turns", np.int32),
        ("prompt_length", np.int32),
        ("num_tokens", np.int32),
        ("num_runs", np.int32),
        ("num_trained", np.int32),
    ]
)
_NUMBER = (int, float)
_COUNTS = ("step", "epoch", "trainer_version", "max_policy_age", "num_packed_trained")
# What stands in a row of `headers`, in its order: see `columns._header`.
_ROW = (
    str, str, int, int, str, str, str, (*_NUMBER, type(None)), int, dict, list, str,
)  # fmt: skip
# Of each array its type and the length of its rows; 0: plain numbers.
_ARRAYS: dict[str, tuple[Any, int]] = {
    "row_offsets": (np.int64, 8),
    "turns": (TURN_DTYPE, 0),
    "samples": (SAMPLE_DTYPE, 0),
    "token_ids": (np.int32, 0),
    "logprobs": (np.float32, 0),
    "spans": (np.int32, 3),
    "component_names": (np.int32, 0),
    "component_values": (np.float64, 0),
    "token_rewards": (np.float32, 0),
    "experts": (np.uint8, 0),
    "sample_entries": (ENTRY_DTYPE, 0),
    "sample_turns": (np.int32, 0),
    "runs": (np.int32, 2),
    "mismatches": (np.int32, 4),
    "trained_ids": (np.int32, 0),
    "trained_logprobs": (np.float32, 0),
    "trained_versions": (np.int32, 0),
    "trained_advantages": (np.float32, 0),
}


def check_header(header: Mapping[str, Any]) -> None:
    """Raises: ValueError, KeyError, OverflowError for what a journal's header does not hold."""
    for name in _COUNTS:
        _expect(name, header[name], int)
    for row in header["headers"]:
        _expect("a trajectory's header", row, list)
        if len(row) != len(_ROW):
            raise ValueError(f"a trajectory's header of {len(row)} fields, expected {len(_ROW)}")
        for field, kind in zip(row, _ROW, strict=True):
            _expect("a field of a trajectory's header", field, kind)
        _expect_numbers("a number of a trajectory's header", (*row[9].values(), *row[10]))
        _expect_numbers("a best return", [] if row[7] is None else [row[7]])
    known = [value for value in header["baseline_returns"] if value is not None]
    _expect_numbers("a baseline return", known)
    problems = header.get("problems", {})
    _expect("problems", problems, dict)
    for name in (*header["name_table"], *problems.values()):
        _expect("a name", name, str)
    rule = header["group_rule"]
    _expect("group_rule", rule, (dict, type(None)))
    if rule is not None and rule["baseline"] == Baseline.CRITIC:
        raise ValueError("a group rule with a critic, whose advantages no group's returns give")


def check_arrays(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raises: ValueError for an array of another type or shape."""
    for name, (dtype, width) in _ARRAYS.items():
        found = arrays[name]
        shape = (width,) if width else ()
        if found.dtype != dtype or found.shape[1:] != shape or found.ndim == 0:
            raise ValueError(f"{name} is an array of {found.dtype} in the shape {found.shape}")
    offsets = arrays["row_offsets"]
    if (np.diff(offsets, axis=0) < 0).any() or (offsets < 0).any():
        raise ValueError("row_offsets that do not grow")


def _expect_numbers(name: str, values: Iterable[Any]) -> None:
    for value in values:
        _expect(name, value, _NUMBER)
        # JSON's whole numbers have no end.
        float(value)


def _expect(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}")
