"""docs/metrics.md has every metric as actors/metrics.py declares it, every statistic, no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from worlds.metric_names import NAME, Declared, declared

from service.telemetry.statistic_names import STATISTICS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
NAMES = re.compile(r"`(\w+)`")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `rayloom_")]


def row_of(metric: Declared) -> str:
    """A counter stands under the name that a query gives it."""
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.documentation} |"


def test_the_table_is_what_is_declared_in_its_order() -> None:
    assert ROWS == [row_of(metric) for metric in declared()]


def test_every_statistic_stands_in_the_row_of_its_group() -> None:
    section = TEXT.partition("## Every statistic of a step")[2]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    found = {group.removeprefix("| "): tuple(NAMES.findall(cell)) for group, cell, _ in rows}
    assert found == dict(STATISTICS)


@pytest.mark.parametrize("name", sorted(set(NAME.findall(TEXT))))
def test_the_text_names_no_metric_that_is_not_there(name: str) -> None:
    series = {name for metric in declared() for name in metric.series}
    assert name in series | {metric.name for metric in declared()}
