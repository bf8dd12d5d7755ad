"""The Dockerfiles, read: a base image to choose, no root at the end, the project's versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from worlds.helm_chart import CHART

ROOT = CHART.parent
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
every_dockerfile = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[str]:
    """Without comments, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def test_there_is_one_for_cpu_and_one_for_gpu() -> None:
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".gpu"]


@every_dockerfile
def test_both_stages_stand_on_a_base_image_that_can_be_chosen(file: Path) -> None:
    lines = instructions(file)
    assert lines[0].startswith("ARG BASE_IMAGE=")
    stages = [line for line in lines if line.startswith("FROM ")]
    assert stages == ["FROM ${BASE_IMAGE} AS build", "FROM ${BASE_IMAGE}"]


@every_dockerfile
def test_the_image_runs_as_the_user_that_the_chart_names(file: Path) -> None:
    lines = instructions(file)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000:1000"]
    assert lines.index("USER 1000:1000") > lines.index("FROM ${BASE_IMAGE}")
    assert "runAsUser: 1000\n" in (CHART / "templates" / "_pod.tpl").read_text()


@every_dockerfile
def test_what_is_copied_is_there_and_let_in(file: Path) -> None:
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [line.split()[1:-1] for line in instructions(file) if line.startswith("COPY ")]
    names = {name for names in copied for name in names if not name.startswith("-")} - {
        "/opt/rayloom"
    }
    assert {"pyproject.toml", "actors", "service", "deploy"} <= names
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in let_in, name


def test_the_gpu_image_asks_for_the_projects_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {*project["dependencies"], *project["optional-dependencies"]["cuda"]}
    asked = re.findall(r"'(\S+==\S+)'", (ROOT / "deploy/docker/Dockerfile.gpu").read_text())
    assert len(asked) == 2 and set(asked) <= declared
