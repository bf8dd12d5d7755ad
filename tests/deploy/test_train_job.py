"""Tests of the command line that a RayJob runs."""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from worlds.faults.breaking_proxy import breaking_proxy
from worlds.servers.helm_chart import arguments_of, rendered
from worlds.servers.postgresql_server import PASSWORD, postgresql

from deploy.train_job import LAST_SCRAPES_S, RunArguments, train_command
from service.config.file import ConfigError, load_config
from service.launch.run_dir import RunDir, run_id_of
from service.store.place import VARIABLE, StoreOptions, chosen_url, record
from service.store.run_store import RunStore


def job_arguments(directory: Path, **changes: Any) -> str:
    """Return the arguments of the chart's RayJob as JSON, with directories of the test."""
    arguments = arguments_of(rendered({"mode": "job"}))
    places = {"run_dir": str(directory / "run"), "state_dir": str(directory / "state")}
    return json.dumps({**arguments, **places, **changes})


def test_a_new_run_is_trained_on_the_cluster_by_the_configuration_in_the_arguments(
    tmp_path: Path,
) -> None:
    text = job_arguments(tmp_path, overrides=["run.steps=3"])
    _, *command = train_command(text, directory=tmp_path)
    file = tmp_path / "config.yaml"
    assert command == [
        "-m", "service.cli.main", "train", str(file), "--address", "auto",
        "--run-dir", str(tmp_path / "run"), "--state-dir", str(tmp_path / "state"),
    ]  # fmt: skip
    config = load_config(file)
    told_config = RunArguments.model_validate_json(text).read_config()
    # The metrics stay available for a while, so that Prometheus reads how the run ended.
    assert config.metrics == replace(told_config.metrics, stays_s=LAST_SCRAPES_S)
    assert replace(config, metrics=told_config.metrics) == told_config
    assert config.run.steps == 3
    train_command(job_arguments(tmp_path, overrides=["metrics.stays_s=7"]), directory=tmp_path)
    assert load_config(file).metrics.stays_s == 7


def test_a_restarted_job_resumes_its_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    sqlite3.connect(tmp_path / "run" / "rayloom.db").close()
    _, *command = train_command(job_arguments(tmp_path), directory=tmp_path)
    assert command[-2:] == ["--resume", str(tmp_path / "run")]


@pytest.mark.proof
@pytest.mark.slow
def test_the_start_waits_for_an_unreachable_database(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    text = job_arguments(tmp_path, state_dir=None)
    config, run_dir = RunArguments.model_validate_json(text).read_config(), tmp_path / "run"

    def tail_of_command() -> list[str]:
        proxy.cut()
        threading.Timer(1.0, proxy.mend).start()
        command = train_command(text, directory=tmp_path)
        assert not proxy.is_cut
        return command[-2:]

    with (
        postgresql(tmp_path_factory.mktemp("database") / "server") as server,
        breaking_proxy(server.port) as proxy,
    ):
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/") + "?sslmode=disable"
        monkeypatch.setenv(VARIABLE, url)
        assert tail_of_command() == ["--run-dir", str(run_dir)]
        # Only the command creates the run.
        assert not run_dir.exists()
        run_dir.mkdir()
        place = chosen_url(run_dir, run_id_of(config, RunDir(path=run_dir)), StoreOptions())
        record(run_dir / "store.json", place)
        store = RunStore(place)
        store.acquire_lease(owner="elsewhere:1")
        store.close()
        assert tail_of_command() == ["--resume", str(run_dir)]


def test_arguments_that_cannot_run_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="run_dri"):
        train_command(job_arguments(tmp_path, run_dri="x"), directory=tmp_path)
    with pytest.raises(ConfigError, match=r"of the arguments is refused:\n  - run\.steps: got 0"):
        train_command(job_arguments(tmp_path, overrides=["run.steps=0"]), directory=tmp_path)
    # Files that do not belong to the run are kept.
    foreign = tmp_path / "run" / "config.yaml"
    foreign.parent.mkdir()
    foreign.write_text("a: 1")
    with pytest.raises(ConfigError, match="is not empty"):
        train_command(job_arguments(tmp_path), directory=tmp_path)
    assert foreign.read_text() == "a: 1"


def test_overrides_do_not_change_the_given_tree() -> None:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    arguments = RunArguments(config=tree, run_dir=Path("/x"), overrides=("model.tiny.seed=7",))
    assert arguments.read_config().model.tiny.seed == 7  # type: ignore[union-attr]
    assert tree == {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
