"""What a dashboard is, and what Grafana imports of it: ids, places on the grid, variables, options.

Also the PromQL of one run, as the panels write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Look(StrEnum):
    """How a panel draws its series, under Grafana's names."""

    NUMBER = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    description: str
    unit: str
    """One of Grafana's, such as "s", or "suffix: nats"."""
    queries: Mapping[str, str]
    """By legend, which is a name or labels as {{label}}, the PromQL."""
    look: Look = Look.LINES
    width: int = 8
    """Of 24 columns."""
    is_stacked: bool = False
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """uid: what links to the dashboard name; it never changes."""

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for section in self.sections for panel in section.panels)


SCHEMA_VERSION = 39
COLUMNS = 24
HEIGHTS = {Look.NUMBER: 4, Look.LINES: 8, Look.HEATMAP: 8}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Steps are rare: over less than a minute a rate of them would mostly be 0 or unknown.
SHORTEST_INTERVAL = "1m"
SHOWS_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def of_run(metric: str, matcher: str = "") -> str:
    """The series of the chosen run. matcher: a further one, such as kind="evicted"."""
    return f'{metric}{{instance="$instance"{"," if matcher else ""}{matcher}}}'


def rate(metric: str, matcher: str = "") -> str:
    return f"rate({of_run(metric, matcher)}[$__rate_interval])"


def mean(histogram: str) -> str:
    """Of what a histogram without labels, or each of its label sets, has seen lately."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, sum by (le) ({rate(f'{histogram}_bucket')}))"


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
    query = "label_values(rayloom_train_steps_total, instance)"
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        },
        {
            "name": "instance",
            "label": "Run",
            "description": "The metrics address of a run.",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "instance"},
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
            "defaults": {"unit": panel.unit, "custom": _drawing(panel)},
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
        for index, (legend, expr) in enumerate(panel.queries.items())
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
            "yAxis": {"unit": panel.unit},
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
