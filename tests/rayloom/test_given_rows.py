"""Tests of the rows given as `dataset`: which types are accepted and which are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
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
        (
            [ROWS[0], {"prompt": "q", "labels": [{"1": "a", 1: "b"}]}],
            r"row 2, column labels: got a value that is not JSON \(the key 1 of a dict is not a te",
        ),
        ([{"prompt": "q", "1": 1, 1: 2}], "row 1, column 1: got .*another column is also named 1"),
        *(
            ([{"prompt": "q", "when": value}], "row 1, column when: got a value that is not JSON")
            for value in (pd.NaT, pd.to_datetime([None], utc=True))
        ),
        *(
            ([{"prompt": "q", "when": value}], rf"row 1, column when: got a value .*{words}")
            for value, words in (
                (np.datetime64("NaT"), "a missing date or duration"),
                (np.array(["2024-01-01", "NaT"], dtype="M8[ns]"), "a missing date or duration"),
                (np.datetime64("20000-01-01"), "one that Python cannot hold"),
                (np.ma.array([1, 2], mask=[True, False]), "an array with masked values"),
                (np.array([(1, "2024-01-02")], dtype="i4,M8[ns]"), "an array with named fields"),
                (np.longdouble(1.5), "longdouble is not JSON"),
                (torch.eye(2).to_sparse(), "convert the value"),
            )
        ),
        (
            pd.DataFrame([[1]], columns=pd.MultiIndex.from_tuples([("a", "x")])),
            r"row 1, column \('a', 'x'\): got .*the column's name is a tuple, not a text",
        ),
        ([{"prompt": "q", math.nan: 1.5}], "row 1, column nan: got a value that is not JSON"),
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


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"parts": (np.float32(0.5), [np.bool_(True)])}, {"parts": [0.5, [True]]}),
        (date(2024, 1, 2), "2024-01-02"),
        (pd.Timestamp("2024-01-02T03:04:05Z"), "2024-01-02T03:04:05+00:00"),
        (np.array(["2024-01-02"], dtype="datetime64[ns]"), ["2024-01-02T00:00:00"]),
        (np.datetime64("2024-01-02"), "2024-01-02"),
        (np.array([["2024-01"]], dtype="datetime64[M]"), [["2024-01-01"]]),
        (np.timedelta64(2, "D"), 172800.0),
        (pd.to_datetime(["2024-01-02"], utc=True), ["2024-01-02T00:00:00+00:00"]),
        ([timedelta(seconds=90)], [90.0]),
        ({"price": Decimal("1.50"), "count": Decimal(2)}, {"price": 1.5, "count": 2}),
        (pd.Categorical(["a", "b"]), ["a", "b"]),
    ],
    ids=str,
)
def test_values_are_converted_as_those_of_files(value: Any, plain: Any, tmp_path: Path) -> None:
    assert read([{"prompt": "q", "answer": value}], tmp_path) == [{"prompt": "q", "answer": plain}]


def test_chats_that_pandas_read_from_parquet_are_the_same_tasks_as_the_file(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "ab"]
    chats = [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
    file = tmp_path / "chats.parquet"
    datasets.Dataset.from_dict({"prompt": chats, "sizes": [[1, 2], [3]]}).to_parquet(file)
    of_file = read_data_set(str(file), environment="single_turn", columns={}, split="train")
    found = read(pd.read_parquet(file), tmp_path)
    assert found == [task.data for task in of_file]
    assert [row["prompt"] for row in found] == chats


def test_a_column_that_holds_bytes_in_any_row_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = (None, {"bytes": b"x"}, memoryview(b"y"))
    rows = [{"prompt": "q", "image": each, "answer": 1} for each in images]
    assert [row.keys() for row in read(rows, tmp_path)] == [{"prompt", "answer"}] * 3
    assert caplog.messages == ["dataset: column image is left out: it holds bytes"]
