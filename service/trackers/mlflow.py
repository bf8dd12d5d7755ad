"""Write a run to an MLflow tracking server through its REST API, without the package `mlflow`.

The server chooses the id of each MLflow run, so this module finds the MLflow run of a Rayloom run
by a tag with the Rayloom run's id.
"""

from __future__ import annotations

import os
import time
from typing import Any

from service.config.sections import MlflowSettings
from service.trackers.tracker import Point

TIMEOUT_S = 20.0
TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
TAG = "rayloom.run_id"


class Mlflow:
    """The tracker for MLflow, which sends one request for each point.

    If a point is sent again, the request has the same timestamps as the first time.
    """

    def __init__(self, settings: MlflowSettings, *, run_id: str, name: str) -> None:
        """Find the run on the MLflow server, or create it.

        Raises: httpx.HTTPError; MlflowRefused.
        """
        # Imported here, because it takes a tenth of a second and only this tracker uses it.
        import httpx

        token = os.environ.get(TOKEN_VARIABLE)
        self._client = httpx.Client(
            base_url=f"{settings.url.rstrip('/')}/api/2.0/mlflow/",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=TIMEOUT_S,
        )
        experiment = self._experiment(settings.experiment)
        self._run_id = self._run(experiment, run_id=run_id, name=name)

    def write(self, point: Point) -> None:
        """Send a point. Raises: httpx.HTTPError; MlflowRefused."""
        curves = {"term": float(point.term), **point.curves}
        stamp = {"timestamp": round(point.wall_time * 1000), "step": point.step}
        metrics = [{"key": key, "value": value, **stamp} for key, value in curves.items()]
        self._ask("POST", "runs/log-batch", {"run_id": self._run_id, "metrics": metrics})

    def flush(self) -> None:
        """Do nothing, because `write` waits for the server's answer."""

    def close(self, *, is_ended: bool) -> None:
        """Mark the run as finished on the server, if `is_ended`, and close the connection.

        Raises: httpx.HTTPError; MlflowRefused.
        """
        try:
            if is_ended:
                ended = {"status": "FINISHED", "end_time": round(time.time() * 1000)}
                self._ask("POST", "runs/update", {"run_id": self._run_id, **ended})
        finally:
            self._client.close()

    def _experiment(self, name: str) -> str:
        try:
            found = self._ask("GET", "experiments/get-by-name", {"experiment_name": name})
            return str(found["experiment"]["experiment_id"])
        except MlflowRefused as refusal:
            if refusal.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return str(self._ask("POST", "experiments/create", {"name": name})["experiment_id"])

    def _run(self, experiment: str, *, run_id: str, name: str) -> str:
        found = self._ask(
            "POST",
            "runs/search",
            {
                "experiment_ids": [experiment],
                "filter": f"tags.`{TAG}` = '{run_id}'",
                "max_results": 1,
            },
        )
        if runs := found.get("runs"):
            known = str(runs[0]["info"]["run_id"])
            self._ask("POST", "runs/update", {"run_id": known, "status": "RUNNING"})
            return known
        made = self._ask(
            "POST",
            "runs/create",
            {
                "experiment_id": experiment,
                "run_name": name,
                "start_time": round(time.time() * 1000),
                "tags": [{"key": TAG, "value": run_id}],
            },
        )
        return str(made["run"]["info"]["run_id"])

    def _ask(self, method: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the MLflow server, and return the JSON object of the answer.

        Raises: httpx.HTTPError; MlflowRefused if the answer is not a success or not a JSON object.
        """
        if method == "GET":
            answer = self._client.get(route, params=body)
        else:
            answer = self._client.post(route, json=body)
        try:
            said = answer.json()
        except ValueError:
            # A proxy in front of the server has answered, not the server.
            said = None
        if not answer.is_success or not isinstance(said, dict):
            code = str(said.get("error_code", "")) if isinstance(said, dict) else ""
            shown = f"status {answer.status_code} {code}".strip()
            wanted = "expected success; check the credentials, and MLflow's log"
            if answer.is_success:
                wanted = (
                    "expected a JSON object; check that trackers.mlflow.url is MLflow's address, "
                    "not a proxy's"
                )
            raise MlflowRefused(
                f"{method} {route}: MLflow answered with {shown}, {wanted}", code=code
            )
        return said


class MlflowRefused(Exception):
    """Raised if the MLflow server refuses a request."""

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(text)
        self.code = code
        """The server's error code, such as RESOURCE_DOES_NOT_EXIST; empty if it sent none."""
