"""Tests of the series and the packages that `make dashboards-shot` uses."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dashboards_shot import NAMES, answers, labels_of, open_metrics, store, values_of
from worlds.servers.prometheus_server import find_tools, serving

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.grafana import SOURCES

SHOT = SOURCES / "shot"


def test_a_series_has_the_labels_that_panels_use() -> None:
    query = 'sum by (route, le) (rate(rayloom_x_bucket{run="$run",phase=~"load|send"}[5m]))'
    assert dict(labels_of(query, "{{route}}, {{environment}}")) == {
        "rayloom_x_bucket": {
            "phase": ("load", "send"),
            "environment": NAMES["environment"],
            "route": NAMES["route"],
        }
    }


def test_every_panel_of_the_pipeline_has_data_in_a_real_prometheus(tmp_path: Path) -> None:
    find_tools()
    board = json.loads((DASHBOARDS / "rayloom-pipeline.json").read_text(encoding="utf-8"))
    now = int(time.time()) // 60 * 60
    store(open_metrics(values_of({"pipeline": board}), now - 7200), tmp_path / "data")
    with serving("", tmp_path) as address:
        found = {
            (panel["title"], one["legend"]): len(one["result"])
            for panel in board["panels"]
            for one in answers(panel, address, now)
        }
    assert len(found) > 20 and [name for name, number in found.items() if not number] == []


def test_packages_are_pinned_without_a_registry_address() -> None:
    lock = json.loads((SHOT / "package-lock.json").read_text(encoding="utf-8"))
    package = json.loads((SHOT / "package.json").read_text(encoding="utf-8"))
    wanted = package["dependencies"] | package["devDependencies"]
    locked = {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted}
    assert locked == wanted
    packages = [each for path, each in lock["packages"].items() if path]
    assert all(each["integrity"].startswith("sha512-") for each in packages)
    assert not any("resolved" in each for each in packages)
