"""Write the dashboard beside this module, and the table of statistics into docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from actors.statistics import STATISTICS
from deploy.dashboards.grafana import load_dashboard, to_json

FILE = Path(__file__).parent / "rayloom-overview.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- Written by `python -m deploy.dashboards` from actors/statistics.py. -->\n"
END = "<!-- The end of what is written. -->\n"


def statistics_table() -> str:
    """The table as Markdown: a row for the statistics of the same values."""
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
    """The document with the table as it is now between its two marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{statistics_table()}{END}{after}"


if __name__ == "__main__":
    FILE.write_text(to_json(load_dashboard()), encoding="utf-8")
    print(f"wrote {FILE}")
    DOCUMENT.write_text(with_statistics(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {DOCUMENT}")
