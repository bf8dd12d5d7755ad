"""Tests of user modules that hide packages of Rayloom or libraries that it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from worlds.runs.run_driver import ROOT

from rayloom import check_names


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=directory, text=True, timeout=60, capture_output=True,
        check=False, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip


@pytest.mark.parametrize(
    "file", ["service.py", "actors/__init__.py", "deploy/__init__.py", "rayloom.py"]
)
def test_a_module_that_hides_a_package_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    with pytest.raises(ImportError, match=f"got {tmp_path / file}, which hides") as refused:
        check_names([str(tmp_path), str(ROOT)])
    assert "rename it, or start from another directory" in str(refused.value)
    # Both a script and the command line in that directory refuse the module.
    if file != "rayloom.py":
        (tmp_path / "script.py").write_text("import rayloom")
        assert str(refused.value) in run(tmp_path, "script.py").stderr
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from rayloom.__main__ import main; main()"
    done = run(tmp_path, "-c", start)
    assert done.returncode == 2
    assert done.stderr == f"rayloom: {refused.value}\n"


@pytest.mark.parametrize("file", ["torch.py", "datasets.py", "tokenizers/__init__.py", "yaml.py"])
def test_a_module_that_hides_a_library_is_refused(tmp_path: Path, file: str) -> None:
    name = file.partition("/")[0].removesuffix(".py")
    (tmp_path / name).mkdir()
    (tmp_path / name / "values.yaml").write_text("")
    # A folder without code hides nothing, nor does a library in site-packages.
    check_names([str(tmp_path), *sys.path])
    check_names([each for each in sys.path if each.endswith("site-packages")])
    (tmp_path / file).write_text("")
    with pytest.raises(ImportError, match=f"got {tmp_path / file}, which hides the lib") as refused:
        check_names([str(tmp_path), *sys.path])
    assert f"the library {name!r} that Rayloom imports" in str(refused.value)
    (tmp_path / "script.py").write_text("import rayloom")
    assert str(refused.value) in run(tmp_path, "script.py").stderr
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from rayloom.__main__ import main; main()"
    done = run(tmp_path, "-c", start)
    assert done.returncode == 2
    assert done.stderr == f"rayloom: {refused.value}\n"


def test_a_package_run_by_m_that_imports_rayloom_refuses_a_hidden_library(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import rayloom")
    (tmp_path / "mine" / "__main__.py").write_text("print('started')")
    (tmp_path / "torch.py").write_text("")
    # The name `rayloom` among the arguments is not the name of the module.
    done = run(tmp_path, "-m", "mine", "-m", "rayloom")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"\nImportError: got {tmp_path / 'torch.py'}, which hides the library" in done.stderr
    command = run(tmp_path, "-m", "rayloom", "--version")
    assert command.returncode == 2
    assert command.stderr.startswith(f"rayloom: got {tmp_path / 'torch.py'}, which hides")
    assert len(command.stderr.splitlines()) == 1


def test_a_folder_without_code_and_rayloom_itself_hide_nothing(tmp_path: Path) -> None:
    for name in ("service", "deploy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "values.yaml").write_text("")
    check_names([str(tmp_path)])
    check_names([str(tmp_path), str(ROOT)])
    check_names([str(ROOT)])
    (tmp_path / "script.py").write_text("import rayloom; print(rayloom.load_config.__module__)")
    assert run(tmp_path, "script.py").stdout == "service.config.file\n"


def run_in_deleted_directory(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    shell = ["/bin/sh", "-c", 'cd "$0" && /bin/rmdir "$0" && exec "$@"', str(place)]
    return subprocess.run(
        [*shell, sys.executable, *command], text=True, timeout=60, capture_output=True,
        check=False, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip


def test_a_deleted_working_directory_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "rayloom"
    script.parent.mkdir()
    script.write_text("from rayloom.__main__ import main; main()")
    sentence = "the working directory does not exist any more; cd to another\n"
    for command in ((str(script),), ("-m", "rayloom")):
        done = run_in_deleted_directory(tmp_path / "gone", *command, "--help")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr == f"rayloom: {sentence}"
    done = run_in_deleted_directory(tmp_path / "gone", "-c", "import rayloom")
    assert done.stderr.endswith(f"\nImportError: {sentence}")
