"""Every block of docs/recipes.md is a configuration that every package takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from worlds.checks.recipe_page import PAGE, recipes

from service.config.file import parse_config

BASE: dict[str, Any] = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}


def test_no_heading_is_without_its_block() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert list(recipes()) == headings and len(headings) >= 9


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_configuration_that_every_room_takes(name: str) -> None:
    tree = {**BASE, **recipes()[name]}
    tree["model"] = {**BASE["model"], **tree["model"]}
    config = parse_config(tree, source=name)
    # Nothing that it names is left at the default for lack of a reader.
    has_kl = "kl" in str(recipes()[name])
    assert config.algorithm.needs_reference is has_kl
