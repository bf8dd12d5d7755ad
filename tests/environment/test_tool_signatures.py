"""Signatures of a user's tools that need care: defaults, decorators and kinds of methods."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from pydantic import Field

from actors.environment.function_tools import BadArguments, load_tools


@dataclass
class Basket:
    items: list[str] = field(default_factory=list)


def fill(
    query: str,
    n: int = Field(5, description="How many.", ge=1),
    unit: str = Field(description="Of one."),
    tags: list[str] = Field(default_factory=list),  # noqa: B008
    more: list[str] = field(default_factory=list),  # noqa: B008
    most: int = field(default=9),
    basket: Basket = field(default_factory=Basket),  # noqa: B008
) -> Any:
    """Fill a basket.

    Args:
        unit: Of each.
    """
    tags.append(query)
    more.append(query)
    basket.items.append(query)
    return [n, unit, tags, more, most, basket.items]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("signatures_of_test")
    vars(module).update({name: value for name, value in globals().items() if name[0] != "_"})
    monkeypatch.setitem(sys.modules, "signatures_of_test", module)


def loaded(name: str) -> Any:
    return load_tools([f"signatures_of_test:{name}"])[0]


async def test_a_default_may_be_a_field_of_pydantic_or_of_a_dataclass() -> None:
    tool = loaded("fill")
    shown = tool.schema.parameters
    assert shown["required"] == ["query", "unit"]
    assert shown["properties"]["n"] == {
        "type": "integer", "default": 5, "description": "How many.", "minimum": 1,
    }  # fmt: skip
    assert shown["properties"]["unit"]["description"] == "Of each."
    for _ in range(2):
        answer = await tool.call({"query": "fig", "unit": "kg"}, limit_s=5)
        assert answer == '[5, "kg", ["fig"], ["fig"], 9, ["fig"]]'
    with pytest.raises(BadArguments, match="Argument n: Input should be greater than or equal"):
        await tool.call({"query": "fig", "unit": "kg", "n": 0}, limit_s=5)
