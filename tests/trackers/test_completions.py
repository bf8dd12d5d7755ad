"""Tests of the table of completions and of trackers of a user."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.record_builders import step_record
from worlds.checks.tracker_files import json_lines
from worlds.parts.tracker_world import RUN_ID, begin, config_with, store_in

from service.config.file import ConfigError
from service.config.preflight import check_trackers

OWN = """
import abc
import functools
import json
from pathlib import Path


class Lines:
    def __init__(self, *, run_id, name, config, directory, suffix=".txt"):
        self.file = Path(directory) / ("own" + suffix)
        self.head = {"run_id": run_id, "name": name, "seed": config["run"]["seed"]}

    def write(self, point):
        rows = [[each.rollout_id, each.completion] for each in point.completions]
        line = {**self.head, "step": point.step, "loss": point.curves["train/loss"], "rows": rows}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def flush(self):
        pass

    def close(self, *, is_ended):
        with self.file.open("a") as file:
            file.write(json.dumps({**self.head, "is_ended": is_ended}) + "\\n")


class Broken(Lines):
    def write(self, point):
        raise SystemExit("no room")


class Unbound:
    # Its methods need no tracker.

    lines = []

    def __init__(self, **given):
        Unbound.lines.clear()

    @classmethod
    def write(cls, point):
        cls.lines.append(point.step)

    @staticmethod
    def flush():
        Unbound.lines.append("flush")

    @staticmethod
    def close(*, is_ended):
        Unbound.lines.append(is_ended)


class StaticWithSelf(Unbound):
    @staticmethod
    def write(self, point): ...


class ClassWithoutPoint(Unbound):
    @classmethod
    def write(cls): ...


class Positional:
    def __init__(self, run_id, /): ...

    def write(self, point): ...

    def flush(self): ...

    def close(self, *, is_ended): ...


class NoFlush(Lines):
    flush = None


class OldClose(Lines):
    def close(self): ...


class Async(Lines):
    async def write(self, point): ...


class Generator(Lines):
    def write(self, point):
        yield point


def hiding(function):
    @functools.wraps(function)
    def wrapper(*given, **named):
        return function(*given, **named)

    return wrapper


class Hidden(Lines):
    @hiding
    async def write(self, point): ...


class HiddenGenerator(Lines):
    @hiding
    def write(self, point):
        yield point


class Partial(Unbound):
    @classmethod
    def _write(cls, lines, point):
        lines.append(point.step)

    write = functools.partialmethod(_write, Unbound.lines)


class Abstract(Lines, abc.ABC):
    @abc.abstractmethod
    def more(self): ...


class Dynamic(type):
    def __getattr__(cls, name):
        return function


class OnlyOfTheClass(metaclass=Dynamic):
    def __init__(self, **given): ...


class Closed(type):
    def __getattribute__(cls, name):
        if name == "__mro__":
            raise RuntimeError("it is closed")
        return super().__getattribute__(name)


class WithMetaclass(Unbound, metaclass=Closed): ...


class Dispatching(Unbound):
    @functools.singledispatchmethod
    def write(self, point):
        Unbound.lines.append(point.step)


class Unreadable(Lines):
    @property
    def write(self):
        return self.absent


def function(): ...


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_trackers"


async def tracked(directory: Path, trackers: dict[str, Any], *, steps: int) -> Any:
    """Store steps of a run whose journal has two groups for step 1 and one for step 2."""
    written(
        directory,
        step_of([group_of(0, [1.0, 0.0]), group_of(1, [0.0, 0.0])], number=1),
        step_of([group_of(2, [0.0, 1.0])], number=2),
    )
    with store_in(directory) as store:
        recorder, _ = await begin(store, config_with(trackers), directory)
        for step in range(1, steps + 1):
            await recorder.step(step_record(step))
        await recorder.close_trackers(is_taken_over=False)
        return recorder


@pytest.mark.proof
@pytest.mark.slow
async def test_the_completions_of_a_step_are_tracked_with_its_numbers(tmp_path: Path) -> None:
    settings = {"jsonl": True, "completions": 3, "wandb": {"project": "games", "mode": "offline"}}
    await tracked(tmp_path, settings, steps=3)
    first, second, third = json_lines(tmp_path / "metrics.jsonl")
    rows = first["completions"]
    # The first three of four rows are tracked, ordered by group.
    assert [row["rollout"] for row in rows] == ["g000000.0-0", "g000000.0-1", "g000001.0-0"]
    assert [row["return"] for row in rows] == [1.0, 0.0, 0.0]
    # The advantages of the returns 1 and 0 are half of the difference, divided by the deviation.
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert [row["advantage"] for row in rows] == [
        pytest.approx(half),
        pytest.approx(-half),
        None,
    ]
    assert [row["untrained"] for row in rows] == ["", "", "zero_variance"]
    members = group_of(0, [1.0, 0.0])
    sample = members[0].samples[0]
    prompt, answer = np.split(sample.token_ids, [sample.prompt_length])
    # Without the tokenizer of the run, the rows contain token ids.
    assert rows[0]["prompt"] == "".join(f"⟨{token}⟩" for token in prompt)
    assert rows[0]["completion"] == "".join(f"⟨{token}⟩" for token in answer)
    assert rows[0]["outcome"] == "completed" and isinstance(rows[0]["rewards"], dict)
    assert len(second["completions"]) == 2 and "completions" not in third
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/step/completions*.json"))
    shown = [json.loads(table.read_text()) for table in tables]
    assert sorted(len(table["data"]) for table in shown) == [2, 3]
    columns = shown[0]["columns"]
    assert columns[:2] == ["step", "task"] and columns[-2:] == ["advantage", "untrained"]


async def test_a_damaged_journal_file_only_loses_its_completions(
    tmp_path: Path,
) -> None:
    settings = {"jsonl": True, "completions": 3}
    for name in ("step-000001-term-0001.journal", "step-000003-term-0001.journal"):
        (tmp_path / "journal").mkdir(exist_ok=True)
        (tmp_path / "journal" / name).write_bytes(b"rayloom journal 2\n cut")
    with store_in(tmp_path) as store:
        recorder, _ = await begin(store, config_with(settings), tmp_path)
        await recorder.step(step_record(1))
        await recorder.close_trackers(is_taken_over=False)
    (line,) = json_lines(tmp_path / "metrics.jsonl")
    assert line["step"] == 1 and "completions" not in line


async def test_a_users_tracker_gets_every_point(tmp_path: Path, own: str) -> None:
    use = {"use": f"{own}:Lines", "options": {"suffix": ".jsonl"}}
    await tracked(tmp_path, {"own": use, "completions": 1}, steps=2)
    lines = json_lines(tmp_path / "own.jsonl")
    assert [line.get("step") for line in lines] == [1, 2, None]
    assert lines[0]["run_id"] == RUN_ID and lines[0]["name"] == "small"
    assert lines[0]["loss"] == 0.01 and lines[0]["rows"][0][0] == "g000000.0-0"
    assert lines[-1]["is_ended"] is True


@pytest.mark.parametrize("name", ["Unbound", "Partial", "WithMetaclass", "Dispatching"])
async def test_a_users_tracker_may_have_static_and_class_methods(
    tmp_path: Path, own: str, name: str
) -> None:
    settings = {"own": {"use": f"{own}:{name}"}}
    check_trackers(config_with(settings))
    await tracked(tmp_path, settings, steps=2)
    lines = importlib.import_module(own).Unbound.lines
    assert [line for line in lines if line != "flush"] == [1, 2, True]


async def test_a_users_tracker_that_raises_or_exits_delays_nothing(
    tmp_path: Path, own: str
) -> None:
    recorder = await tracked(tmp_path, {"own": {"use": f"{own}:Broken"}, "jsonl": True}, steps=3)
    assert recorder.last_step == 3
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "trackers" / "own.json").exists()


@pytest.mark.parametrize(
    ("name", "found"), [("Hidden", "a coroutine"), ("HiddenGenerator", "a generator")]
)
async def test_a_tracker_method_that_returns_a_coroutine_is_reported_as_failed(
    tmp_path: Path, own: str, name: str, found: str
) -> None:
    recorder = await tracked(tmp_path, {"own": {"use": f"{own}:{name}"}}, steps=1)
    [notice] = recorder.notices.since(0)
    assert f"TypeError: write returned {found}, so that its body has not run" in notice


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        ("absent_module:Lines", {}, "No module named 'absent_module'"),
        ("my_trackers:Absent", {}, "no attribute 'Absent'"),
        ("my_trackers", {}, "^trackers.own.use: got 'my_trackers', expected FILE.py:NAME"),
        ("my_trackers:function", {}, "is a function, expected a class"),
        ("my_trackers:number", {}, "is an int, expected a class"),
        ("my_trackers:Abstract", {}, "is abstract, expected a class that defines more"),
        ("my_trackers:OnlyOfTheClass", {}, "no method write"),
        ("my_trackers:Unreadable", {}, "write of .* cannot be read .*no attribute 'absent'"),
        ("my_trackers:NoFlush", {}, "no method flush.*add it"),
        ("my_trackers:OldClose", {}, r"close of .* called with \(is_ended=…\)"),
        ("my_trackers:Async", {}, "write is async, expected a plain method"),
        ("my_trackers:Generator", {}, "write is a generator, whose body would never run"),
        ("my_trackers:StaticWithSelf", {}, r"write of .* called with \(point\)"),
        ("my_trackers:ClassWithoutPoint", {}, r"write of .* called with \(point\)"),
        ("my_trackers:Positional", {}, "the constructor of .* takes"),
        ("my_trackers:Lines", {"suffux": 1}, "suffux"),
        ("my_trackers:Lines", {"name": "a"}, "trackers.own.options: got name"),
    ],
)
def test_a_class_that_is_not_a_tracker_is_refused_before_the_start(
    own: str, use: str, options: dict[str, Any], words: str
) -> None:
    check_trackers(config_with({"own": {"use": f"{own}:Lines"}}))
    with pytest.raises(ConfigError, match=words):
        check_trackers(config_with({"own": {"use": use, "options": options}}))


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        ({"completions": 4}, "no tracker shows them"),
        ({"completions": 257, "jsonl": True}, "trackers.completions"),
        ({"own": {"options": {}}}, "trackers.own.use"),
    ],
)
def test_a_table_that_no_tracker_shows_is_refused(trackers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_with(trackers)
