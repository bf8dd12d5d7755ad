"""Tests of Trackio's curves with its package from PyPI, its database and its reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from worlds.agents.agent_programs import environment_of
from worlds.builders.record_builders import step_record
from worlds.runs.run_driver import ROOT

from service.telemetry.curves import step_curves

pytestmark = [pytest.mark.proof, pytest.mark.settings]

# This runs in an environment with the package. It plays two terms; the second writes all points
# again.
PLAYED = """
import asyncio, json, resource, sqlite3, sys
from dataclasses import replace
from pathlib import Path
from actors.types import Outcome, SampledText
from service.config.preflight import check_trackers
from service.telemetry.records import EvaluationSample
from service.config.sections import TrackioSettings
from service.trackers.tracker import Point
from service.trackers.trackio import Trackio
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.builders.record_builders import evaluation_record, step_record
from worlds.parts.tracker_world import RUN_ID, begin, config_with, store_in

SAMPLE = EvaluationSample(
    task_id="t0",
    outcome=Outcome.COMPLETED,
    episode_return=0.5,
    text=SampledText(prompt="what is 1 + 1?", answer="2 \\u2014 two"),
)

async def main(directory):
    places = directory / "trackers" / "trackio.json"
    settings = {"project": "games", "group": "small", "directory": str(directory / "trackio")}
    config = config_with({"trackio": settings, "completions": 1})
    written(directory, step_of([group_of(0, [1.0, 0.0])], number=1))
    check_trackers(config)
    with store_in(directory) as store:
        recorder, _ = await begin(store, config, directory)
        for step in (1, 2, 3):
            await recorder.step(step_record(step))
        await recorder.evaluation(replace(evaluation_record(2), samples=(SAMPLE,)))
        await recorder.close_trackers(is_taken_over=False)
        # As if it had been killed before it noted what was written.
        places.unlink()
        recorder, _ = await begin(store, config, directory)
        await recorder.step(step_record(4))
        await recorder.close_trackers(is_taken_over=False)
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage
    rows = SQLiteStorage.get_logs("games", run_id=RUN_ID)
    (run,) = Api().runs("games")
    found = {"rows": rows, "name": run.name, "id": run.id, "config": run.config}
    tracker = Trackio(TrackioSettings(**settings), run_id=RUN_ID, name="small", config={})
    assert list((directory / "trackio").glob("games*.db"))
    # A limit on a file's size refuses a write as a full disk does.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        tracker.write(
            Point(
                kind="step", term=9, first_step=0, is_first_of_term=False, step=9,
                wall_time=1.8e9, curves={"train/loss": 1.0},
            )
        )
    except (OSError, sqlite3.Error) as error:
        found["refused"] = type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print(json.dumps(found, default=str))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (packages,) = environment_of("trackio").glob("lib/python3*/site-packages")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", packages)))
    done = subprocess.run(
        [sys.executable, "-c", PLAYED, str(tmp_path_factory.mktemp("trackio"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The package must not print into the output of the run.
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def test_trackio_has_each_number_of_the_records_once(found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        curves = step_curves(step_record(row["step"]))
        assert {name: row[name] for name in curves} == curves
    assert [row["term"] for row in rows] == [1, 1, 1, 2]
    # The timestamp is the time of the record and not of the write.
    assert rows[0]["timestamp"].startswith("2026-11-18T")


def test_trackio_has_the_samples_of_an_evaluation_as_a_table(found: dict[str, Any]) -> None:
    (row,) = [row for row in found["rows"] if "evaluation/reward_mean" in row]
    table = row["evaluation/samples"]
    assert row["step"] == 2 and table["_type"] == "trackio.table"
    (sample,) = table["_value"]
    assert sample["answer"] == "2 — two" and sample["return"] == 0.5


def test_trackio_has_the_completions_of_a_step_as_a_table(found: dict[str, Any]) -> None:
    tables = [row["step/completions"] for row in found["rows"] if "step/completions" in row]
    ((completion,),) = [table["_value"] for table in tables]
    assert completion["rollout"] == "g000000.0-0" and completion["return"] == 1.0
    assert completion["advantage"] > 0 and json.loads(completion["rewards"]) == {"game": 1.0}


def test_a_trackio_run_has_the_id_name_and_configuration_of_the_run(found: dict[str, Any]) -> None:
    assert (found["name"], found["id"]) == ("small", "rayloom-small-0123abcd")
    assert found["config"]["_Group"] == "small"
    assert found["config"]["trackers"]["trackio"]["project"] == "games"


def test_a_full_disk_raises_an_error(found: dict[str, Any]) -> None:
    assert found["refused"] == "OperationalError"
