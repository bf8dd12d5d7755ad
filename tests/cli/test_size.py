"""`rayloom check --size`: the disks of a configuration, and the table of docs/deploy.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner
from worlds.runs.run_driver import ROOT

from actors.limits import GIB
from service.cli.main import app
from service.cli.size import describe_disks, disks
from service.config.file import ConfigError, load_config, parse_config

SEVERAL = ROOT / "deploy" / "configs" / "several-nodes-gpu.yaml"


def of(**run: object) -> dict[str, float]:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, "run": run}
    found = disks(parse_config(tree, source="of the test"))
    return {each.part: each.num_bytes for each in found}


def test_the_documents_table_is_what_the_command_prints() -> None:
    done = CliRunner().invoke(app, ["check", str(SEVERAL), "--size", "--parameters", "8e9"])
    assert done.exit_code == 0, done.output
    text = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    table = describe_disks(disks(load_config(SEVERAL), num_parameters=8e9))
    assert done.stdout.strip() == table and f"\n{table}\n" in text


def test_a_measured_run_of_the_tiny_model_is_below_its_bounds() -> None:
    """60 steps of 256 guessing games, measured: bytes of its files."""
    tree = {
        "model": {"tiny": {}, "max_context_tokens": 256},
        "tasks": {"environment": "guessing"},
        "algorithm": {"groups_per_step": 16, "group_size": 16},
        "run": {"steps": 60},
    }
    found = {each.part: each.num_bytes for each in disks(parse_config(tree, source="of the test"))}
    measured = {
        "checkpoints": 22_265_027, "journal": 1_832_450, "database": 1_986_560,
        "each export": 3_418_352,
    }  # fmt: skip
    assert all(size <= found[part] * 1.01 for part, size in measured.items()), found


def test_what_is_kept_decides_about_the_disks() -> None:
    usual = of()
    assert of(keep_checkpoints=6)["checkpoints"] == 2 * usual["checkpoints"]
    # Every five steps, there is another one between the newest two and the one of 20 steps ago.
    assert of(checkpoint_every=5)["checkpoints"] == 5 / 4 * usual["checkpoints"]
    assert of(journal_steps=50)["journal"] == usual["journal"] / 2
    assert of(journal_steps=0)["journal"] == 0
    assert of(journal_gib=0.01)["journal"] == pytest.approx(0.01 * GIB)
    assert of(steps=1000)["database"] > usual["database"]


def test_parameters_are_counted_from_a_models_files(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)},
        tmp_path / "x.safetensors",
    )
    tree = {"model": {"path": str(tmp_path)}, "tasks": {"environment": "guessing"}}
    found = {each.part: each for each in disks(parse_config(tree, source="of the test"))}
    assert found["each export"].num_bytes == 4 * 22
    (tmp_path / "y.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"y\.safetensors is not a safetensors file"):
        disks(parse_config(tree, source="of the test"))


def test_a_model_whose_size_is_not_known_is_refused() -> None:
    tree = {"model": {"path": "Qwen/Qwen3-8B"}, "tasks": {"environment": "guessing"}}
    with pytest.raises(ConfigError, match="such as --parameters 8e9"):
        disks(parse_config(tree, source="of the test"))
