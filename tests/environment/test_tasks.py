"""Tests of task sources and task files: order, held-out tasks, and the check of each row."""

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environment.builtin.reasoning_gym_env import generate_tasks
from actors.environment.tasks import (
    BadTaskFile,
    FileTasks,
    GeneratedTasks,
    PackedTasks,
    read_tasks,
    write_tasks,
)
from actors.types import Task


def _tasks(count: int) -> list[Task]:
    return [Task(task_id=f"t{i}", environment="guessing", seed=i) for i in range(count)]


def _row(**changes: object) -> str:
    return json.dumps({"task_id": "a", "environment": "guessing", "seed": 1} | changes)


@settings(deadline=None)
@given(run_seed=st.integers(0, 2**40), index=st.integers(0, 10**9))
def test_a_generated_task_depends_only_on_run_seed_and_index(run_seed: int, index: int) -> None:
    first = GeneratedTasks("guessing", run_seed=run_seed).task(index)
    assert GeneratedTasks("guessing", run_seed=run_seed).task(index) == first
    assert 0 <= first.seed < 2**30


def test_held_out_seeds_are_never_training_seeds_and_are_the_same_for_every_run() -> None:
    held_out = GeneratedTasks("guessing", run_seed=1).held_out(500)
    assert held_out == GeneratedTasks("guessing", run_seed=2).held_out(500)
    assert held_out[:10] == GeneratedTasks("guessing", run_seed=2).held_out(10)
    assert all(2**30 <= task.seed < 2**31 for task in held_out)
    train = [GeneratedTasks("guessing", run_seed=1).task(i) for i in range(500)]
    assert not {task.task_id for task in train} & {task.task_id for task in held_out}


def test_two_runs_draw_different_tasks() -> None:
    first = [GeneratedTasks("guessing", run_seed=1).task(i).seed for i in range(100)]
    second = [GeneratedTasks("guessing", run_seed=2).task(i).seed for i in range(100)]
    assert len({*first, *second}) == 200


@settings(deadline=None)
@given(count=st.integers(2, 30), num_held_out=st.integers(0, 5), run_seed=st.integers(0, 9))
def test_each_epoch_plays_every_training_task_once(
    count: int, num_held_out: int, run_seed: int
) -> None:
    num_held_out = min(num_held_out, count - 1)
    source = FileTasks(_tasks(count), run_seed=run_seed, num_held_out=num_held_out)
    size = count - num_held_out
    held_out = {task.task_id for task in source.held_out(num_held_out)}
    for epoch in range(3):
        ids = [source.task(epoch * size + i).task_id for i in range(size)]
        assert len(set(ids)) == size
        assert set(ids) | held_out == {f"t{i}" for i in range(count)}


def test_epochs_differ_in_order_and_indices_can_be_read_in_any_order() -> None:
    source = FileTasks(_tasks(20), run_seed=3)
    order = [source.task(i).task_id for i in range(60)]
    assert order[:20] != order[20:40]
    fresh = FileTasks(_tasks(20), run_seed=3)
    assert [fresh.task(i).task_id for i in reversed(range(60))] == order[::-1]
    other = FileTasks(_tasks(20), run_seed=4)
    assert [other.task(i).task_id for i in range(20)] != order[:20]


def test_first_choices_and_replacements_in_turn_shuffle_each_epoch_once() -> None:
    source = FileTasks(_tasks(50), run_seed=3)
    for number in range(40, 60):
        for replacement in range(4):
            source.task(number + replacement * 2**32)
    # Each of the four series of indices is in two epochs at most.
    assert source._order.cache_info().misses <= 8


def test_the_held_out_tasks_depend_neither_on_the_run_nor_on_the_order_of_the_file() -> None:
    first = FileTasks(_tasks(20), run_seed=1, num_held_out=5).held_out(5)
    assert FileTasks(_tasks(20)[::-1], run_seed=2, num_held_out=5).held_out(5) == first


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one task left"):
        FileTasks(_tasks(5), run_seed=0, num_held_out=5)
    with pytest.raises(ValueError, match="at most 1"):
        FileTasks(_tasks(5), run_seed=0, num_held_out=1).held_out(2)
    with pytest.raises(ValueError, match="expected 0 or more"):
        GeneratedTasks("guessing", run_seed=0).task(-1)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(deadline=None, max_examples=30)
@given(
    data=st.lists(st.dictionaries(st.text(max_size=6), _JSON, max_size=3), min_size=1, max_size=5)
)
def test_written_tasks_are_read_back(
    suffix: str, data: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tasks = [
        Task(task_id=f"\u00e9 {i}", environment="e", seed=2**63 - 1 - i, data=entry)
        for i, entry in enumerate(data)
    ]
    path = tmp_path_factory.mktemp("tasks") / f"tasks{suffix}"
    write_tasks(path, tasks)
    assert read_tasks(path) == tasks
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no tasks"),
        ("\n\n", "no tasks"),
        ("{", "line 1: not JSON"),
        (_row() + "\n{oops}", "line 2: not JSON"),
        (_row() + "\n" + _row(), "line 2: task_id 'a' is already in .*line 1"),
        ("[1]", "got a list"),
        (_row(seed=True), "seed: got a bool"),
        (_row(seed="1"), "seed: got a str"),
        (_row(seed=-1), "expected 0 to 2"),
        (_row(seed=2**63), "expected 0 to 2"),
        (_row(seed=1.0), "seed: got a float"),
        (_row(task_id=""), "task_id: got a str, expected a text that is not empty"),
        (_row(task_id=7), "task_id: got an int"),
        (_row(environment=None), "environment: got null"),
        (_row(data=[1]), "data: got a list"),
        (_row(data=None), "data: got null"),
        (_row(dta={}), "line 1: the field dta is unknown; expected task_id, environment, seed"),
        ('{"task_id": "a"}', "environment is missing, the field seed is missing; expected task_id"),
        ("[]", "row: got a list, expected an object with task_id, environment, seed, data"),
        (_row()[:-1] + ', "data": {"x": NaN}}', "NaN is not JSON"),
        (_row()[:-1] + ', "data": {"x": 1e999}}', "line 1: got a value that is not JSON"),
        (_row()[:-1] + ', "data": {"x": "\\ud800"}}', "line 1: got a value that is not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(BadTaskFile, match=message):
        read_tasks(path)


def test_files_whose_content_does_not_fit_their_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("no parquet")
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "t.parquet", tmp_path / "t.jsonl", tmp_path / "gone.jsonl"):
        with pytest.raises(BadTaskFile, match="cannot be read"):
            read_tasks(path)
    with pytest.raises(BadTaskFile, match=r"expected \.jsonl or \.parquet"):
        read_tasks(tmp_path / "t.csv")


@pytest.mark.parametrize("value", [float("nan"), b"1"])
def test_a_value_of_parquet_that_is_not_json_is_refused(tmp_path: Path, value: Any) -> None:
    row = {"task_id": "a", "environment": "guessing", "seed": 1, "data": {"x": value}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    with pytest.raises(BadTaskFile, match="row 1: got a value that is not JSON"):
        read_tasks(tmp_path / "tasks.parquet")


def test_a_byte_order_mark_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + _row().encode() + b"\r\n\r\n")
    assert [task.task_id for task in read_tasks(path)] == ["a"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, _tasks(3))
    bad = Task(task_id="x", environment="e", seed=0, data={"x": {1, 2}})
    with pytest.raises(TypeError):
        write_tasks(path, [*_tasks(1), bad])
    assert read_tasks(path) == _tasks(3)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(BadTaskFile, match="duplicate"):
        write_tasks(path, _tasks(1) * 2)


def test_writing_replaces_the_target_of_a_link_and_only_regular_files(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.jsonl", tmp_path / "pipe.jsonl"
    link.symlink_to("target")
    write_tasks(link, _tasks(2))
    assert link.is_symlink() and read_tasks(link) == _tasks(2)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_tasks(pipe, _tasks(1))
    assert pipe.is_fifo()


def test_generated_reasoning_gym_tasks_are_reproducible_and_can_be_stored(
    tmp_path: Path,
) -> None:
    tasks = generate_tasks("chain_sum", 20, seed=7, options={"max_terms": 2})
    assert tasks == generate_tasks("chain_sum", 20, seed=7, options={"max_terms": 2})
    assert len(Counter(task.data["question"] for task in tasks)) > 15
    write_tasks(tmp_path / "t.parquet", tasks)
    assert read_tasks(tmp_path / "t.parquet") == tasks


def test_wrong_families_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown family, got 'chain_sm'"):
        generate_tasks("chain_sm", 1, seed=0)
    with pytest.raises(ValueError, match="bad config for family chain_sum"):
        generate_tasks("chain_sum", 1, seed=0, options={"max_trms": 2})
    with pytest.raises(ValueError, match="bad config for family chain_sum"):
        generate_tasks("chain_sum", 1, seed=0, options={"min_terms": 0})
    with pytest.raises(ValueError, match="expected 1 or more"):
        generate_tasks("chain_sum", 0, seed=0)


def test_packed_tasks_equal_the_tasks_and_are_made_at_each_read() -> None:
    deep = Task(
        task_id="ü\ud800", environment="b", seed=2**63 - 1, data={"a": [1, None, {"x": 0.1}]}
    )
    tasks = [*_tasks(3), deep, Task(task_id="empty", environment="c", seed=0)]
    packed = PackedTasks(tasks)

    assert packed == tasks
    assert packed != tasks[:-1]
    assert list(packed[1:4]) == tasks[1:4]
    assert packed[-1] == tasks[-1]
    chosen = packed.selected([3, 0])[1:].selected([0])
    assert list(chosen) == [tasks[0]]
    assert [packed.selected([4, 3]).task_id(n) for n in (0, 1)] == ["empty", "ü\ud800"]
    # Each read makes a new task, so that no rollout changes the task of another one.
    assert packed[0].data is not packed[0].data


def test_a_large_list_of_packed_tasks_has_few_objects() -> None:
    gc.collect()
    before = sys.getallocatedblocks()
    packed = PackedTasks(
        Task(task_id=f"t-{number}", environment="a", seed=number, data={"prompt": [{"n": number}]})
        for number in range(5000)
    )
    gc.collect()
    assert sys.getallocatedblocks() - before < len(packed) / 10
