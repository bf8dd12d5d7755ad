"""`import rayloom`: the public names, and what `rayloom.train` hands to the command."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rayloom
from rayloom.functions import name_of
from service.launch.run_dir import RunDir, check_new

ROWS = [{"prompt": "Which number comes after 3?", "answer": "4"}]


def test_each_public_name_is_there_and_documented() -> None:
    for name in rayloom.__all__:
        assert (getattr(rayloom, name).__doc__ or "").strip(), name
    assert set(rayloom.__all__) <= set(dir(rayloom))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rayloom.__getattr__("nothing")


def test_the_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, rayloom; rayloom.train; "
        "print({'ray', 'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_function_without_an_importable_module_is_stored_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bonus = 0.5

    def score(completion: str, answer: str) -> float:
        return bonus + (completion == answer)

    monkeypatch.chdir(tmp_path)
    store = RunDir(path=tmp_path / "run").functions
    module, name = name_of(score, store, what="reward").split(":")
    assert "def score(completion: str, answer: str)" in (store / f"{module}.py").read_text()
    monkeypatch.syspath_prepend(str(store))
    found = getattr(importlib.import_module(module), name)
    assert (found("4", "4"), found("5", "4")) == (1.5, 0.5)
    # The same function has the same name, and a start may use the directory.
    assert name_of(score, store, what="reward") == f"{module}:{name}"
    check_new(RunDir(path=tmp_path / "run"))


def test_a_function_of_a_module_is_taken_by_its_name(tmp_path: Path) -> None:
    assert name_of(check_new, tmp_path / "functions", what="reward") == (
        "service.launch.run_dir:check_new"
    )
    assert not (tmp_path / "functions").exists()


def test_a_function_that_refers_to_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def score(completion: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(rayloom.ConfigError, match="reward: score cannot be stored by value"):
        rayloom.train(dataset=ROWS, reward=score, run_dir=tmp_path / "run")


def test_a_refusal_of_the_command_is_raised_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"run\.steps: got -2, expected"):
        rayloom.train(dataset=ROWS, reward=lambda completion: 1.0, run={"steps": -2})
    with pytest.raises(rayloom.ConfigError, match="a continued run uses its own"):
        rayloom.train(resume=tmp_path, dataset=ROWS)
    assert "rayloom: " in capfd.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_directory_that_holds_a_run_is_not_touched(tmp_path: Path) -> None:
    run_dir = RunDir(path=tmp_path / "run")
    run_dir.functions.mkdir(parents=True)
    rows = run_dir.functions / "rows.jsonl"
    rows.write_text("of the run\n")
    run_dir.database_file.write_bytes(b"")
    with pytest.raises(rayloom.ConfigError, match="holds a run and is not empty"):
        rayloom.train(dataset=ROWS, reward=lambda completion: 1.0, run_dir=run_dir.path)
    assert rows.read_text() == "of the run\n" and list(run_dir.functions.iterdir()) == [rows]


def test_a_method_is_stored_with_its_instance(tmp_path: Path) -> None:
    store = RunDir(path=tmp_path / "run").functions
    assert name_of("4".__eq__, store, what="reward").startswith("given_")
    assert name_of(RunDir(path=tmp_path).has_run, store, what="reward").startswith("given_")


def test_serve_and_evaluate_are_refused_as_the_commands_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"run\.stepz"):
        with rayloom.serve({"run": {"stepz": 1}}):
            pytest.fail("it did not start")
    with pytest.raises(rayloom.ConfigError, match=r"nothing\.yaml does not exist"):
        rayloom.evaluate("nothing.yaml", tasks=2)
    assert not list(tmp_path.iterdir())
