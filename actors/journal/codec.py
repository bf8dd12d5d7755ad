"""A journal step as a file: a NumPy archive without pickles, with a header in JSON.

`numpy.load(path, allow_pickle=False)` reads it without this package; `header.json` in it holds
what is no array. The turns lie as the queue's columns, each token once; trained positions are kept
as runs. Invariant: read_step(write_step(step)) equals step. Written lightly compressed: a training
step waits for it.
"""

from __future__ import annotations

import json
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Real
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from actors.batch import Int32s
from actors.journal.content import ENTRY_DTYPE, check_arrays, check_header
from actors.journal.record import GroupRule, JournalStep, SampleEntry, TrajectoryEntry
from actors.merge.advantages import Baseline, Scale
from actors.merge.mismatch import Mismatch, MismatchKind
from actors.trajectory_queue.columns import TrajectoryColumns, decode, encode
from actors.trajectory_queue.ledger import EvictionReason

FORMAT = 1
HEADER = "header.json"
_COMPRESSION = 1
_COLUMN_ARRAYS = (
    "row_offsets", "turns", "samples", "token_ids", "logprobs", "spans", "component_names",
    "component_values", "token_rewards", "experts",
)  # fmt: skip
_TRAINED_ARRAYS = {
    "trained_ids": "token_ids",
    "trained_logprobs": "logprobs",
    "trained_versions": "versions",
    "trained_advantages": "advantages",
}
_KINDS = tuple(MismatchKind)
# NumPy gives these no types.
_write_array: Callable[..., None] = np.lib.format.write_array
_load_array: Callable[..., NDArray[Any]] = np.lib.format.read_array
# One row a mismatch: trajectory, turn, position, index in the kinds.
_MISMATCH_FIELDS = 4


class JournalDamaged(ValueError):
    """The bytes are no journal step; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """What the header alone tells. trajectory_ids: in the order of the entries."""

    step: int
    epoch: int
    trajectory_ids: tuple[str, ...]


def write_step(file: IO[bytes], step: JournalStep) -> None:
    """Write a step. Raises: OSError."""
    columns = encode([entry.trajectory for entry in step.entries])
    arrays = {name: getattr(columns, name) for name in _COLUMN_ARRAYS} | _sample_arrays(step)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        archive.writestr(HEADER, json.dumps(_header(step, columns), default=_plain))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_array(member, array, allow_pickle=False)


def read_step(file: IO[bytes]) -> JournalStep:
    """Read a step. Raises: JournalDamaged; OSError."""
    with _damage_is_told():
        with zipfile.ZipFile(file) as archive:
            header = _read_header(archive)
            names = [*_COLUMN_ARRAYS, "sample_entries", "sample_turns", "runs", "mismatches"]
            arrays = {name: _read_array(archive, name) for name in [*names, *_TRAINED_ARRAYS]}
        check_arrays(arrays)
        return _step(header, arrays)


def read_index(file: IO[bytes]) -> StepIndex:
    """Read who is in it. Raises: JournalDamaged; OSError."""
    with _damage_is_told():
        with zipfile.ZipFile(file) as archive:
            header = _read_header(archive)
        ids = tuple(f"{row[0]}.a{row[3]}" for row in header["headers"])
        return StepIndex(step=header["step"], epoch=header["epoch"], trajectory_ids=ids)


# What zip, NumPy, JSON and the values themselves raise where bytes are not what they should be.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, TypeError,
    NotImplementedError, RuntimeError, OverflowError, MemoryError, tokenize.TokenError,
)  # fmt: skip


@contextmanager
def _damage_is_told() -> Iterator[None]:
    """Raises: JournalDamaged; OSError, but for those of a decompressor, which no system gave."""
    try:
        yield
    except _UNREADABLE as error:
        raise JournalDamaged(_first_line(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise JournalDamaged(_first_line(error)) from error


def _header(step: JournalStep, columns: TrajectoryColumns) -> dict[str, Any]:
    rule = step.group_rule
    return {
        "format": FORMAT,
        "step": step.step,
        "epoch": step.epoch,
        "trainer_version": step.trainer_version,
        "max_policy_age": step.max_policy_age,
        "num_packed_trained": step.num_packed_trained,
        "group_rule": rule and asdict(rule),
        "headers": columns.headers,
        "name_table": columns.name_table,
        "reasons": [entry.reason and entry.reason.value for entry in step.entries],
        "baseline_returns": [entry.baseline_return for entry in step.entries],
        "problems": {row: e.problem for row, e in enumerate(step.entries) if e.problem},
    }


def _plain(value: Any) -> Any:
    """A user's environment may give NumPy's numbers, or fractions, for Python's."""
    if isinstance(value, np.generic):
        return value.item()
    return float(value) if isinstance(value, Real) else str(value)


def _sample_arrays(step: JournalStep) -> dict[str, NDArray[Any]]:
    rows: list[tuple[int, ...]] = []
    turns: list[int] = []
    runs: list[Int32s] = []
    mismatches: list[tuple[int, ...]] = []
    samples = [(row, each) for row, entry in enumerate(step.entries) for each in entry.samples]
    for row, sample in samples:
        own = _runs(sample.positions)
        sizes = (sample.prompt_length, sample.num_tokens, len(own), sample.num_trained)
        rows.append((row, len(sample.turns), *sizes))
        turns += sample.turns
        runs.append(own)
    for row, entry in enumerate(step.entries):
        mismatches += [(row, m.turn, m.position, _KINDS.index(m.kind)) for m in entry.mismatches]
    trained = {
        name: np.concatenate([_EMPTY[name], *(getattr(each, field) for _, each in samples)])
        for name, field in _TRAINED_ARRAYS.items()
    }
    return {
        "sample_entries": np.array(rows, ENTRY_DTYPE),
        "sample_turns": np.array(turns, np.int32),
        "runs": np.concatenate([np.empty((0, 2), np.int32), *runs]),
        "mismatches": np.array(mismatches, np.int32).reshape(-1, _MISMATCH_FIELDS),
        **trained,
    }


_EMPTY = {
    name: np.empty(0, np.float32 if name.endswith(("logprobs", "advantages")) else np.int32)
    for name in _TRAINED_ARRAYS
}


def _runs(positions: Int32s) -> Int32s:
    """[U, 2] int32, [start, end) of each run: _runs([3, 4, 7]) -> [[3, 5], [7, 8]]."""
    if not positions.size:
        return np.empty((0, 2), np.int32)
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate(([0], breaks + 1))]
    ends = positions[np.concatenate((breaks, [positions.size - 1]))] + 1
    return np.stack([starts, ends], axis=1).astype(np.int32)


def _read_header(archive: zipfile.ZipFile) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(archive.read(HEADER))
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, expected {FORMAT}: another Rayloom wrote it")
    check_header(header)
    return header


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as member:
        return _load_array(member, allow_pickle=False)


def _step(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> JournalStep:
    columns = TrajectoryColumns(
        headers=tuple(tuple(row) for row in header["headers"]),
        name_table=tuple(header["name_table"]),
        **{name: arrays[name] for name in _COLUMN_ARRAYS},
    )
    samples = _samples(arrays, num_rows=columns.num_rows)
    mismatches: list[list[Mismatch]] = [[] for _ in range(columns.num_rows)]
    for row, turn, position, kind in arrays["mismatches"].tolist():
        mismatches[row].append(Mismatch(turn=turn, position=position, kind=_KINDS[kind]))
    problems: dict[str, str] = header.get("problems", {})
    entries = [
        TrajectoryEntry(
            trajectory=decode(columns, row),
            reason=None if reason is None else EvictionReason(reason),
            baseline_return=None if baseline_return is None else float(baseline_return),
            samples=tuple(samples[row]),
            mismatches=tuple(mismatches[row]),
            problem=problems.get(str(row), ""),
        )
        for row, (reason, baseline_return) in enumerate(
            zip(header["reasons"], header["baseline_returns"], strict=True)
        )
    ]
    rule = header["group_rule"]
    return JournalStep(
        step=header["step"],
        epoch=header["epoch"],
        trainer_version=header["trainer_version"],
        max_policy_age=header["max_policy_age"],
        num_packed_trained=header["num_packed_trained"],
        group_rule=None
        if rule is None
        else GroupRule(
            baseline=Baseline(rule["baseline"]),
            scale=Scale(rule["scale"]),
            trains_without_signal=rule.get("trains_without_signal", False),
        ),
        entries=tuple(entries),
    )


def _samples(arrays: Mapping[str, NDArray[Any]], *, num_rows: int) -> list[list[SampleEntry]]:
    found: list[list[SampleEntry]] = [[] for _ in range(num_rows)]
    turn_at = run_at = trained_at = 0
    for record in arrays["sample_entries"].tolist():
        row, num_turns, prompt_length, num_tokens, num_runs, num_trained = record
        runs = arrays["runs"][run_at : run_at + num_runs].tolist()
        end = trained_at + num_trained
        sample = SampleEntry(
            turns=tuple(arrays["sample_turns"][turn_at : turn_at + num_turns].tolist()),
            prompt_length=prompt_length,
            num_tokens=num_tokens,
            positions=_positions(runs, num_trained=num_trained),
            **{f: arrays[name][trained_at:end] for name, f in _TRAINED_ARRAYS.items()},
        )
        columns = [getattr(sample, field).shape[0] for field in _TRAINED_ARRAYS.values()]
        if set(columns) != {num_trained}:
            raise ValueError(
                f"a sample of row {row} has columns of {columns} trained tokens, expected "
                f"{num_trained}"
            )
        found[row].append(sample)
        turn_at, run_at, trained_at = turn_at + num_turns, run_at + num_runs, end
    return found


def _positions(runs: Sequence[Sequence[int]], *, num_trained: int) -> Int32s:
    # Before they are laid out: damaged ends may span gigabytes.
    num_positions = sum(max(0, end - start) for start, end in runs)
    if num_positions != num_trained:
        raise ValueError(f"runs of {num_positions} trained positions, expected {num_trained}")
    pieces = [np.arange(start, end, dtype=np.int32) for start, end in runs]
    return np.concatenate([np.empty(0, np.int32), *pieces])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
