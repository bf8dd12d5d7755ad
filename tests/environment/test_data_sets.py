"""Data sets of columns of their own become tasks: files, saved data sets, snapshots of a hub's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.environment.data_sets import read_data_set
from actors.environment.tasks import BadTaskFile
from actors.types import Task
from service.config.file import ConfigError, parse_config
from service.config.tasks import open_tasks

ROWS = [
    {"query": "Where?", "gold": ["a.py", "b.py"], "repo": "r.zip", "n": 1, "meta": {"k": [1.5]}},
    {"query": "Who?", "gold": [], "repo": "r.zip", "n": 2, "meta": {"k": []}},
]
COLUMNS = {"question": "query", "files": "gold", "repository": "repo", "more": "meta"}
DATA = [
    {"question": "Where?", "files": ["a.py", "b.py"], "repository": "r.zip", "more": {"k": [1.5]}},
    {"question": "Who?", "files": [], "repository": "r.zip", "more": {"k": []}},
]


def read(path: Path, *, columns: Mapping[str, str] = COLUMNS, split: str = "train") -> list[Task]:
    return read_data_set(path, environment="code_search", columns=columns, split=split)


def jsonl(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def saved(directory: Path, *shards: Sequence[Mapping[str, Any]]) -> Path:
    """What datasets.save_to_disk writes, as its documented layout has it."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"data-{index:05}-of-{len(shards):05}.arrow" for index in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(list(rows))
        with pa.ipc.new_stream(str(directory / name), table.schema) as stream:
            stream.write_table(table)
    (directory / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    return directory


def test_every_form_of_the_same_rows_gives_the_same_tasks(tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    saved(splits / "train", ROWS[:1], ROWS[1:])
    saved(splits / "test", ROWS[:1])
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    hub = tmp_path / "hub"
    parquet(hub / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    parquet(hub / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    parquet(hub / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    parquet(hub / "data" / "hard_ones-00000-of-00001.parquet", ROWS[1:])
    jsonl(hub / ".cache" / "train.jsonl", [{"other": 1}])
    (hub / "README.md").write_text("A data set.")
    forms = [
        jsonl(tmp_path / "rows.jsonl"),
        parquet(tmp_path / "rows.parquet"),
        saved(tmp_path / "saved", ROWS),
        splits,
        hub,
        jsonl(tmp_path / "plain" / "rows.jsonl").parent,
        jsonl(tmp_path / "folders" / "train" / "a.jsonl").parents[1],
    ]
    expected = read(forms[0])
    assert [task.data for task in expected] == DATA
    assert {task.environment for task in expected} == {"code_search"}
    for form in forms[1:]:
        assert read(form) == expected, form
    assert [task.data for task in read(hub, split="test")] == DATA[:1]
    assert [task.data for task in read(hub, split="hard_ones")] == DATA[1:]
    assert [task.data for task in read(splits, split="test")] == DATA[:1]
    # The same rows in another order are the same tasks; the same row twice is two.
    turned = read(jsonl(tmp_path / "turned.jsonl", ROWS[::-1]))
    assert sorted(turned, key=str) == sorted(expected, key=str)
    ids = [task.task_id for task in read(jsonl(tmp_path / "thrice.jsonl", [ROWS[0]] * 3))]
    assert ids == [expected[0].task_id, f"{ids[0]}-2", f"{ids[0]}-3"]


def test_ids_and_seeds_come_from_columns_where_they_are_mapped(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl")
    tasks = read(file, columns={"task_id": "query", "seed": "n", "question": "query"})
    assert [(task.task_id, task.seed) for task in tasks] == [("Where?", 1), ("Who?", 2)]
    assert [task.data for task in tasks] == [{"question": "Where?"}, {"question": "Who?"}]


def test_what_cannot_be_used_is_told_with_what_is_there(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl")
    table = parquet(tmp_path / "rows.parquet")
    several = tmp_path / "several"
    parquet(several / "en" / "train-00000-of-00001.parquet")
    parquet(several / "de" / "train-00000-of-00001.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("a,b")
    odd = parquet(tmp_path / "odd.parquet", [{"query": b"\xff"}])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    lying = saved(tmp_path / "lying", ROWS)
    (lying / "state.json").write_text("{}")
    question = {"question": "query"}
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (file, {"columns": {"question": "quest"}},
         "line 1: column quest is missing, got gold, meta, n, query, repo"),
        (table, {"columns": {"question": "quest"}}, "got gold, meta, n, query, repo"),
        (file, {"columns": {}}, "expected one or more"),
        (file, {"columns": {"task_id": "repo"}}, "a second time"),
        (file, {"columns": {"task_id": "gold"}}, "task_id: got a list"),
        (file, {"columns": {"seed": "query"}}, "seed: expected a whole number"),
        (several, {}, r"several directories \(de, en\)"),
        (several / "en", {"split": "dev"}, "got no split 'dev', expected one of train"),
        (tmp_path / "empty", {}, "without .jsonl and .parquet"),
        (tmp_path / "nowhere", {}, "not there"),
        (tmp_path / "rows.csv", {}, "got suffix '.csv'"),
        (odd, {"columns": question}, "no JSON"),
        (broken, {"columns": question}, "cannot be read"),
        (lying, {}, "save_to_disk"),
        (jsonl(tmp_path / "none.jsonl", []), {}, "got no rows"),
        (jsonl(tmp_path / "list.jsonl", [[1]]), {}, "got a list"),  # type: ignore[list-item]
    ]  # fmt: skip
    for path, options, word in cases:
        with pytest.raises(BadTaskFile, match=word):
            read(path, **options)


def test_a_configuration_maps_columns_for_any_environment(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{**ROWS[0], "query": f"q{n}"} for n in range(6)])
    tasks = {
        "environment": "code_search",
        "options": {"root": str(tmp_path)},
        "file": str(file),
        "evaluation_tasks": 2,
    }
    tree = {"model": {"tiny": {}}, "tasks": {**tasks, "columns": COLUMNS}}
    source = open_tasks(parse_config(tree, source="test"))
    asked = {source.task(index).data["question"] for index in range(4)}
    assert len(asked | {task.data["question"] for task in source.held_out(2)}) == 6
    tree = {**tree, "tasks": {**tasks, "columns": {"question": "quest"}}}
    with pytest.raises(ConfigError, match=r"tasks\.file: .* column quest is missing, got gold"):
        open_tasks(parse_config(tree, source="test"))
    tree = {**tree, "tasks": {"environment": "guessing", "columns": COLUMNS}}
    with pytest.raises(ConfigError, match=r"tasks\.columns is set without tasks\.file"):
        parse_config(tree, source="test")
