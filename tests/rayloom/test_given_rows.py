"""Tests of the rows given as `dataset`: which types are accepted and which are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from pydantic import BaseModel
from torch.utils.data import Subset

import rayloom
from actors.environment.data_sets import read_data_set
from rayloom.given import write_rows

ROWS = [{"prompt": f"Which number comes after {n}?", "answer": n + 1} for n in range(3)]
DATASET = datasets.Dataset.from_list(ROWS)
FRAME = pd.DataFrame(ROWS)


class Row(BaseModel):
    prompt: str
    answer: int


class Indexed:
    """A sequence of rows without `__iter__`."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return ROWS[number]

    def __len__(self) -> int:
        return len(ROWS)


class DataFrame:
    """A data frame with the interface of pandas, like those of modin and cudf."""

    columns = FRAME.columns
    to_dict = staticmethod(FRAME.to_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache of the library for data sets to a temporary directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(dataset: Any, directory: Path) -> list[Mapping[str, Any]]:
    file = write_rows(dataset, directory)
    tasks = read_data_set(str(file), environment="single_turn", columns={}, split="train")
    return [task.data for task in tasks]


@pytest.mark.parametrize(
    "dataset",
    [
        DATASET,
        *(DATASET.with_format(name) for name in ("pandas", "arrow", "numpy", "torch")),
        DATASET.with_format(None, columns=["answer"]),
        DATASET.to_iterable_dataset(),
        DATASET.to_iterable_dataset().with_format("numpy"),
        FRAME,
        FRAME.set_index(pd.Index(["a", "b", "c"])),
        ROWS,
        tuple(ROWS),
        Subset(ROWS, [0, 1, 2]),  # type: ignore[arg-type]
        Indexed(),
        [Row(**row) for row in ROWS],  # type: ignore[arg-type]
        DataFrame(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_same_rows_in_any_type_are_the_same_tasks(dataset: Any, tmp_path: Path) -> None:
    assert read(dataset, tmp_path / "run") == ROWS


def test_a_stream_without_features_keeps_each_column_of_each_row(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": 1}, {"prompt": "r", "answer": "two", "hint": "h"}]
    assert read(datasets.IterableDataset.from_generator(lambda: iter(rows)), tmp_path) == rows
    wrong = DATASET.to_iterable_dataset().map(
        lambda row: {"answer": "x"}, features=datasets.Features(answer=datasets.Value("int64"))
    )
    with pytest.raises(rayloom.ConfigError, match=r"^dataset: .*expected rows of these types"):
        write_rows(wrong, tmp_path)


def test_a_selection_of_a_data_set_is_read_as_selected(tmp_path: Path) -> None:
    assert read(DATASET.select([2, 0]), tmp_path / "run") == [ROWS[2], ROWS[0]]


def test_nulls_that_a_data_set_adds_to_tool_schemas_are_removed(tmp_path: Path) -> None:
    tools = [{"name": name, "parameters": {"properties": {name: {"a": 1}}}} for name in "xy"]
    rows = [{"prompt": "Which?", "tools": [tool]} for tool in tools]
    for number, form in enumerate((datasets.Dataset.from_list(rows), rows)):
        assert read(form, tmp_path / str(number)) == rows


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            datasets.DatasetDict({"train": DATASET, "test": DATASET}),
            r"got a DatasetDict with the splits train, test, .*give the split, such as data\['tr",
        ),
        (
            datasets.IterableDatasetDict({"test": DATASET.to_iterable_dataset()}),
            r"got an IterableDatasetDict with the splits test, .*such as data\['test'\]",
        ),
        (
            {"prompt": ["q"], "answer": ["a"]},
            r"got a dict with the keys prompt, answer, expected a list of dicts, .*from_dict\(data",
        ),
        (pd.Series(["q", "r"]), r"got a Series, expected a list of dicts, .*to_frame"),
        (5, "got an int, expected a list of dicts, a datasets.Dataset or a pandas DataFrame"),
        (["q", "r"], "row 1: got a str, expected a dict, such as"),
        ([ROWS[0], [("prompt", "q")]], "row 2: got a list, expected a dict, such as"),
        (
            [ROWS[0], {"prompt": "q", "when": object()}],
            "row 2, column when: got a value that is not JSON .*object is not JSON ser.*; convert",
        ),
        ([{"prompt": "\ud800"}], "row 1, column prompt: got a value that is not JSON"),
    ],
)  # fmt: skip
def test_values_that_are_not_rows_are_refused_before_anything_is_written(
    dataset: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=f"^dataset: {words}"):
        rayloom.train(dataset=dataset, reward="my.py:score")
    assert not list(tmp_path.iterdir())


def test_the_error_of_the_command_does_not_name_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"^tasks\.dataset: dataset: got no rows, expect"):
        rayloom.train(dataset=[], reward=lambda completion: 1.0)
    assert not list(tmp_path.iterdir())


def test_missing_values_and_duplicate_columns_are_refused(tmp_path: Path) -> None:
    missing = FRAME.assign(answer=[1.0, math.nan, 2.0])
    with pytest.raises(rayloom.ConfigError, match=r"row 2, column answer: got nan, .*by dropna"):
        write_rows(missing, tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"column answer occurs twice, .*; rename one"):
        write_rows(FRAME.set_axis(["answer", "answer"], axis="columns"), tmp_path)
    assert read(missing.dropna(), tmp_path / "run") == [
        {"prompt": ROWS[0]["prompt"], "answer": 1.0}, {"prompt": ROWS[2]["prompt"], "answer": 2.0},
    ]  # fmt: skip
