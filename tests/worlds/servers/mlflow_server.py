"""An MLflow tracking server on loopback: the routes that a run uses, with data in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from worlds.servers.json_server import answering

MISSING = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}


@dataclass
class MlflowServer:
    url: str = ""
    is_away: bool = False
    """Whether it answers like a proxy whose server cannot be reached."""
    num_refused: int = 0
    tokens: set[str] = field(default_factory=set)
    experiments: dict[str, str] = field(default_factory=dict)
    """Ids by name."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By id: name, experiment, status and tags."""
    metrics: dict[str, set[tuple[str, int, int, float]]] = field(default_factory=dict)
    """By run: key, step, timestamp and value of each metric; a set, as in MLflow's SQL store."""

    def curve(self, key: str, *, run: str = "run-0") -> dict[int, list[float]]:
        """Return a metric's values by step, in the order of their times."""
        found: dict[int, list[float]] = {}
        for each, step, _, value in sorted(self.metrics[run].copy(), key=lambda metric: metric[2]):
            if each == key:
                found.setdefault(step, []).append(value)
        return found

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        self.tokens.add(token)
        if self.is_away:
            self.num_refused += 1
            return 503, "<html>away</html>"
        address = urlsplit(path)
        route = address.path.removeprefix("/api/2.0/mlflow/")
        match method, route:
            case "GET", "experiments/get-by-name":
                [name] = parse_qs(address.query)["experiment_name"]
                known = self.experiments.get(name)
                return (200, {"experiment": {"experiment_id": known}}) if known else MISSING
            case "POST", "experiments/create":
                number = self.experiments[body["name"]] = str(len(self.experiments) + 1)
                return 200, {"experiment_id": number}
            case "POST", "runs/search":
                return 200, self._search(body)
            case "POST", "runs/create":
                tags = {tag["key"]: tag["value"] for tag in body["tags"]}
                run_id = f"run-{len(self.runs)}"
                self.runs[run_id] = {
                    "name": body["run_name"],
                    "experiment": body["experiment_id"],
                    "status": "RUNNING",
                    "tags": tags,
                }
                self.metrics[run_id] = set()
                return 200, {"run": {"info": {"run_id": run_id}}}
            case "POST", "runs/update":
                self.runs[body["run_id"]]["status"] = body["status"]
                return 200, {"run_info": {}}
            case "POST", "runs/log-batch":
                assert len(body["metrics"]) <= 1000
                self.metrics[body["run_id"]] |= {
                    (each["key"], each["step"], each["timestamp"], each["value"])
                    for each in body["metrics"]
                }
                return 200, {}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": path}

    def _search(self, body: Any) -> dict[str, Any]:
        wanted = re.fullmatch(r"tags\.`([\w.]+)` = '([^']*)'", body["filter"])
        assert wanted is not None
        found = [
            run_id
            for run_id, run in self.runs.items()
            if run["experiment"] in body["experiment_ids"]
            and run["tags"].get(wanted[1]) == wanted[2]
        ]
        # As the real server does, omit an empty list.
        runs = [{"info": {"run_id": run_id}} for run_id in found[: body["max_results"]]]
        return {"runs": runs} if runs else {}


@contextmanager
def mlflow_server() -> Iterator[MlflowServer]:
    server = MlflowServer()
    with answering(server.answer) as server.url:
        yield server
