"""What Prometheus and Alertmanager are started with, beside a run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def prometheus_config(
    *, targets: Sequence[str], rules: Path, alertmanager: str, every: str = "5s"
) -> str:
    """targets, alertmanager: host:port. every: between two scrapes, and looks at the rules."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [{"job_name": "rayloom", "static_configs": [{"targets": list(targets)}]}],
    }
    return yaml.safe_dump(config, sort_keys=False)


def alertmanager_config(*, webhook: str = "") -> str:
    """webhook: a URL that is told of every alert as it fires and resolves; empty: nobody is."""
    receiver: dict[str, Any] = {"name": "all"}
    if webhook:
        receiver["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    route = {
        "receiver": "all",
        "group_by": ["run", "alertname"],
        "group_wait": "1s",
        "group_interval": "1s",
        "repeat_interval": "4h",
    }
    return yaml.safe_dump({"route": route, "receivers": [receiver]}, sort_keys=False)


def prometheus_command(program: str, directory: Path, *, address: str) -> list[str]:
    """directory: with prometheus.yml. address: host:port to listen on."""
    return [
        program, f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'prometheus'}", f"--web.listen-address={address}",
        "--log.level=warn",
    ]  # fmt: skip


def alertmanager_command(program: str, directory: Path, *, address: str) -> list[str]:
    """directory: with alertmanager.yml. address: host:port to listen on."""
    return [
        program, f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'alertmanager'}", f"--web.listen-address={address}",
        "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip
