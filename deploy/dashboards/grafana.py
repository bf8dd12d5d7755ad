"""From the model to what Grafana imports: ids, places on the grid, variables, options."""

from __future__ import annotations

import json
from typing import Any

from deploy.dashboards.model import Dashboard, Look, Panel

SCHEMA_VERSION = 39
COLUMNS = 24
HEIGHTS = {Look.NUMBER: 4, Look.LINES: 8, Look.HEATMAP: 8}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Steps are rare: over less than a minute a rate of them would mostly be 0 or unknown.
SHORTEST_INTERVAL = "1m"
SHOWS_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}


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
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "panels": _placed(dashboard),
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _run_variable() -> dict[str, Any]:
    query = "label_values(rayloom_train_steps_total, instance)"
    return {
        "name": "instance",
        "label": "Run",
        "description": "The metrics address of a run.",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "instance"},
        # On each change of the time range: runs come and go.
        "refresh": 2,
        "sort": 1,
    }


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
            "expr": query.expr,
            "format": "heatmap" if panel.look is Look.HEATMAP else "time_series",
            "legendFormat": query.legend,
            "range": True,
        }
        for index, query in enumerate(panel.queries)
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
