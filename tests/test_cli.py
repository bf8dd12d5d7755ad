"""The command line: what it refuses before anything starts, and its small commands."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_driver import ROOT, small_config

CALCULATOR = {"environment": "calculator", "options": {}}


def rayloom(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"stepz": 1}}, "unknown key"),
        ({"algorithm": {"group_size": 1}}, "expected at least 2"),
        ({"model": {"tiny": None, "path": "/no/such/model"}}, "is not there"),
        ({"inference": {"gpus_per_replica": 64.0}}, "64 GPUs"),
        ({"metrics": {"host": "no.such.host.invalid"}}, "metrics.host"),
        ({"model": {"max_context_tokens": 12}}, "greater than or equal to 32"),
        ({"model": {"max_context_tokens": 32}, "tasks": CALCULATOR}, "first prompt has"),
    ],
    ids=["unknown-key", "group-of-one", "no-model", "no-gpus", "no-host", "no-room", "long-prompt"],
)
def test_a_wrong_configuration_is_refused_before_anything_starts(
    tmp_path: Path, sections: dict[str, dict[str, object]], words: str
) -> None:
    config = small_config(tmp_path, **sections)
    answer = rayloom("train", str(config), "--run-dir", str(tmp_path / "run"))
    assert answer.returncode == 2
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_is_not_there_is_refused_before_the_heavy_imports() -> None:
    code = (
        "import sys; from service.cli import main\n"
        "sys.argv = ['rayloom', 'train', 'nofile.yaml']\n"
        "try: main()\n"
        "finally: assert not {'torch', 'ray', 'transformers', 'vllm'} & sys.modules.keys()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 2 and "nofile.yaml is not there" in answer.stderr


def test_what_serve_refuses_is_refused_before_the_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {tiny: {}}\ntasks: {environment: guessing}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rayloom.db").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        for arguments, words in (
            (["--set", "service.port=0", "--set", "service.host=0.0.0.0"], "no key is set"),
            (["--set", f"service.port={taken}"], "service.port"),
            (["--set", "service.port=0", "--set", f"metrics.port={taken}"], "metrics.port"),
            (["--set", "service.port=0", "--run-dir", str(tmp_path / "run")], "holds a run"),
        ):
            line = ["rayloom", "serve", str(tmp_path / "config.yaml"), *arguments]
            code = (
                f"import sys; from service.cli import main\nsys.argv = {line}\n"
                "try: main()\n"
                "finally: assert not {'torch', 'ray', 'transformers', 'vllm'} & sys.modules.keys()"
            )
            answer = subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
            )
            assert answer.returncode == 2 and words in answer.stderr, answer.stderr


def test_taking_over_without_naming_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {tiny: {}}\ntasks: {environment: guessing}\n")
    answer = rayloom("serve", str(tmp_path / "config.yaml"), "--take-over")
    assert answer.returncode == 2 and "--take-over: got no --resume" in answer.stderr


@pytest.mark.parametrize("run_dir", ["", "/proc/foo", "/dev/null/run"])
def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, run_dir: str) -> None:
    answer = rayloom("train", str(small_config(tmp_path)), "--run-dir", run_dir)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    assert "expected" in answer.stderr and len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("/proc/x",), ("model", "--seed", "99999999999999999999999")]
)
def test_a_tiny_model_that_cannot_be_built_is_refused(arguments: tuple[str, ...]) -> None:
    answer = rayloom("model", "tiny", *arguments, "--warmup-steps", "0")
    assert answer.returncode == 2 and "Traceback" not in answer.stderr


def test_check_prints_the_effective_configuration(tmp_path: Path) -> None:
    answer = rayloom("check", str(small_config(tmp_path)), "--set", "run.steps=9")
    assert answer.returncode == 0
    assert "steps: 9" in answer.stdout and "clip_high: 0.28" in answer.stdout


def test_task_files_are_written_in_both_forms(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        file = tmp_path / f"tasks.{suffix}"
        answer = rayloom("tasks", "reasoning-gym", "chain_sum", str(file), "--count", "5")
        assert answer.returncode == 0, answer.stderr
        assert file.stat().st_size > 0
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and {row["environment"] for row in rows} == {"reasoning_gym"}


def test_an_unknown_family_is_refused_with_the_remedy(tmp_path: Path) -> None:
    answer = rayloom("tasks", "reasoning-gym", "chain_summ", str(tmp_path / "tasks.jsonl"))
    assert answer.returncode == 2 and "chain_sum" in answer.stderr


def test_a_tiny_model_is_built_and_not_over_something_else(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    built = rayloom("model", "tiny", str(directory), "--warmup-steps", "0")
    assert built.returncode == 0 and "0.85 M parameters" in built.stdout
    assert (directory / "model.safetensors").stat().st_mode & 0o044
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    refused = rayloom("model", "tiny", str(tmp_path / "other"), "--warmup-steps", "0")
    assert refused.returncode == 2 and (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_nothing_is_exported_where_no_checkpoint_is(tmp_path: Path) -> None:
    answer = rayloom("export", str(tmp_path), str(tmp_path / "out"))
    assert answer.returncode == 2 and not (tmp_path / "out").exists()
