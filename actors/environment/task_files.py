"""Task files: JSON lines or Parquet, read with every row checked, written aside and renamed.

A row holds `task_id` and `environment` (text), `seed` (a whole number, 0 or more) and `data` (an
object; JSON text in a Parquet column). Called by the configuration's checks and `rayloom tasks`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from actors.environment.builtin.reasoning_gym_env import make_dataset
from actors.types import Task

_FIELDS = ("task_id", "environment", "seed", "data")
_KINDS = (pa.string(), pa.string(), pa.int64(), pa.string())
_SCHEMA = pa.schema(list(zip(_FIELDS, _KINDS, strict=True)))


class BadTaskFile(ValueError):
    """A task file cannot be used; the message names the row and the remedy."""


def read_tasks(path: str | Path) -> list[Task]:
    """Read a task file, by its suffix: .jsonl or .parquet.

    Raises: BadTaskFile for an unknown suffix, an unreadable or empty file, a row that is not a
    task, or a task id that comes twice.
    """
    path = Path(path)
    _check_suffix(path)
    try:
        rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path))
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise BadTaskFile(f"task file {path}: cannot be read: {error}") from error
    first_place: dict[str, str] = {}
    tasks = []
    for place, row in rows:
        task = _task(row, place=place)
        if task.task_id in first_place:
            raise BadTaskFile(
                f"{place}: task_id {task.task_id!r} stands already in {first_place[task.task_id]}; "
                "expected unique ids; rename or remove one"
            )
        first_place[task.task_id] = place
        tasks.append(task)
    if not tasks:
        raise BadTaskFile(f"task file {path}: got no tasks, expected one or more")
    return tasks


def write_tasks(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write a task file, by its suffix; a reader sees the old file or the whole new one.

    Raises: BadTaskFile for an unknown suffix, duplicate ids or no tasks; TypeError or
    ValueError for data that are not JSON.
    """
    path = Path(path)
    _check_suffix(path)
    if len({task.task_id for task in tasks}) != len(tasks):
        raise BadTaskFile(f"task file {path}: got duplicate task ids, expected unique ones")
    if not tasks:
        raise BadTaskFile(f"task file {path}: got no tasks to write, expected one or more")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".parquet":
                pq.write_table(_table(tasks), file)
            else:
                file.writelines(_json_line(task) for task in tasks)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    finally:
        # Still there only where the writing failed.
        Path(aside).unlink(missing_ok=True)


def generate_reasoning_gym_tasks(
    family: str, count: int, *, seed: int, options: Mapping[str, Any] | None = None
) -> list[Task]:
    """Make tasks of a reasoning-gym family, as its own generator orders them.

    Args: count: tasks. seed: of the whole set. options: the family's own configuration.
    Returns: tasks whose data hold the item; where its metadata do not survive JSON, or are scored
    otherwise after it, the seed and the index that make it again.
    Raises: ValueError for an unknown family or option; ImportError without the package.
    """
    if count < 1:
        raise ValueError(f"reasoning-gym tasks: got count={count}, expected 1 or more")
    config = dict(options or {})
    dataset = make_dataset(family, config=config, seed=seed, size=count)
    return [
        Task(
            task_id=f"{family}-{seed}-{index}",
            environment="reasoning_gym",
            seed=(seed + index) % 2**31,
            data={"family": family, "config": config, **_stored(dataset, index, seed=seed)},
        )
        for index in range(count)
    ]


def _stored(dataset: Any, index: int, *, seed: int) -> dict[str, Any]:
    item = dataset[index]
    kept = {key: _without_tuples(item.get(key)) for key in ("question", "answer", "metadata")}
    try:
        survives = json.loads(json.dumps(kept, allow_nan=False)) == kept
    except (TypeError, ValueError):
        survives = False
    if survives and item["answer"] is not None:
        # Most scorers take lists for tuples; that some do not shows in how they score the truth.
        stored_score, score = (
            dataset.score_answer(item["answer"], entry=entry) for entry in (kept, item)
        )
        survives = stored_score == score
    return kept if survives else {"seed": seed, "index": index}


def _without_tuples(value: Any) -> Any:
    """What JSON makes of a value: it has lists alone."""
    if isinstance(value, list | tuple):
        return [_without_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_tuples(part) for key, part in value.items()}
    return value


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".jsonl", ".parquet"):
        raise BadTaskFile(
            f"task file {path}: got suffix {path.suffix!r}, expected .jsonl or .parquet; rename it"
        )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            yield place, _parse_json(line, place=place)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(pq.read_table(path).to_pylist(), start=1):
        place = f"{path}, row {number}"
        if isinstance(row.get("data"), str):
            row["data"] = _parse_json(row["data"], place=place)
        yield place, row


def _parse_json(text: str, *, place: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadTaskFile(f"{place}: not JSON: {error}; expected one JSON object") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _task(row: Any, *, place: str) -> Task:
    if not isinstance(row, dict):
        raise BadTaskFile(f"{place}: got a {type(row).__name__}, expected an object with {_FIELDS}")
    unknown = sorted(set(row) - set(_FIELDS))
    missing = [name for name in _FIELDS[:3] if name not in row]
    if unknown or missing:
        raise BadTaskFile(
            f"{place}: unknown fields {unknown}, missing fields {missing}; expected {_FIELDS} "
            "(data may be left out); put what belongs to the environment under data"
        )
    for name in ("task_id", "environment"):
        if not isinstance(row[name], str) or not row[name]:
            _refuse(place, name, row[name], "a text that is not empty")
    # A bool is an int in Python, and True is no seed.
    if not isinstance(row["seed"], int) or isinstance(row["seed"], bool):
        _refuse(place, "seed", row["seed"], "a whole number")
    if not 0 <= row["seed"] < 2**63:
        raise BadTaskFile(f"{place}: seed: got {row['seed']}, expected 0 to 2^63 - 1")
    data = row.get("data", {})
    if not isinstance(data, dict):
        _refuse(place, "data", data, "an object")
    return Task(task_id=row["task_id"], environment=row["environment"], seed=row["seed"], data=data)


def _refuse(place: str, name: str, value: Any, expected: str) -> NoReturn:
    raise BadTaskFile(
        f"{place}: {name}: got a {type(value).__name__}, expected {expected}; correct the row"
    )


def _json_line(task: Task) -> bytes:
    row = dict(zip(_FIELDS, _values(task), strict=True)) | {"data": dict(task.data)}
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _table(tasks: Iterable[Task]) -> pa.Table:
    columns = zip(*(_values(task) for task in tasks), strict=True)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, _KINDS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _values(task: Task) -> tuple[str, str, int, str]:
    data = json.dumps(dict(task.data), ensure_ascii=False, allow_nan=False)
    return task.task_id, task.environment, task.seed, data
