"""Tests that the tiny model is built once per user and copied into each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.file import ConfigError
from service.config.sections import TinyModelSettings
from service.launch.model_directories import build_tiny

SETTINGS = TinyModelSettings(warmup_steps=0)


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_second_run_copies_the_model_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = tmp_path / "one", tmp_path / "other"
    assert build_tiny(one, SETTINGS).startswith("built in")
    (cached,) = (tmp_path / "cache" / "rayloom" / "models").iterdir()
    # A file that a build would not write shows that the directory was copied.
    (cached / "mark").write_text("of the cache")
    assert build_tiny(other, SETTINGS).startswith("built in")
    assert files_of(other) == {**files_of(one), "mark": b"of the cache"}
    assert build_tiny(other, SETTINGS).startswith("is already in")
    # Other settings build another model, which replaces the first.
    build_tiny(other, TinyModelSettings(warmup_steps=0, seed=1))
    assert files_of(other)["model.safetensors"] != files_of(one)["model.safetensors"]


def test_a_model_is_built_without_a_cache_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build_tiny(tmp_path / "model", SETTINGS).startswith("built in")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_directory_with_other_files_is_refused_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tmp_path / "notes"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a tiny model"):
        build_tiny(other, SETTINGS)
    assert files_of(other) == {"notes.txt": b"mine"}
