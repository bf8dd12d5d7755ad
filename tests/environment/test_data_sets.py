"""Tests of reading tasks from data sets: files, directories, saved data sets, hub snapshots."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.environment.data_sets import read_data_set
from actors.environment.task_data import CHAT_DATA, PROMPT_DATA, DataCheck
from actors.environment.tasks import BadTaskFile
from actors.types import Task
from service.config.file import ConfigError, parse_config
from service.config.tasks import open_sets, open_tasks

ROWS = [
    {"query": "Where?", "gold": ["a.py", "b.py"], "repo": "r.zip", "n": 1, "meta": {"k": [1.5]}},
    {"query": "Who?", "gold": [], "repo": "r.zip", "n": 2, "meta": {"k": []}},
]
COLUMNS = {"question": "query", "files": "gold", "repository": "repo", "more": "meta"}
ONLY = {**COLUMNS, "n": None}
DATA = [
    {"question": "Where?", "files": ["a.py", "b.py"], "repository": "r.zip", "more": {"k": [1.5]}},
    {"question": "Who?", "files": [], "repository": "r.zip", "more": {"k": []}},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache directory of the library datasets to one of this test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(
    path: Path, *, columns: Mapping[str, str | None] = ONLY, split: str = "train", **options: Any
) -> list[Task]:
    return read_data_set(
        str(path), environment="code_search", columns=columns, split=split, **options
    )


def jsonl(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(file: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


def saved(directory: Path, **splits: Sequence[Mapping[str, Any]]) -> Path:
    """Save one split as a data set, or several splits as one data set, as the library does."""
    made = {name: datasets.Dataset.from_list(list(rows)) for name, rows in splits.items()}
    if len(made) == 1:
        made.popitem()[1].save_to_disk(str(directory))
    else:
        datasets.DatasetDict(made).save_to_disk(str(directory))
    return directory


def test_every_form_of_the_same_rows_gives_the_same_tasks(tmp_path: Path) -> None:
    splits = saved(tmp_path / "splits", train=ROWS, test=ROWS[:1])
    hub = tmp_path / "hub"
    parquet(hub / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    parquet(hub / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    parquet(hub / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    (hub / "README.md").write_text("A data set.")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    forms = [
        jsonl(tmp_path / "rows.jsonl"),
        tmp_path / "rows.json",
        parquet(tmp_path / "rows.parquet"),
        saved(tmp_path / "saved", train=ROWS),
        splits,
        hub,
        jsonl(tmp_path / "plain" / "train.jsonl").parent,
    ]
    expected = read(forms[0])
    assert [task.data for task in expected] == DATA
    assert {task.environment for task in expected} == {"code_search"}
    for form in forms[1:]:
        assert read(form) == expected, form
    assert [task.data for task in read(hub, split="test")] == DATA[:1]
    assert [task.data for task in read(splits, split="test")] == DATA[:1]
    # Rows in another order give the same tasks; a row that is repeated gives several tasks.
    turned = read(jsonl(tmp_path / "turned.jsonl", ROWS[::-1]))
    assert sorted(turned, key=str) == sorted(expected, key=str)
    ids = [task.task_id for task in read(jsonl(tmp_path / "thrice.jsonl", [ROWS[0]] * 3))]
    assert ids == [expected[0].task_id, f"{ids[0]}-2", f"{ids[0]}-3"]


@pytest.mark.parametrize("form", ["arrow", "numpy", "pandas", "torch"])
def test_the_saved_format_of_a_data_set_does_not_change_the_tasks(
    tmp_path: Path, form: str
) -> None:
    made = datasets.Dataset.from_list(ROWS)
    made.with_format(form).save_to_disk(str(tmp_path / "one"))
    # The format applies to some columns only, and reading with it would hide the others.
    made.with_format(form, columns=["n"]).save_to_disk(str(tmp_path / "hidden"))
    datasets.DatasetDict({"train": made.with_format(form)}).save_to_disk(str(tmp_path / "splits"))
    for name in ("one", "hidden", "splits"):
        assert [task.data for task in read(tmp_path / name)] == DATA, name


def test_odd_parquet_files_of_pandas_are_read_or_refused_with_the_place(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.PARQUET"
    # The names that pandas gives to columns named NaN and None.
    table = pa.table({"prompt": ["a"], "nan": ["1"], "None": ["2"]})
    pq.write_table(table, file)
    assert read(file, columns={})[0].data == {"prompt": "a", "nan": "1", "None": "2"}
    prompts = DataCheck(PROMPT_DATA)
    refused: list[tuple[pa.Table, str]] = [
        (pa.table({"prompt": ["a", None], "answer": ["1", "2"]}),
         r"row 2: data\.prompt: got null, expected string or array; .* or remove the row"),
        (pa.table({"prompt": ["a", ""]}), r"row 2: data\.prompt: got a text that is empty"),
        (pa.table({" prompt": ["a"]}), r"prompt missing.*has the columns ' prompt': map"),
        (pa.table({"prompt": ["a"], "n": [float("nan")]}), "row 1, column n: got a value that is"),
        (table.slice(0, 0), "got no rows, expected one or more"),
        (pa.table({}), "got no rows, expected one or more"),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, names=["x", "x"]), "column x occurs twice"),
    ]  # fmt: skip
    for given, words in refused:
        pq.write_table(given, file)
        with pytest.raises(BadTaskFile, match=words):
            read(file, columns={}, check=prompts)
    directory = tmp_path / "directory"
    parquet(directory / "train-0.parquet")
    pq.write_table(table.slice(0, 0), directory / "train-1.parquet")
    with pytest.raises(BadTaskFile, match=r"file train-1\.parquet: got no rows"):
        read(directory)


def test_unmapped_columns_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,answer,seed\nWhat?,4,7\nWho?,5,8\n")
    asked = {"columns": {"prompt": "query"}}
    tasks = read(tmp_path / "rows.csv", **asked)
    assert [(task.seed, task.data) for task in tasks] == [
        (7, {"prompt": "What?", "answer": "4", "seed": "7"}),
        (8, {"prompt": "Who?", "answer": "5", "seed": "8"}),
    ]
    properties = {"prompt": {"type": "string"}, "level": {}}
    closed = DataCheck({"properties": properties, "additionalProperties": False})
    tasks = read(tmp_path / "rows.csv", **asked, check=closed)
    assert [task.data for task in tasks] == [{"prompt": "What?"}, {"prompt": "Who?"}]
    needs = DataCheck({"properties": properties, "required": ["prompt"]})
    with pytest.raises(BadTaskFile, match=r"prompt missing.*has the columns query, answer, seed"):
        read(tmp_path / "rows.csv", columns={}, check=needs)
    (tmp_path / "columns.json").write_text('{"prompt": ["a", "b"], "answer": ["1", "2"]}')
    with pytest.raises(BadTaskFile, match=r"row 1: .*is one JSON object.*expected a list of rows"):
        read(tmp_path / "columns.json", columns={}, check=needs)


def test_values_of_json_are_unchanged_and_values_of_csv_are_texts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "007", "more": {"k": 1}, "day": "2026-11-25"},
        {"prompt": "b", "answer": ["3"], "more": {"other": None}},
        {"prompt": "c", "answer": 2},
    ]
    for form in (jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.json"):
        if form.suffix == ".json":
            form.write_text(json.dumps(rows))
        assert [task.data for task in read(form, columns={})] == rows
    (tmp_path / "rows.csv").write_text("prompt,answer\na,007\nb,None\nc,True\nd,1.50\n")
    found = [task.data["answer"] for task in read(tmp_path / "rows.csv", columns={})]
    assert found == ["007", "None", "True", "1.50"]


DATED = [
    {"prompt": "a", "answer": "2024-01-01", "at": {"t": ["2024-01-02T10:00:00Z"]}},
    {"prompt": "b", "answer": "2024-02-01", "at": {"t": []}},
    {"prompt": "c", "answer": "2024-03-01", "more": 1},
]


def test_the_text_files_of_a_directory_are_read_as_single_files_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = jsonl(tmp_path / "dates" / "train.jsonl", DATED).parent
    jsonl(directory / "test-1.jsonl", DATED[:1])
    jsonl(directory / "test-2.ndjson", DATED[1:2])
    assert [task.data for task in read(directory, columns={})] == DATED
    assert [task.data for task in read(directory, columns={}, split="test")] == DATED[:2]
    sliced = read(directory, columns={}, split="train[1:]+test[:50%]")
    assert [task.data for task in sliced] == [*DATED[1:], DATED[0]]
    assert len(read(directory, columns={}, split="all")) == 5
    with pytest.raises(BadTaskFile, match="got no split 'dev', expected one of train, test"):
        read(directory, columns={}, split="dev")
    table = tmp_path / "table" / "rows.csv"
    table.parent.mkdir()
    table.write_text("prompt,answer\na,007\n")
    assert [task.data["answer"] for task in read(table.parent, columns={})] == ["007"]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        (("train.jsonl", "more.jsonl"), ["more.jsonl"]),
        (("a.jsonl", "b.csv"), ["b.csv"]),
        (("train.parquet", "rest/more.parquet"), ["rest/more.parquet"]),
        (("train.jsonl", "test.jsonl", "notes.txt", ".hidden/x.jsonl"), []),
    ],
)
def test_unread_files_of_a_directory_are_reported(
    tmp_path: Path, files: Sequence[str], unread: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in files:
        write = parquet if name.endswith(".parquet") else jsonl
        write(tmp_path / "set" / name, [{"prompt": "a", "answer": name}])
    (tmp_path / "set" / "dataset_infos.json").write_text("{}")
    assert len(read(tmp_path / "set", columns={})) == 1
    named = [each.split("not read: ")[1].split(";")[0] for each in caplog.messages]
    assert named == unread


def test_missing_files_of_a_series_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    for number in range(2):
        parquet(folder / f"train-{number:05}-of-00003-{number}.parquet")
        jsonl(tmp_path / "texts" / f"train-{number:05}-of-00002.jsonl")
    parquet(folder / "test-00000-of-00002.parquet")
    jsonl(tmp_path / "texts" / "test-00000-of-00004.jsonl")
    for form in (tmp_path / "texts", jsonl(tmp_path / "own" / "train-1-of-2.jsonl").parent):
        read(form)
    assert caplog.messages == []
    assert len(read(folder)) == 4
    [warning] = caplog.messages
    assert f"are 2 of the 3 files {folder}/train-*-of-00003*.parquet; expected all" in warning
    (tmp_path / "texts" / "train-00000-of-00002.jsonl").unlink()
    read(tmp_path / "texts")
    assert "are 1 of the 2 files" in caplog.messages[-1]
    caplog.clear()
    read(tmp_path / "texts", split="test[:50%]+train")
    of_test, of_train = caplog.messages
    assert "test-*-of-00004" in of_test and "train-*-of-00002" in of_train


def test_texts_that_the_library_converts_to_times_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "answer": "2024-01-01"}]
    directory = jsonl(tmp_path / "own" / "rows.jsonl", rows).parent
    # The README sets options for reading, so that the library reads the file, not Rayloom.
    (directory / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: rows.jsonl\n  chunksize: 99\n---\n"
    )
    read(directory, columns={})
    assert "has read the texts in answer as times" in caplog.text


def test_ids_and_seeds_are_read_from_mapped_columns(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl")
    others = dict.fromkeys(("gold", "repo", "meta"))
    asked = {"task_id": "query", "seed": "n", "question": "query", **others}
    tasks = read(file, columns=asked)
    assert [(task.task_id, task.seed) for task in tasks] == [("Where?", 1), ("Who?", 2)]
    assert [task.data for task in tasks] == [
        {"task_id": "Where?", "seed": 1, "question": "Where?"},
        {"task_id": "Who?", "seed": 2, "question": "Who?"},
    ]


def test_wrong_settings_and_files_are_refused_with_what_was_found(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl")
    table = parquet(tmp_path / "rows.parquet")
    splits = saved(tmp_path / "splits", train=ROWS, test=ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.txt").write_text("a,b")
    long_id = jsonl(tmp_path / "long.jsonl", [{"task_id": "a" * 600}])
    odd = parquet(tmp_path / "odd.parquet", [{"query": b"\xff"}])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    cases: list[tuple[Path | str, dict[str, Any], str]] = [
        (file, {"columns": {"question": "quest"}},
         "column quest is missing, got gold, meta, n, query, repo"),
        (table, {"columns": {"question": "quest"}}, "got gold, meta, n, query, repo"),
        (file, {"columns": {"task_id": "repo"}}, "a second time"),
        (file, {"columns": {"task_id": "gold"}}, "task_id: got a list"),
        (file, {"columns": {"seed": "query"}}, "seed: got 'Where\\?', expected a whole number"),
        (splits, {"split": "dev"}, "got no split 'dev', expected one of train, test"),
        (table.parent, {"split": "dev"}, "cannot be read"),
        (tmp_path / "empty", {}, "cannot be read"),
        (tmp_path / "nowhere", {}, "not found"),
        ("nofile.jsonl", {}, "not found.*openai/gsm8k; correct it"),
        ("rows.jsonl ", {}, "not found.*; remove the spaces around it"),
        ("rows/*.jsonl", {}, "not found.*; name the directory, whose files are read"),
        ("rows*", {}, "not found.*; name the directory"),
        ("./rows[12]", {}, "not found.*; name the directory"),
        ("openai/gsm8k[test]", {}, "not found.*; set tasks.split to 'test', and leave it out"),
        (file, {"columns": {"task_id": "long"}}, "column long is missing"),
        (jsonl(tmp_path / "ids.jsonl", [{"task_id": "a\n"}]), {"columns": {}}, "printable"),
        (long_id, {"columns": {}}, r"task_id: got 'a{79}… of 600 characters, expected at most 512"),
        *(
            (
                jsonl(tmp_path / f"seed{seed}.jsonl", [{"seed": seed}]),
                {"columns": {}},
                rf"row 1: seed: got {shown}, expected a whole number .*tasks\.columns",
            )
            for seed, shown in ((-1, "-1"), (1.5, r"1\.5"), (None, "null"))
        ),
        (jsonl(tmp_path / "null.jsonl", [{"task_id": None}]), {"columns": {}}, "task_id: got null"),
        (jsonl(tmp_path / "odd.jsonl", [[1]]), {}, "line 1: got a list"),  # type: ignore[list-item]
        (tmp_path / "rows.txt", {}, r"got suffix '\.txt'"),
        (odd, {"columns": {"question": "query"}}, "not JSON"),
        (broken, {}, "cannot be read"),
        (jsonl(tmp_path / "deep.jsonl", [ROWS[0], {"n": deep(800)}]), {"columns": {}},
         "row 2, column n: got a value of more than 100 nested lists and objects, expected fewer"),
        (jsonl(tmp_path / "none.jsonl", []), {}, "cannot be read|no rows"),
    ]  # fmt: skip
    for path, options, word in cases:
        with pytest.raises(BadTaskFile, match=word):
            read(Path(path), **options)


def test_a_configuration_maps_columns_for_any_environment(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{**ROWS[0], "query": f"q{n}"} for n in range(6)])
    tasks = {
        "environment": "code_search",
        "options": {"root": str(tmp_path)},
        "dataset": str(file),
        "evaluation_tasks": 2,
    }
    tree = {"model": {"tiny": {}}, "tasks": {**tasks, "columns": COLUMNS}}
    source = open_tasks(parse_config(tree, source="test"))
    asked = {source.task(index).data["question"] for index in range(4)}
    assert len(asked | {task.data["question"] for task in source.held_out(2)}) == 6
    tree = {**tree, "tasks": {**tasks, "columns": {"question": "quest"}}}
    with pytest.raises(ConfigError, match=r"tasks\.dataset: .* column quest is missing, got gold"):
        open_tasks(parse_config(tree, source="test"))
    tree["tasks"] = {"environment": "guessing", "columns": COLUMNS}
    with pytest.raises(ConfigError, match=r"tasks\.columns is set without tasks\.dataset"):
        parse_config(tree, source="test")


@pytest.mark.parametrize("name", ["split", "evaluation_split", "subset"])
def test_a_split_or_a_subset_of_a_single_file_is_refused(tmp_path: Path, name: str) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    tasks = {"environment": "code_search", "options": {"root": str(tmp_path)}, "columns": COLUMNS}
    tree = {"model": {"tiny": {}}, "tasks": {**tasks, "dataset": str(file), name: "main"}}
    with pytest.raises(ConfigError, match=r"main', and a single file has none; expected a dir"):
        open_tasks(parse_config(tree, source="test"))


def test_an_evaluation_set_of_a_single_file_ignores_the_split_of_the_tasks(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    tasks = {
        "environment": "code_search",
        "options": {"root": str(tmp_path)},
        "dataset": str(saved(tmp_path / "splits", train=ROWS, test=ROWS)),
        "split": "test",
        "columns": COLUMNS,
        "evaluation_tasks": 0,
    }
    tree = {"model": {"tiny": {}}, "tasks": tasks}
    config = parse_config(
        {**tree, "evaluation": {"sets": {"own": {"dataset": str(file)}}}}, source="test"
    )
    [found] = open_sets(config, open_tasks(config))
    assert len(found.tasks) == len(ROWS)


def test_another_split_can_be_used_for_evaluation(tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "gold": [], "repo": "r.zip"} for n in range(6)]
    directory = saved(tmp_path / "splits", train=rows[:4], test=rows[4:])
    tasks = {
        "environment": "code_search",
        "options": {"root": str(tmp_path)},
        "dataset": str(directory),
        "columns": {"question": "query", "files": "gold", "repository": "repo"},
        "evaluation_split": "test",
        "evaluation_tasks": 2,
    }
    source = open_tasks(parse_config({"model": {"tiny": {}}, "tasks": tasks}, source="test"))
    assert {source.task(index).data["question"] for index in range(4)} == {"q0", "q1", "q2", "q3"}
    assert {task.data["question"] for task in source.held_out(2)} == {"q4", "q5"}
    tree = {"model": {"tiny": {}}, "tasks": {**tasks, "evaluation_tasks": 3}}
    with pytest.raises(ConfigError, match="got 3 held-out tasks of a split of 2"):
        open_tasks(parse_config(tree, source="test"))
    without = {key: value for key, value in tasks.items() if key != "evaluation_tasks"}
    tree = {"model": {"tiny": {}}, "tasks": {**without, "evaluation_split": None}}
    words = r"data set .*/splits: got 64 held-out tasks of 4 .* \(default: 64\) .* or to 0"
    with pytest.raises(ConfigError, match=words):
        open_tasks(parse_config(tree, source="test"))


def test_nulls_that_parquet_adds_to_arguments_and_schemas_are_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        properties = {each: {"type": "string"} for each in arguments}
        schema = {"name": name, "parameters": {"type": "object", "properties": properties}}
        return {
            "prompt": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            ],
            "tools": [{"type": "function", "function": schema}],
            "expected": {"arguments": arguments},
        }

    rows = [row("f", {"x": "1"}), row("g", {"y": "2"})]
    for task, given in zip(
        read(parquet(tmp_path / "rows.parquet", rows), columns={}), rows, strict=True
    ):
        call = task.data["prompt"][1]["tool_calls"][0]
        assert call == given["prompt"][1]["tool_calls"][0]
        assert task.data["tools"] == given["tools"]
        # Only a chat is rendered, so nulls of other columns stay.
        assert set(task.data["expected"]["arguments"]) == {"x", "y"}
    assert caplog.text.count("nulls in the arguments of calls") == 1
    caplog.clear()
    null = row("f", {"x": None, "y": 1})
    [task] = read(jsonl(tmp_path / "rows.jsonl", [null]), columns={})
    assert task.data == null
    assert not caplog.text


def test_unread_columns_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    file = jsonl(tmp_path / "rows.jsonl", [{"system": "Be brief.", "messages": chat, "n": 1}])
    check = DataCheck(CHAT_DATA)
    [task] = read(file, columns={"n": None}, check=check, section="sft")
    assert task.data == {"messages": chat}
    assert "not read: system; to leave a column out" in caplog.text
    caplog.clear()
    read(file, columns={"n": None, "system": None}, check=check, section="sft")
    assert not caplog.text


@pytest.mark.parametrize("written", [json.dumps, str])
def test_a_chat_written_as_text_in_a_csv_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: Any
) -> None:
    texts = [written([{"role": "user", "content": word}]) for word in ("hi", "ho")]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([text] for text in texts)])
    assert [task.data["prompt"] for task in read(tmp_path / "rows.csv", columns={})] == texts
    assert caplog.text.count("row 1: prompt is the text of a chat") == 1
    assert "row 2" not in caplog.text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {
                "prompt": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "4"},
                ]
            },
            "row 1: prompt ends with a message of the assistant",
        ),
        ({"prompt": "hi", "images": ["a.png"]}, "row 1: the column images is given to functions"),
        ({"prompt": "hi", "system": "Be brief."}, "set tasks.options.system"),
        ({"prompt": "hi", "chat_template_kwargs": {"a": 1}}, "set rollouts.template_options"),
        ({"prompt": "hi", "tools": [{"name": "f"}]}, "name the tools in tasks.options.tools"),
        ({"prompt": [{"role": "user", "content": "hi"}], "images": [], "tools": None}, ""),
        ({"prompt": [{"role": "user", "content": "hi", "id": 7}]}, "a message has the field id, "),
    ],
)
def test_parts_of_a_prompt_that_the_model_is_not_shown_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], expected: str
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [row, row])
    for environment in ("single_turn", "tools"):
        caplog.clear()
        read_data_set(str(file), environment=environment, columns={}, split="train")
        assert [expected in text for text in caplog.messages] == ([True] if expected else [])
    caplog.clear()
    read_data_set(str(file), environment="own:Environment", columns={}, split="train")
    assert not caplog.messages


def test_held_out_tasks_that_are_also_training_tasks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def held_out_of(rows: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        caplog.clear()
        tasks = {
            "environment": "code_search",
            "options": {"root": str(tmp_path)},
            "columns": {"question": "query", "files": "gold", "repository": "repo"},
            "evaluation_tasks": 3,
            "dataset": str(jsonl(tmp_path / "rows.jsonl", rows)),
            **settings,
        }
        open_tasks(parse_config({"model": {"tiny": {}}, "tasks": tasks}, source="test"))
        return caplog.text

    rows = [{"query": f"q{n}", "gold": [], "repo": "r.zip"} for n in range(6)]
    assert not held_out_of(rows)
    # Each row is there twice: some of the three held-out tasks are also training tasks.
    assert "of the held-out tasks have the same data as training tasks" in held_out_of(rows * 2)
    splits = str(saved(tmp_path / "splits", train=rows, test=rows[:3]))
    found = held_out_of(rows, dataset=splits, evaluation_split="test")
    assert "3 of the held-out tasks have the same data" in found


def test_dates_and_decimals_are_converted_and_bytes_are_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table(
        {
            "prompt": ["Where?"],
            "day": [date(2026, 11, 27)],
            "price": [Decimal("1.50")],
            "image": [b"\x00"],
            "pages": [[{"number": 1, "scan": b"\x00"}]],
            "took": [timedelta(seconds=90)],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    [task] = read(tmp_path / "rows.parquet", columns={})
    assert task.data == {"prompt": "Where?", "day": "2026-11-27", "price": 1.5, "took": 90.0}
    assert "column pages is left out" in caplog.text
    assert "column image is left out" in caplog.text
