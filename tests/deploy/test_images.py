"""Tests of the text of the Dockerfiles: base image, user, labels and locked packages."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.missing_tools import skip_or_fail
from worlds.servers.helm_chart import CHART

from service.launch.run_dir import RunDir

ROOT = CHART.parent
COMPOSE = ROOT / "deploy" / "stack" / "compose.yaml"
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
every_dockerfile = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[str]:
    """Return the instructions of a Dockerfile without comments, each on one line."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def test_there_is_a_dockerfile_for_cpu_and_one_for_gpu() -> None:
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".gpu"]


@every_dockerfile
def test_both_stages_use_a_configurable_base_image(file: Path) -> None:
    lines = instructions(file)
    assert lines[0].startswith("ARG BASE_IMAGE=")
    stages = [line for line in lines if line.startswith("FROM ")]
    assert stages == ["FROM ${BASE_IMAGE} AS build", "FROM ${BASE_IMAGE}"]


@every_dockerfile
def test_the_image_runs_as_the_user_that_the_chart_names(file: Path) -> None:
    lines = instructions(file)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000:1000"]
    assert lines.index("USER 1000:1000") > lines.index("FROM ${BASE_IMAGE}")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["pods"]["podSecurityContext"]["runAsUser"] == 1000


@every_dockerfile
def test_copied_paths_exist_and_are_not_ignored(file: Path) -> None:
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [line.split()[1:-1] for line in instructions(file) if line.startswith("COPY ")]
    names = {name for names in copied for name in names if not name.startswith("-")} - {
        "/opt/rayloom"
    }
    assert {"pyproject.toml", "actors", "service", "deploy", "rayloom"} <= names
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in let_in, name


@every_dockerfile
def test_only_locked_packages_are_installed(file: Path) -> None:
    lines = [line for line in instructions(file) if line.startswith("RUN ")]
    lock = {".cpu": "", ".gpu": " LOCK=cuda"}[file.suffix]
    assert f"RUN make deps VENV=/opt/rayloom{lock}" in lines
    # The only other installed package is Rayloom itself.
    assert [line for line in lines if "pip install" in line] == [
        "RUN /opt/rayloom/bin/python -m pip install --no-deps --no-build-isolation ."
    ]


@every_dockerfile
def test_the_labels_describe_the_image(file: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [line] = [line for line in instructions(file) if line.startswith("LABEL ")]
    labels = dict(part.split("=", 1) for part in shlex.split(line.removeprefix("LABEL ")))
    said = {name.removeprefix("org.opencontainers.image."): told for name, told in labels.items()}
    assert said.pop("title").startswith("Rayloom on ")
    assert said == {
        "description": project["description"],
        "version": project["version"],
        "licenses": project["license"],
        "revision": "${REVISION}",
        "base.name": "${BASE_IMAGE}",
    }


def test_the_images_differ_only_in_packages_that_gpus_need() -> None:
    """Expect a compiler and the RDMA libraries only in the image for GPUs."""
    cpu, gpu = (installed(file) for file in DOCKERFILES)
    assert cpu == {"libnuma1", "wget"}
    assert gpu == {"g++", "ibverbs-providers", "libc6-dev", "libibverbs1", "wget"}


def installed(file: Path) -> set[str]:
    """Return the Debian packages in the final stage of the image."""
    [_, line] = [line for line in instructions(file) if "apt-get install" in line]
    [names] = re.findall(r"--yes +(.*?) +&&", line)
    return set(names.split())


@every_dockerfile
def test_hadolint_finds_nothing(file: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        skip_or_fail("there is no hadolint: `make setup` installs it")
    done = subprocess.run([program, file], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


def composed() -> dict[str, Any]:
    """Return the service of the Docker Compose file."""
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]["rayloom"]
    return found


def test_the_runs_of_the_stack_are_where_the_images_user_may_write() -> None:
    """Check this because Docker gives a new volume the owner of its directory in the image."""
    [place] = [each.split(":")[1] for each in composed()["volumes"] if each.startswith("runs:")]
    for file in DOCKERFILES:
        [line] = [line for line in instructions(file) if "useradd" in line]
        assert f"install --directory --owner=1000 --group=1000 {place}" in " ".join(line.split())


def test_the_stack_begins_a_run_or_resumes_the_existing_one(tmp_path: Path) -> None:
    program = tmp_path / "rayloom"
    program.write_text("#!/bin/sh\necho $@\n")
    program.chmod(0o755)
    # Compose reads $$ as $.
    *shell, line = (part.replace("$$", "$") for part in composed()["command"])
    command = [*shell, line.replace("/runs/", f"{tmp_path}/")]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def arguments_of_start() -> list[str]:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    run_dir = RunDir(path=tmp_path / "guessing")
    first = ["serve", "/configs/guessing-cpu.yaml", "--run-dir", str(run_dir.path)]
    assert arguments_of_start()[:4] == first
    run_dir.path.mkdir()
    # An interrupted start leaves a configuration, but no run.
    run_dir.config_file.touch()
    assert arguments_of_start()[:4] == first
    run_dir.database_file.touch()
    assert arguments_of_start()[:4] == [*first[:2], "--resume", str(run_dir.path)]
    assert "metrics.port=9400" in arguments_of_start()
