"""Tests of columns of Parquet files whose types are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.environment.data_sets import read_data_set
from actors.environment.tasks import BadTaskFile

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 2?", "answer": "3"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache directory of the library datasets to one of this test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(path: Path, columns: Mapping[str, str | None] = {}) -> list[Mapping[str, Any]]:
    found = read_data_set(str(path), environment="single_turn", columns=columns, split="train")
    return [task.data for task in found]


def parquet(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file


def audio(directory: Path) -> Path:
    """Write a file with a column of sounds, which the library decodes only with another package."""
    sound = {"bytes": b"abc", "path": None}
    made = datasets.Dataset.from_list([{**row, "odd": sound} for row in ROWS])
    # A cast by the library would decode the sounds.
    features = datasets.Features({**made.features, "odd": datasets.Audio()})
    file = directory / "sounds.parquet"
    table = made.data.table.cast(features.arrow_schema)
    pq.write_table(table.replace_schema_metadata(features.arrow_schema.metadata), file)
    return file


ODD: dict[str, pa.Array] = {
    "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * 2, pa.binary(16))),
}


@pytest.mark.parametrize("kind", [*ODD, "audio"])
def test_a_column_of_an_unsupported_type_is_named_and_can_be_left_out(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package that decodes sounds may be installed.
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", False)
    file = audio(tmp_path) if kind == "audio" else parquet(tmp_path / "odd.parquet")
    if kind in ODD:
        pq.write_table(pq.read_table(file).append_column("odd", ODD[kind]), file)
    got = "cannot be read" if kind == "audio" else f"got the type .*{kind}"
    words = f"^data set {file}, column odd: {got}.*; leave the column out, by null in tasks.columns"
    with pytest.raises(BadTaskFile, match=words):
        read(file)
    assert read(file, {"odd": None}) == ROWS
    # A column that another entry maps cannot be left out.
    with pytest.raises(BadTaskFile, match=words):
        read(file, {"odd": None, "more": "odd"})


def test_the_error_names_the_file_of_a_directory_with_an_unsupported_column(tmp_path: Path) -> None:
    file = parquet(tmp_path / "all" / "train.parquet")
    pq.write_table(pq.read_table(file).append_column("odd", ODD["map"]), file)
    with pytest.raises(
        BadTaskFile, match=r"all, file train\.parquet, column odd: got the type map"
    ):
        read(tmp_path / "all")
