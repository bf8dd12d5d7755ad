"""Task sets that were made for something else: rows with columns of their own, mapped by name.

A data set is a JSONL or Parquet file, or a directory: what `datasets.save_to_disk` writes (Arrow
files beside `state.json`, one such directory a split), or a snapshot of a Hugging Face data set
(JSONL and Parquet files whose names tell the split). All of it is read with pyarrow; the `datasets`
library is not needed. A mapped column becomes an entry of the task's data, and the names `task_id`
and `seed` make the task's own; a row without an id gets one by its content, so that the same rows
in any order are the same tasks. Called by the configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.environment.task_data import DataCheck
from actors.environment.tasks import BadTaskFile, derived_seed, json_rows
from actors.types import Task

SUFFIXES = (".jsonl", ".parquet")
# As Hugging Face's own names of a split: what a file is called by means that split.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
_OWN = ("task_id", "seed")


def read_data_set(
    path: str | Path,
    *,
    environment: str,
    columns: Mapping[str, str],
    split: str,
    check: DataCheck | None = None,
) -> list[Task]:
    """Make tasks of a data set's rows.

    Args: columns: the column of each entry of a task's data, by the entry's name; `task_id` and
    `seed` beside them are the task's own. split: of a directory; a file is taken whole.
    check: what every task's data have to satisfy.
    Raises: BadTaskFile, with the columns that there are where one is missing.
    Example: columns={"question": "query", "files": "gold"} makes of the row {"query": "Where?",
    "gold": ["a.py"], "score": 3} a task with the data {"question": "Where?", "files": ["a.py"]}.
    """
    path = Path(path)
    if not columns:
        raise BadTaskFile(f"data set {path}: got no columns, expected one or more, by their names")
    try:
        files = _files(path, split)
        rows = [row for file in files for row in _rows(file, columns)]
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise BadTaskFile(f"data set {path}: cannot be read: {error}") from error
    if not rows:
        raise BadTaskFile(f"data set {path}: got no rows, expected one or more")
    tasks: dict[str, Task] = {}
    num_same: dict[str, int] = {}
    for where, data in rows:
        task = _task(data, environment=environment, where=where)
        if check is not None and (problem := check.problem(task.data)):
            raise BadTaskFile(f"{where}: {problem}")
        if task.task_id in tasks:
            if "task_id" in columns:
                raise BadTaskFile(
                    f"{where}: task_id {task.task_id!r} stands there a second time; expected "
                    "unique ids; leave task_id out of the columns, and rows get ids by content"
                )
            num_same[task.task_id] = number = num_same.get(task.task_id, 1) + 1
            task = _named(task, f"{task.task_id}-{number}")
        tasks[task.task_id] = task
    return list(tasks.values())


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise BadTaskFile(
                f"data set {path}: got suffix {path.suffix!r}, expected .jsonl or .parquet, or a "
                "directory"
            )
        return [path]
    if not path.is_dir():
        raise BadTaskFile(f"data set {path}: not there; expected a file or a directory")
    if (path / _SAVED_SPLITS).is_file():
        splits = _strings(path / _SAVED_SPLITS, "splits")
        if split not in splits:
            raise _no_split(path, split, splits)
        return _saved(path / split)
    return _saved(path) if (path / _SAVED).is_file() else _of_snapshot(path, split)


def _saved(directory: Path) -> list[Path]:
    """The Arrow files of a data set that was saved to disk."""
    try:
        listed = json.loads((directory / _SAVED).read_text(encoding="utf-8"))["_data_files"]
        names = [Path(each["filename"]).name for each in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise BadTaskFile(
            f"data set {directory / _SAVED}: expected what datasets.save_to_disk writes"
        ) from error
    return [directory / name for name in names]


def _of_snapshot(path: Path, split: str) -> list[Path]:
    """The files of a split, by their names; where no name tells one, all are train."""
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise BadTaskFile(
            f"data set {path}: got a directory without .jsonl and .parquet files, expected a "
            "Hugging Face data set's, or one that datasets.save_to_disk wrote"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if set(by_split) == {""}:
        by_split = {"train": by_split[""]}
    found = by_split.get(split, [])
    if not found:
        raise _no_split(path, split, sorted(name for name in by_split if name))
    places = sorted({str(file.parent.relative_to(path)) for file in found})
    if len(places) > 1:
        raise BadTaskFile(
            f"data set {path}: got split {split!r} in several directories ({', '.join(places)}), "
            "expected one; give the directory of the configuration that is meant"
        )
    return found


def _split_of(file: Path) -> str:
    """The split that a file's name tells, or else its directories' names; "": none."""
    for name in (file.name.partition(".")[0], *reversed(file.parts[:-1])):
        words = re.split(r"[^a-z]+", name.lower())
        for split, aliases in _ALIASES.items():
            if set(words) & set(aliases):
                return split
        # As Hugging Face writes any split: NAME-00000-of-00001.
        if match := re.fullmatch(r"(\w+(?:\.\w+)*)-\d+-of-\d+", name):
            return match[1]
    return ""


def _no_split(path: Path, split: str, found: list[str]) -> BadTaskFile:
    return BadTaskFile(
        f"data set {path}: got no split {split!r}, expected one of {', '.join(found) or 'none'}; "
        "set tasks.split"
    )


def _strings(file: Path, key: str) -> list[str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise BadTaskFile(f"data set {file}: expected an object with {key}") from error
    return [str(each) for each in found]


def _rows(file: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mapped entries of each row."""
    if file.suffix == ".jsonl":
        for where, row in json_rows(file):
            if not isinstance(row, dict):
                raise BadTaskFile(f"{where}: got a {type(row).__name__}, expected an object")
            _check_columns(columns, list(row), where)
            yield where, {name: row[column] for name, column in columns.items()}
        return
    schema = pq.read_schema(file) if file.suffix == ".parquet" else _arrow(file).schema
    _check_columns(columns, schema.names, str(file))
    wanted = sorted(set(columns.values()))
    table = (
        pq.read_table(file, columns=wanted)
        if file.suffix == ".parquet"
        else _arrow(file).read_all().select(wanted)
    )
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file}, row {number}", {name: row[column] for name, column in columns.items()}


def _arrow(file: Path) -> Any:
    return pa.ipc.open_stream(pa.memory_map(str(file)))


def _check_columns(columns: Mapping[str, str], found: list[str], where: str) -> None:
    missing = sorted(set(columns.values()) - set(found))
    if missing:
        raise BadTaskFile(
            f"{where}: column {', '.join(missing)} is missing, got {', '.join(sorted(found))}; "
            "correct tasks.columns"
        )


def _task(row: dict[str, Any], *, environment: str, where: str) -> Task:
    data = {name: value for name, value in row.items() if name not in _OWN}
    try:
        content = json.dumps(data, ensure_ascii=False, allow_nan=False, sort_keys=True)
        content.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTaskFile(
            f"{where}: got a value that is no JSON ({error}), expected texts, finite numbers, "
            "true, false, null, lists and objects; leave its column out"
        ) from None
    task_id = row.get("task_id", f"row-{_digest(content)}")
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or task_id == "":
        raise BadTaskFile(f"{where}: task_id: got a {type(task_id).__name__}, expected a text")
    seed = row.get("seed", derived_seed("seed", task_id))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise BadTaskFile(f"{where}: seed: expected a whole number from 0 to 2^63 - 1")
    return Task(task_id=str(task_id), environment=environment, seed=seed, data=data)


def _digest(content: str) -> str:
    return blake2b(content.encode(), digest_size=10).hexdigest()


def _named(task: Task, task_id: str) -> Task:
    return Task(task_id=task_id, environment=task.environment, seed=task.seed, data=task.data)
