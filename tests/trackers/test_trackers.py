"""Tests of the curves of a run in JSONL, TensorBoard, W&B files and an MLflow server."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.queue_builders import make_settings
from worlds.builders.record_builders import evaluation_record, step_record
from worlds.checks.tracker_files import (
    json_lines,
    surviving_lines,
    tensorboard_curves,
    tensorboard_texts,
    wandb_files,
    wandb_history,
)
from worlds.parts.tracker_world import ALL, RUN_ID, begin, config_with, store_in
from worlds.runs.run_driver import ROOT
from worlds.servers.mlflow_server import mlflow_server

from actors.metrics import Metrics
from actors.trajectory_queue.state import QueueState
from actors.types import Outcome, SampledText
from service.config.file import ConfigError, dump_config
from service.launch.run_dir import RunDir
from service.run.recorder import RunRecorder
from service.store.read_only import ReadOnlyStore
from service.telemetry.curves import evaluation_curves, step_curves
from service.telemetry.records import EvaluationSample, StepRecord
from service.trackers.tracker import JsonLines, Point
from service.trackers.trackers import Target, Trackers, trackers_of
from service.worker_thread import WorkerThread

SAMPLE = EvaluationSample(
    task_id="t0",
    outcome=Outcome.COMPLETED,
    episode_return=0.5,
    text=SampledText(prompt="what is\n1 + 1?", answer="2 — two"),
)


async def checkpoint(recorder: RunRecorder, step: int) -> None:
    snapshot = QueueState(make_settings()).snapshot()
    await recorder.checkpoint(step=step, version=step, directory=f"step-{step}", snapshot=snapshot)


async def until(is_so: Callable[[], object]) -> None:
    """Wait until a condition is true; the time limit of the test ends the wait."""
    while not is_so():
        await asyncio.sleep(0.02)


def as_float32(value: float) -> Any:
    """Return a value with the tolerance of float32, which TensorBoard stores."""
    return pytest.approx(value, rel=1e-6)


def curves_of(record: StepRecord) -> dict[str, float]:
    return {**step_curves(record), "term": 1.0}


async def test_all_trackers_get_the_numbers_of_the_records(tmp_path: Path) -> None:
    records = [
        step_record(step, reward_components={"form": step / 8, "correct answer": 0.25})
        for step in (1, 2, 3)
    ]
    evaluation = replace(evaluation_record(2), samples=(SAMPLE,), wall_time=1.8e9)
    with mlflow_server() as server, store_in(tmp_path) as store:
        recorder, _ = await begin(store, config_with(ALL, mlflow=server.url), tmp_path)
        for record in records:
            await recorder.step(record)
        await recorder.evaluation(evaluation)
        await recorder.close_trackers(is_taken_over=False)
    expected = {record.step: curves_of(record) for record in records}
    evaluated = evaluation_curves(evaluation, prefix="evaluation")
    assert expected[2]["rewards/form"] == 0.25 and "rewards/correct_answer" in expected[2]
    assert expected[1]["outcomes/max_turns"] == 2 / 16 and expected[1]["train/loss"] == 0.01

    place = {"kind", "term", "first_step", "step", "time", "samples"}
    lines = json_lines(tmp_path / "metrics.jsonl")
    found = {
        line["step"]: {key: line[key] for key in line.keys() - place} | {"term": line["term"]}
        for line in lines
        if line["kind"] == "step"
    }
    assert found == expected
    [line] = [line for line in lines if line["kind"] == "evaluation"]
    assert {key: line[key] for key in line.keys() - place} == evaluated
    assert line["samples"][0]["answer"] == "2 — two" and line["samples"][0]["return"] == 0.5

    rows = wandb_history(tmp_path)
    by_step = {row["step"]: row for row in rows if "train/loss" in row}
    for step, curves in expected.items():
        assert {name: by_step[step][name] for name in curves} == curves
    [row] = [row for row in rows if "evaluation/reward_mean" in row]
    assert {name: row[name] for name in evaluated} == evaluated
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/evaluation/samples*.json")
    assert "what is\\n1 + 1?" in table.read_text()

    for run in server.runs.values():
        assert run["status"] == "FINISHED" and run["tags"] == {"rayloom.run_id": RUN_ID}
    shown = tensorboard_curves(tmp_path / "tensorboard")
    for name in expected[1].keys() - {"term"}:
        values = {step: curves[name] for step, curves in expected.items()}
        assert server.curve(name) == {step: [value] for step, value in values.items()}
        assert shown[name] == [(step, as_float32(value)) for step, value in values.items()]
    for name, value in evaluated.items():
        assert server.curve(name) == {2: [value]} and shown[name] == [(2, as_float32(value))]
    [(step, text)] = tensorboard_texts(tmp_path / "tensorboard")["evaluation/sample_0/text_summary"]
    assert step == 2 and "    1 + 1?" in text and "2 — two" in text


@pytest.mark.proof
@pytest.mark.slow
async def test_a_repeated_step_replaces_the_first_in_the_same_tracker_runs(
    tmp_path: Path,
) -> None:
    """Let term 1 train 4 steps and die after the checkpoint of step 2; term 2 trains 3 and 4."""
    with mlflow_server() as server, store_in(tmp_path) as store:
        config = config_with(ALL, mlflow=server.url)
        for term, steps, reward in ((1, (1, 2, 3, 4), 0.25), (2, (3, 4), 0.75)):
            recorder, _ = await begin(store, config, tmp_path)
            for step in steps:
                await recorder.evaluation(evaluation_record(step, reward=reward))
                record = step_record(step, reward_mean=reward, wall_time=1.8e9 + 100 * term + step)
                await recorder.step(record)
                if step == 2:
                    await checkpoint(recorder, step)
            await recorder.close_trackers(is_taken_over=False)
    survives = {1: 0.25, 2: 0.25, 3: 0.75, 4: 0.75}
    shown = tensorboard_curves(tmp_path / "tensorboard")
    assert shown["train/reward_mean"] == list(survives.items())
    assert shown["evaluation/reward_mean"] == list(survives.items())
    lines = surviving_lines(json_lines(tmp_path / "metrics.jsonl"))
    for kind, name in (("step", "train/reward_mean"), ("evaluation", "evaluation/reward_mean")):
        assert {each["step"]: each[name] for each in lines if each["kind"] == kind} == survives
    assert len(lines) == 8
    assert list(server.runs) == ["run-0"]
    assert {step: values[-1] for step, values in server.curve("train/reward_mean").items()} == (
        survives
    )
    assert set(server.curve("term")[3]) == {1.0, 2.0}
    assert {file.name for file in wandb_files(tmp_path)} == {f"run-{RUN_ID}.wandb"}
    rewards = {
        (row["term"], row["step"]): row["train/reward_mean"]
        for row in wandb_history(tmp_path)
        if "train/reward_mean" in row
    }
    first = {(1, step): 0.25 for step in (1, 2, 3, 4)}
    assert rewards == {**first, (2, 3): 0.75, (2, 4): 0.75}


async def test_stored_points_that_a_dead_process_did_not_write_are_written_later(
    tmp_path: Path,
) -> None:
    """Check also that no written point of a step or an evaluation is lost."""
    config = config_with({"jsonl": True, "tensorboard": ""})
    with store_in(tmp_path) as store:
        recorder, _ = await begin(store, config, tmp_path)
        for step in (1, 2):
            await recorder.evaluation(evaluation_record(step))
            await recorder.step(step_record(step))
        await recorder.evaluation(evaluation_record(3))
        await recorder.close_trackers(is_taken_over=False)
        # The trackers have ended, so this step is stored but not written.
        await recorder.step(step_record(3))
        await checkpoint(recorder, 3)
        recorder, _ = await begin(store, config, tmp_path)
        await recorder.step(step_record(4))
        await recorder.close_trackers(is_taken_over=False)
    shown = tensorboard_curves(tmp_path / "tensorboard")
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in shown["evaluation/reward_mean"]] == [1, 2, 3]
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]


async def test_missing_points_of_a_finished_run_are_written_on_demand(tmp_path: Path) -> None:
    """Write them from a read-only database, and open no tracker if nothing is missing."""
    reported: list[str] = []
    with mlflow_server() as server:
        with store_in(tmp_path) as store:
            server.is_away = True
            config = config_with({}, mlflow=server.url)
            recorder, _ = await begin(store, config, tmp_path)
            for step in (1, 2):
                await recorder.step(step_record(step))
            await recorder.close_trackers(is_taken_over=False)
        run_dir = RunDir(path=tmp_path)
        for is_away in (True, False, True):
            server.is_away = is_away
            store = ReadOnlyStore(tmp_path / "run.db")
            trackers = trackers_of(config, run_dir, run_id=RUN_ID, store=store)
            assert trackers is not None
            trackers.catch_up(reported.append)
            store.close()
    assert set(server.curve("train/loss")) == {1, 2}
    assert server.runs["run-0"]["status"] == "FINISHED"
    assert (
        len(reported) == 1
        and "status 503, expected" in reported[0]
        and reported[0].endswith("--resume writes it")
    )


async def test_another_experiment_of_a_run_gets_its_history(tmp_path: Path) -> None:
    with mlflow_server() as server, store_in(tmp_path) as store:
        for step, experiment in ((1, "games"), (2, "sums")):
            target = {"url": server.url, "experiment": experiment}
            recorder, _ = await begin(store, config_with({"mlflow": target}), tmp_path)
            await recorder.step(step_record(step))
            await checkpoint(recorder, step)
            await recorder.close_trackers(is_taken_over=False)
    assert set(server.curve("train/loss", run="run-0")) == {1}
    assert set(server.curve("train/loss", run="run-1")) == {1, 2}


async def test_a_tracker_added_later_gets_the_history(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        recorder, none = await begin(store, config_with({}), tmp_path)
        assert none is None
        for step in (1, 2, 3):
            await recorder.step(step_record(step))
        await checkpoint(recorder, 2)
        recorder, _ = await begin(store, config_with({"jsonl": True}), tmp_path)
        await recorder.step(step_record(3, reward_mean=0.75))
        await recorder.close_trackers(is_taken_over=False)
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert [(line["term"], line["step"]) for line in lines] == [(1, 1), (1, 2), (2, 3)]
    assert lines[2]["train/reward_mean"] == 0.75


async def test_requested_evaluations_have_separate_curves(tmp_path: Path) -> None:
    """Request two evaluations of step 1 that end after step 2."""
    asked = replace(evaluation_record(1), is_scheduled=False, pass_at={1: 0.25, 4: 0.5})
    with store_in(tmp_path) as store:
        recorder, _ = await begin(store, config_with({"jsonl": True}), tmp_path)
        for step in (1, 2):
            await recorder.step(step_record(step))
        await recorder.evaluation(evaluation_record(2))
        await until(lambda: len(json_lines(tmp_path / "metrics.jsonl")) == 3)
        await recorder.evaluation(asked)
        await recorder.evaluation(asked)
        await recorder.close_trackers(is_taken_over=False)
    lines = json_lines(tmp_path / "metrics.jsonl")
    # The evaluation precedes its step if both are read at once, so compare only evaluations.
    evaluations = [line for line in lines if line["kind"] != "step"]
    assert [(line["kind"], line["step"]) for line in evaluations] == [
        ("evaluation", 2),
        ("asked_evaluation", 1),
        ("asked_evaluation", 1),
    ]
    assert evaluations[1]["asked_evaluation/pass_at_4"] == 0.5


@pytest.mark.proof
@pytest.mark.slow
async def test_an_unavailable_server_is_reported_once_and_loses_nothing(tmp_path: Path) -> None:
    """Make the server unavailable at the start and later; another tracker continues."""
    with mlflow_server() as server, store_in(tmp_path) as store:
        server.is_away = True
        config = config_with({"jsonl": True}, mlflow=server.url)
        recorder, _ = await begin(store, config, tmp_path)
        await recorder.step(step_record(1))
        await until(lambda: recorder.notices.length)
        await until(lambda: len(json_lines(tmp_path / "metrics.jsonl")) == 1)
        server.is_away = False
        await until(lambda: server.metrics.get("run-0"))
        server.is_away, refused = True, server.num_refused
        await recorder.step(step_record(2))
        await until(lambda: server.num_refused > refused)
        await recorder.step(step_record(3))
        server.is_away = False
        await until(lambda: set(server.curve("train/loss")) == {1, 2, 3})
        await recorder.close_trackers(is_taken_over=False)
    [notice] = recorder.notices.since(0)
    assert notice.startswith("trackers.mlflow is not written: MlflowRefused: GET experiments/")
    assert all(len(values) == 1 for values in server.curve("train/loss").values())


async def test_a_server_that_stays_unavailable_delays_neither_steps_nor_the_end(
    tmp_path: Path,
) -> None:
    """Check also that the next process writes the missing points."""
    with mlflow_server() as server, store_in(tmp_path) as store:
        server.is_away = True
        config = config_with({}, mlflow=server.url)
        recorder, _ = await begin(store, config, tmp_path)
        for step in (1, 2, 3):
            await recorder.step(step_record(step))
        await checkpoint(recorder, 3)
        await recorder.close_trackers(is_taken_over=False)
        assert recorder.last_step == 3 and not server.runs
        server.is_away = False
        recorder, _ = await begin(store, config, tmp_path)
        await recorder.step(step_record(4))
        await recorder.close_trackers(is_taken_over=False)
    assert set(server.curve("train/loss")) == {1, 2, 3, 4}


class Stuck:
    """A tracker whose write never returns before `release` is set."""

    def __init__(self) -> None:
        self.release, self.is_writing = threading.Event(), threading.Event()

    def write(self, point: Point) -> None:
        self.is_writing.set()
        self.release.wait()

    def flush(self) -> None: ...

    def close(self, *, is_ended: bool) -> None: ...


async def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(tmp_path: Path) -> None:
    stuck = Stuck()
    with store_in(tmp_path) as store:
        target = Target(name="stuck", address="", make=lambda: stuck)
        trackers = Trackers([target], store=store, directory=tmp_path / "trackers")
        recorder = RunRecorder(
            store, Metrics(), thread=WorkerThread("store"), num_steps=10, trackers=trackers
        )
        await recorder.begin_term(store.acquire_lease(owner="test"))
        await recorder.step(step_record(1))
        await until(stuck.is_writing.is_set)
        await recorder.step(step_record(2))
        assert recorder.last_step == 2
        trackers.close(limit_s=0.1)
        stuck.release.set()
        trackers.close()
    assert (tmp_path / "trackers" / "stuck.json").exists()


async def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        recorder, _ = await begin(store, config_with({"jsonl": True}), tmp_path)
        await recorder.step(step_record(1))
        await until(lambda: json_lines(tmp_path / "metrics.jsonl"))
        await recorder.close_trackers(is_taken_over=True)
        await recorder.step(step_record(2))
        await recorder.close_trackers(is_taken_over=True)
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from worlds.parts.tracker_world import ALL, begin, config_with, store_in
from worlds.builders.record_builders import step_record

async def main(directory):
    with store_in(directory) as store:
        recorder, _ = await begin(store, config_with(ALL), directory)
        for step in (1, 2, 3):
            await recorder.step(step_record(step))
        while True:
            print(*sorted(file.name for file in directory.glob("trackers/*.json")), flush=True)
            await asyncio.sleep(0.1)

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_damaged_progress_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "jsonl.json").write_text("[]")
    with store_in(tmp_path) as store:
        recorder, _ = await begin(store, config_with({"jsonl": True}), tmp_path)
        await recorder.step(step_record(1))
        await until(lambda: recorder.notices.length)
        await recorder.close_trackers(is_taken_over=False)
    [notice] = recorder.notices.since(0)
    assert "trackers/jsonl.json cannot be read" in notice and "remove it to write" in notice


@pytest.mark.proof
@pytest.mark.slow
async def test_points_that_count_as_written_survive_a_kill(tmp_path: Path) -> None:
    """Kill a process after each tracker has stored its progress."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert program.stdout is not None
        for line in program.stdout:
            if len(line.split()) == 3 and all(
                '"step": [1, 3, 0]' in file.read_text() for file in tmp_path.glob("trackers/*.json")
            ):
                break
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
        if program.stdout is not None:
            program.stdout.close()
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    shown = tensorboard_curves(tmp_path / "tensorboard")
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3]
    assert [row["step"] for row in wandb_history(tmp_path)] == [1, 2, 3]


def point(step: int) -> Point:
    record = step_record(step)
    return Point(
        kind="step",  # type: ignore[arg-type]
        term=1,
        first_step=0,
        is_first_of_term=step == 1,
        step=step,
        wall_time=record.wall_time,
        curves=step_curves(record),
    )


def test_a_line_is_complete_or_absent_if_the_disk_is_full(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file)
    lines.write(point(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the file size refuses the rest of a write, like a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="100 of"):
            lines.write(point(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.write(point(3))
    lines.close(is_ended=True)
    assert [line["step"] for line in json_lines(file)] == [1, 3]


def test_a_line_that_a_dead_process_cut_off_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = JsonLines(file)
    first.write(point(1))
    first.close(is_ended=True)
    with file.open("ab") as cut_off:
        cut_off.write(b'{"kind": "step", "ste')
    again = JsonLines(file)
    again.write(point(2))
    again.close(is_ended=True)
    assert [line["step"] for line in json_lines(file)] == [1, 2]


async def test_the_token_comes_only_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    with mlflow_server() as server, store_in(tmp_path) as store:
        config = config_with({}, mlflow=server.url)
        recorder, _ = await begin(store, config, tmp_path)
        await recorder.step(step_record(1))
        await recorder.close_trackers(is_taken_over=False)
        assert server.tokens == {"s3cret"} and "s3cret" not in dump_config(config)


REFUSED = """
import sys
from service.config.file import ConfigError
from service.config.preflight import check_trackers
from worlds.parts.tracker_world import config_with
check_trackers(config_with({"wandb": {"project": "games"}, "tensorboard": ""}))
sys.path.clear()
for trackers in (
    {"wandb": {"project": "games"}},
    {"tensorboard": ""},
    {"trackio": {"project": "games"}},
    {"jsonl": True},
):
    try:
        check_trackers(config_with(trackers))
    except ConfigError as error:
        print(error)
"""


def test_a_tracker_without_its_package_is_refused_with_the_remedy() -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    reported = done.stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in reported] == [
        "pip install wandb",
        "pip install tensorboardX",
        "pip install trackio",
    ]


@pytest.mark.parametrize(
    ("trackers", "key"),
    [
        ({"mlflow": {"url": "mlflow:5000", "experiment": "games"}}, "trackers.mlflow.url"),
        ({"mlflow": {"url": "http://me:s3cret@mlflow", "experiment": "a"}}, "trackers.mlflow.url"),
        ({"mlflow": {"url": "http://mlflow:5000"}}, "trackers.mlflow.experiment"),
        ({"wandb": {"project": "games", "mode": "off"}}, "trackers.wandb.mode"),
        ({"wandb": {"project": "games", "api_key": "k"}}, "trackers.wandb.api_key"),
        ({"trackio": {"group": "small"}}, "trackers.trackio.project"),
        ({"trackio": {"project": ""}}, "trackers.trackio.project"),
        ({"trackio": {"project": "games", "space_id": "me/games"}}, "trackers.trackio.space_id"),
    ],
)
def test_a_setting_that_no_tracker_has_is_refused(trackers: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config_with(trackers)
