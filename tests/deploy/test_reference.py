"""Tests of the generated pages of the documentation. `make docs` builds the whole site."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
import yaml
from worlds.runs.run_driver import ROOT

from deploy.reference import command_line_page, configuration_page
from service.cli.main import app
from service.config.file import dump_config, parse_config


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_the_generated_pages_have_each_setting_once_and_each_command() -> None:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    whole = yaml.safe_load(dump_config(parse_config(tree, source="test")))
    page = configuration_page()
    named = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(named) == len(set(named))
    # The rules of outcomes are a mapping. Its keys are not settings.
    wanted = {leaf for leaf in leaves(whole) if not leaf.startswith("rollouts.outcomes.")}
    assert {leaf for leaf in wanted if "." in leaf} <= set(named)
    # A row has the type, the bounds, the default and the meaning.
    assert "| `run.steps` | integer ≥ 1 | `100` | Training steps" in page
    assert '| `model.dtype` | `float32`, `bfloat16` | `"float32"` | ' in page
    assert "| `algorithm.window_groups` | integer ≥ 1 or null | `null` | " in page
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    headings = command_line_page()
    assert [name for name in command.commands if f"## `rayloom {name}`" not in headings] == []


def test_the_navigation_names_each_page_once() -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for section in tree for entries in section.values() for page in files(entries)]
    assert len(pages) == len(set(pages))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    generated = {"index.md"} | {
        f"reference/{name}.md" for name in ("configuration", "command-line", "changelog")
    }
    generated |= {
        str(path.relative_to(ROOT / "docs").with_suffix(".md"))
        for path in (ROOT / "docs" / "examples").glob("*.ipynb")
    }
    assert {page for page in written if not page.startswith("examples/")} == set(pages) - generated


def files(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        yield from [entry] if isinstance(entry, str) else entry.values()
