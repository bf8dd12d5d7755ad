"""Tests that docs/metrics.md has every metric that actors/metrics.py declares, and no other."""

from __future__ import annotations

from pathlib import Path

from worlds.checks.metric_names import NAME, Declared, declared

from actors.statistics import STATISTICS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `rayloom_")]


def row_of(metric: Declared) -> str:
    """Return the row of a metric in the page's table; a counter has its name in queries."""
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.documentation} |"


def test_the_page_has_each_declared_metric_and_no_other() -> None:
    metrics, of_steps = declared(), {each.metric for each in STATISTICS}
    assert ROWS == [row_of(metric) for metric in metrics if metric.name not in of_steps]
    known = {name for metric in metrics for name in (*metric.series, metric.name)}
    assert set(NAME.findall(TEXT)) - known == set()
