"""Write the dashboards into the chart, and the table of statistics into docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from actors.statistics import STATISTICS
from deploy.chart_schema import CHART
from deploy.dashboards.grafana import load_dashboards, to_json

DASHBOARDS = CHART / "dashboards"
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- Written by `python -m deploy.dashboards` from actors/statistics.py. -->\n"
END = "<!-- The end of what is written. -->\n"


def statistics_table() -> str:
    """Return the statistics as a Markdown table; statistics with the same meaning share a row."""
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for each in STATISTICS:
        key = each.group, each.unit, each.help
        rows.setdefault(key, []).append((f"`{each.name}`", f"`{each.metric}`"))
    lines = ["| group | name | unit | metric | meaning |", "|---|---|---|---|---|"]
    for (group, unit, text), found in rows.items():
        names, metrics = (", ".join(each) for each in zip(*found, strict=True))
        lines.append(f"| {group} | {names} | {unit} | {metrics} | {text} |")
    return "\n".join(lines) + "\n"


def with_statistics(document: str) -> str:
    """Return the document with the current table between its lines BEGIN and END."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{statistics_table()}{END}{after}"


def dashboards() -> dict[str, str]:
    """Return each of the chart's dashboards as JSON, by file name."""
    return {dashboard.file_name: to_json(dashboard) for dashboard in load_dashboards()}


if __name__ == "__main__":
    for name, text in dashboards().items():
        (DASHBOARDS / name).write_text(text, encoding="utf-8")
        print(f"wrote {DASHBOARDS / name}")
    DOCUMENT.write_text(with_statistics(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {DOCUMENT}")
