"""From overview.yaml to what Grafana imports: ids, positions on the grid, variables, options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter

from actors.statistics import BY_NAME, Unit

SOURCE = Path(__file__).parent / "overview.yaml"
SCHEMA_VERSION = 39
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Steps are rare: over less than a minute a rate of them would mostly be 0 or unknown.
SHORTEST_INTERVAL = "1m"
SHOWS_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
# As Grafana calls them.
UNITS = {
    Unit.NUMBER: "none",
    Unit.NATS: "suffix: nats",
    Unit.SHARE: "percentunit",
    Unit.VERSIONS: "suffix: versions",
}
_STRICT = ConfigDict(extra="forbid")


class Look(StrEnum):
    """How a panel draws its series, under Grafana's names."""

    NUMBER = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"


HEIGHTS = {Look.NUMBER: 4, Look.LINES: 8, Look.HEATMAP: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    __pydantic_config__ = _STRICT

    title: str
    description: str
    unit: str = ""
    """One of Grafana's, such as "s", or "suffix: nats"; with statistics it is theirs."""
    statistics: Mapping[str, str] = field(default_factory=dict)
    """By legend, the name of a statistic; all of one unit."""
    queries: Mapping[str, str] = field(default_factory=dict)
    """By legend, which is a name or labels as {{label}}, the PromQL."""
    look: Look = Look.LINES
    width: int = 8
    """Of 24 columns."""
    is_stacked: bool = False
    is_logarithmic: bool = False

    @property
    def series(self) -> dict[str, str]:
        """By legend, the PromQL of all that the panel shows."""
        return {legend: _of_newest_step(name) for legend, name in self.statistics.items()} | dict(
            self.queries
        )

    @property
    def series_unit(self) -> str:
        units = {UNITS[BY_NAME[name].unit] for name in self.statistics.values()} or {self.unit}
        assert len(units) == 1, f"{self.title}: a panel shows one unit, got {sorted(units)}"
        return units.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    __pydantic_config__ = _STRICT

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    __pydantic_config__ = _STRICT

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for section in self.sections for panel in section.panels)


def _of_newest_step(statistic: str) -> str:
    return f'{BY_NAME[statistic].metric}{{run="$run"}}'


def load_dashboard() -> Dashboard:
    """Raises: pydantic.ValidationError for an unknown key; KeyError for an unknown statistic."""
    tree = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return TypeAdapter(Dashboard).validate_python(tree)


def to_json(dashboard: Dashboard) -> str:
    return json.dumps(to_tree(dashboard), indent=1, ensure_ascii=False) + "\n"


def to_tree(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["rayloom"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": _placed(dashboard),
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(rayloom_train_steps_total, run)"
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        },
        {
            "name": "run",
            "label": "Run",
            "description": "run.name of its configuration.",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "run"},
            # On each change of the time range: runs come and go.
            "refresh": 2,
            "sort": 1,
        },
    ]


def _placed(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Lines of panels from left to right, under a row a section; ids count from 1."""
    placed: list[dict[str, Any]] = []
    top = 0
    for section in dashboard.sections:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": section.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        left, top, line_height = 0, top + 1, 0
        for panel in section.panels:
            height = HEIGHTS[panel.look]
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_content(panel)})
            left, line_height = left + panel.width, max(line_height, height)
        top += line_height
    return placed


def _content(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.look.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "interval": SHORTEST_INTERVAL,
        "fieldConfig": {
            "defaults": {"unit": panel.series_unit, "custom": _drawing(panel)},
            "overrides": [],
        },
        "options": _options(panel),
        "targets": _targets(panel),
    }


def _targets(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expr,
            "format": "heatmap" if panel.look is Look.HEATMAP else "time_series",
            "legendFormat": legend,
            "range": True,
        }
        for index, (legend, expr) in enumerate(panel.series.items())
    ]


def _drawing(panel: Panel) -> dict[str, Any]:
    if panel.look is not Look.LINES:
        return {}
    return {
        "fillOpacity": 40 if panel.is_stacked else 0,
        "scaleDistribution": (
            {"type": "log", "log": 10} if panel.is_logarithmic else {"type": "linear"}
        ),
        "showPoints": "auto",
        "spanNulls": True,
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.look is Look.NUMBER:
        return {"reduceOptions": SHOWS_LAST, "colorMode": "none", "graphMode": "area"}
    if panel.look is Look.HEATMAP:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 32, "reverse": True},
            "yAxis": {"unit": panel.series_unit},
        }
    return {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull"],
            "sortBy": "Last *",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
