"""Write the dashboard's file beside this module."""

from __future__ import annotations

from pathlib import Path

from deploy.dashboards.grafana import to_json
from deploy.dashboards.overview import OVERVIEW

FILE = Path(__file__).parent / "rayloom-overview.json"

if __name__ == "__main__":
    FILE.write_text(to_json(OVERVIEW), encoding="utf-8")
    print(f"wrote {FILE}")
