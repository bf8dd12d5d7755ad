"""Tests of models at addresses: exported with a marker, and downloaded once per content."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.runs.stored_run import BEFORE, unpack_run

from service.cli.artifacts import export_checkpoint, export_to_address
from service.config.file import ConfigError, parse_config
from service.launch.model_directories import fetched_model, with_converted_models
from service.remote_files import MARKER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rayloom" / "models"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != MARKER}


def test_an_export_to_an_address_can_be_the_model_of_a_run(tmp_path: Path, cache: Path) -> None:
    run_dir = unpack_run(tmp_path, BEFORE)
    url = f"file://{tmp_path}/remote/model"
    assert f"step 2, policy version 2, in {url}" in export_to_address(run_dir.path, url)
    export_checkpoint(run_dir.path, tmp_path / "local")
    assert contents(tmp_path / "remote" / "model") == contents(tmp_path / "local")
    with pytest.raises(ConfigError, match="has a complete upload, expected a new directory"):
        export_to_address(run_dir.path, url)
    said: list[str] = []
    config = parse_config(
        {"model": {"path": url}, "tasks": {"environment": "guessing"}}, source="test"
    )
    for _ in range(2):
        found = with_converted_models(config, tell=said.append).model.path
        assert found is not None and contents(Path(found)) == contents(tmp_path / "local")
    assert len(said) == 1 and [path.name for path in cache.iterdir()] == [Path(found).name]


def test_a_directory_without_a_marker_is_downloaded_again_if_it_changes(
    tmp_path: Path, cache: Path
) -> None:
    remote, said = tmp_path / "remote", []
    (remote / "inner").mkdir(parents=True)
    (remote / "config.json").write_text("{}")
    (remote / "inner" / "part").write_text("1")
    url = f"file://{remote}/"
    first = fetched_model(url, key="model.path", tell=said.append)
    assert fetched_model(url, key="model.path", tell=said.append) == first and len(said) == 1
    (remote / "inner" / "part").write_text("12")
    second = fetched_model(url, key="model.path", tell=said.append)
    assert (first / "inner" / "part").read_text() == "1"
    assert (second / "inner" / "part").read_text() == "12" and len(said) == 2
    # Write a marker whose digests differ from those of the files.
    (remote / MARKER).write_text(
        '{"format": 1, "files": {"config.json": [2, "0"]}, "note": {}}', encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"model\.path: .*something has changed the object"):
        fetched_model(url, key="model.path", tell=said.append)
    assert sorted(cache.iterdir()) == sorted([first, second])


@pytest.mark.parametrize("url", ["file:///nowhere/at/all", "no-scheme://x"])
def test_an_address_without_a_model_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*(no config.json|knows, such as s3)"):
        fetched_model(url, key="model.path", tell=pytest.fail)
