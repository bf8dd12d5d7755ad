"""Tests that each block of docs/recipes.md is a valid configuration."""

from __future__ import annotations

import re
from typing import Any

import pytest
from worlds.checks.recipe_page import PAGE, recipes

from service.config.file import parse_config

BASE: dict[str, Any] = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}


def test_each_heading_has_a_block() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert list(recipes()) == headings and len(headings) >= 9


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_valid_configuration(name: str) -> None:
    tree = {**BASE, **recipes()[name]}
    tree["model"] = {**BASE["model"], **tree["model"]}
    config = parse_config(tree, source=name)
    # The settings of the recipe have an effect: KL needs a reference.
    has_kl = "kl" in str(recipes()[name])
    assert config.algorithm.needs_reference is has_kl
