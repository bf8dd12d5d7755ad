"""The example configurations of docs/recipes.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


def recipes() -> dict[str, dict[str, Any]]:
    """Return the configurations, each by the heading of its section."""
    found = re.findall(
        r"^## (.+?)\n.*?```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return {heading: yaml.safe_load(block) for heading, block in found}
