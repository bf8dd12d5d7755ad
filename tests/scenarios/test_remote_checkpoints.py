"""Test of a run that copies its checkpoints to S3, loses its machine, and continues from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from worlds.runs.run_checks import check_finished
from worlds.runs.run_driver import START_S, STEP_S, running, small_config
from worlds.servers.object_server import BUCKET, object_server

from service.cli.artifacts import export_to_address
from service.launch.model_directories import fetched_model
from service.remote_files import RemoteDirectory

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_a_run_continues_on_a_new_machine_from_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/runs/one/"
    with object_server(tmp_path) as variables:
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        remote = RemoteDirectory(url)
        run_settings = {"steps": 1000, "evaluate_every": 1000, "checkpoint_url": url}
        config = small_config(tmp_path, trainer={"num_ranks": 1}, run=run_settings)
        with running(config, tmp_path / "lost") as run:
            run.wait_for_log("copied step-", limit_s=START_S + 8 * STEP_S)
        # The run was killed with all its processes, and its directory is lost.
        shutil.rmtree(tmp_path / "lost")
        copied = [name for name in remote.children() if remote.child(name).read() is not None]
        last = int(copied[-1].split("-")[1]) + 4
        options = ["--resume", "--set", f"run.steps={last}"]
        with running(config, tmp_path / "new", options) as run:
            assert run.wait(limit_s=START_S + 8 * STEP_S) == 0, run.log()
            check_finished(run, steps=last)
            assert "reading its copy at s3://" in run.output.read_text()
            assert run.history().num_terms == 2
        kept = remote.children()
        assert len(kept) == 2 and kept[-1] == f"step-{last:06}-t2"
        assert all(remote.child(name).read() is not None for name in kept)
        # Another run may not use the address.
        with running(config, tmp_path / "other") as run:
            assert run.wait(limit_s=START_S) == 2
            assert "expected one address for each run" in run.output.read_text()
        # The run's export is a model for another run.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        model = f"s3://{BUCKET}/model"
        assert f"step {last}" in export_to_address(tmp_path / "new", model)
        said: list[str] = []
        found = fetched_model(model, key="model.path", tell=said.append)
        assert (found / "config.json").is_file() and len(said) == 1
        assert fetched_model(model, key="model.path", tell=said.append) == found and len(said) == 1
