"""Tests that all files that name Rayloom's version name the same one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from service import VERSION
from service.cli.main import app

ROOT = Path(__file__).parents[1]
TAGGED = [
    "deploy/docker/Dockerfile.cpu", "deploy/docker/Dockerfile.gpu", "deploy/stack/compose.yaml",
    "docs/deploy.md", "helm/README.md", "helm/values.yaml", "helm/values-gpu-small.yaml",
    "helm/values-production.yaml", "helm/ci/shared-gpu.yaml",
]  # fmt: skip


def test_the_project_the_chart_and_the_changelog_have_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chart = yaml.safe_load((ROOT / "helm" / "Chart.yaml").read_text("utf-8"))
    assert project["version"] == chart["version"] == chart["appVersion"] == VERSION
    headings = re.findall(r"(?m)^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert headings[0][0] == VERSION and re.fullmatch(r"20\d\d-\d\d-\d\d", headings[0][1])


@pytest.mark.parametrize("file", TAGGED)
def test_the_images_have_the_version(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    tags = re.findall(r"(?<![\w.])(\d+\.\d+\.\d+)-[cg]pu", text)
    assert tags and set(tags) == {VERSION}


def test_the_command_prints_the_version() -> None:
    printed = CliRunner().invoke(app, ["--version"])
    assert (printed.exit_code, printed.output) == (0, f"rayloom {VERSION}\n")
