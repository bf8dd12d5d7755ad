"""Write the rows that a caller gives as `dataset` to a file, which a run's process reads."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from actors.user_code import type_of
from service.config.file import ConfigError

_FORMS = "expected a list of dicts, a datasets.Dataset or a pandas DataFrame"


def write_rows(dataset: Iterable[Mapping[str, Any]], directory: Path) -> Path:
    """Write rows to a file `rows` in a directory, which is created, and return the file.

    A `datasets.Dataset` becomes a Parquet file, so that each column keeps its type. Other rows
    become JSON lines.

    Raises: ConfigError if `dataset` is not rows, or if a value is not JSON.
    """
    _check_form(dataset)
    if _is_a(dataset, "datasets.IterableDataset"):
        dataset = _in_memory(dataset)
    if _is_a(dataset, "datasets.Dataset"):
        return _write_parquet(dataset, directory)
    if _is_a(dataset, "pandas.DataFrame"):
        dataset = _records(dataset)
    lines = [_line(row, f"dataset: row {number}") for number, row in enumerate(dataset, start=1)]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "rows.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def without_file(text: str, directory: Path) -> str:
    """Replace the name of a file of `write_rows` in an error's text, because it is removed."""
    place = re.escape(os.path.relpath(directory))
    return re.sub(rf"(?:data set )?{place}/rows\.(?:jsonl|parquet)", "dataset", text)


def _check_form(dataset: Any) -> None:
    """Raise ConfigError if `dataset` cannot be read row by row."""
    got = f"dataset: got {type_of(dataset)}"
    if _is_a(dataset, "datasets.DatasetDict") or _is_a(dataset, "datasets.IterableDatasetDict"):
        splits = ", ".join(map(str, dataset))
        raise ConfigError(
            f"{got} with the splits {splits}, expected one of them; give the split, such as "
            f"data[{next(iter(dataset), 'train')!r}]"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise ConfigError(
            f"{got} with the keys {names}, {_FORMS}; for a dict of columns, give "
            "datasets.Dataset.from_dict(data)"
        )
    if _is_a(dataset, "pandas.Series"):
        raise ConfigError(f'{got}, {_FORMS}; give data.to_frame("prompt") for a column of prompts')
    if not isinstance(dataset, Iterable):
        raise ConfigError(f"{got}, {_FORMS}; correct it")


def _is_a(value: object, name: str) -> bool:
    """Return whether a value's class is `name`, such as pandas.DataFrame, without an import."""
    package, _, kind = name.partition(".")
    found = getattr(sys.modules.get(package), kind, None)
    return isinstance(found, type) and isinstance(value, found)


def _in_memory(dataset: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(dataset.with_format(None)), features=dataset.features)


def _write_parquet(dataset: Any, directory: Path) -> Path:
    from pyarrow import ArrowException

    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "rows.parquet"
    try:
        dataset.to_parquet(file)
    except ArrowException as error:
        raise ConfigError(
            f"dataset: cannot be written as Parquet ({error}), expected columns that Parquet can "
            "hold; leave the column out by remove_columns, or give data.to_list()"
        ) from error
    return file


def _records(frame: Any) -> Any:
    names = [str(name) for name in frame.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"dataset: the column {', '.join(twice)} occurs twice, expected unique names; "
            "rename one"
        )
    return frame.to_dict("records")


def _line(row: Any, where: str) -> str:
    """Return a row as JSON. where: the row's name in error texts. Raises: ConfigError."""
    # Some rows are not of the class Mapping: those of sqlite3, for example.
    if not hasattr(row, "keys"):
        raise ConfigError(
            f'{where}: got {type_of(row)}, expected a dict, such as {{"prompt": "What is 1 + 1?"}};'
            " give each row as a dict of its columns"
        )
    values = dict(row)
    if problem := _problem(values):
        column = next((name for name, value in values.items() if _problem({name: value})), "")
        value = values.get(column)
        got = repr(value) if isinstance(value, float) else f"a value that is not JSON ({problem})"
        raise ConfigError(
            f"{where}, column {column}: got {got}, expected texts, finite numbers, true, false, "
            "null, lists and dicts; convert the value, or leave out the row (in pandas by dropna) "
            "or the column"
        )
    return json.dumps(values, ensure_ascii=False)


def _problem(values: dict[str, Any]) -> str:
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return str(error) or type_of(error)
    return ""
