"""Tests of the cached check of a model's architecture, which later starts do not repeat."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.trainer.tiny.model import build_tiny_model
from actors.types import Dtype
from service.config.file import ConfigError
from service.config.model_files import check_architecture_once
from service.inference.settings import InferenceSettings

CHECK = """
import sys
from pathlib import Path
from actors.types import Dtype
from service.config.model_files import check_architecture_once
from service.inference.settings import InferenceSettings

check_architecture_once(
    Path(sys.argv[1]), key="model.path", max_context_tokens=int(sys.argv[2]),
    dtype=Dtype.FLOAT32, inference=InferenceSettings(),
)
print("torch" in sys.modules)
"""


def check(directory: Path, *, max_context_tokens: int = 64) -> None:
    check_architecture_once(
        directory,
        key="model.path",
        max_context_tokens=max_context_tokens,
        dtype=Dtype.FLOAT32,
        inference=InferenceSettings(),
    )


def imports_torch(directory: Path, *, max_context_tokens: int = 64) -> bool:
    """Run the check in another process and return whether it imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(directory), str(max_context_tokens)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip() == "True"


# Each check is a process that imports torch and transformers: 9 s.
@pytest.mark.proof
@pytest.mark.slow
def test_a_model_is_checked_once_and_again_when_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    build_tiny_model(model, warmup_steps=0)

    check(model)
    assert not imports_torch(model)
    assert imports_torch(model, max_context_tokens=65)

    settings = model / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"kv_lora_rank": 8}))
    # A refusal is not stored.
    for _ in range(2):
        with pytest.raises(ConfigError, match="multi-head latent attention"):
            check(model)


def test_a_file_that_is_added_after_a_passed_check_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    build_tiny_model(model, warmup_steps=0)
    check(model)
    shutil.copy(model / "model.safetensors", model / "ema.safetensors")
    with pytest.raises(ConfigError, match=r"and ema\.safetensors, which the engines read"):
        check(model)


# Each check is a process that imports torch and transformers: 9 s.
@pytest.mark.proof
@pytest.mark.slow
def test_a_cache_that_cannot_be_written_repeats_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = tmp_path / "model"
    build_tiny_model(model, warmup_steps=0)

    check(model)
    assert imports_torch(model)
