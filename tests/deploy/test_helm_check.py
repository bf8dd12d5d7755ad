"""Tests of helm/files/check.py, which `helm test` runs, with scripted answers over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
from ray.serve.schema import ApplicationDetails, ServeInstanceDetails
from ray.util.state.common import ListApiResponse, NodeState
from worlds.servers.helm_chart import (
    Manifest,
    arguments_of,
    cluster_of,
    in_mode,
    one,
    ray_object,
    rendered,
)
from worlds.servers.json_server import answering

from service.api.schemas import RolloutAnswer, SampleAnswer, SubmitBody

pytestmark = [pytest.mark.proof, pytest.mark.chart]

KEY, TOKEN = "the key of the API", "the token of Ray"


@dataclass
class Release:
    """The answers of a working release; a test changes fields to simulate a fault."""

    manifests: list[Manifest]
    is_ready: bool = True
    asks_for_key: bool = True
    metrics: str = "rayloom_train_steps_total 3\n"
    outcomes: dict[str, int] = field(default_factory=lambda: {"success": 1})
    submitted: list[SubmitBody] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        cluster = cluster_of(self.manifests)
        head = (1, cluster["headGroupSpec"])
        groups = [head, *((group["replicas"], group) for group in cluster["workerGroupSpecs"])]
        self.nodes = [
            {"state": "ALIVE", "labels": dict(group["labels"])}
            for count, group in groups
            for _ in range(count)
        ]
        self.status = "RUNNING"
        has_service = ray_object(self.manifests)["kind"] == "RayService"
        self.arguments = arguments_of(self.manifests) if has_service else {}

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        """Return the status of an answer and its body, a JSON value or a text."""
        match method, path.partition("?")[0].split("/")[1:]:
            case "GET", ["readyz"]:
                return (200, "ready") if self.is_ready else (503, "starting: engines")
            case _, ["api", "v1", "rollouts", *rest]:
                if self.asks_for_key and token != KEY:
                    return 401, "no key"
                return self.rollouts(method, rest, body)
            case "GET", ["api", "v1", "environments", name]:
                return 200, {"id": name, "data_schema": {"type": "object"}}
            case "GET", ["metrics"]:
                return 200, self.metrics
            case "GET", ["api", "v0", "nodes"]:
                return (200, {"data": {"result": {"result": self.nodes}}}) if token == TOKEN else (
                    401, "no token")  # fmt: skip
            case "GET", ["api", "serve", "applications", ""]:
                config = {"args": self.arguments}
                details = {"status": self.status, "message": "", "deployed_app_config": config}
                return 200, {"applications": {"rayloom": details}}
        return 404, "nothing is here"

    def rollouts(self, method: str, rest: list[str], body: Any) -> tuple[int, Any]:
        match method, rest:
            case "POST", [""] | []:
                self.submitted.append(SubmitBody.model_validate(body))
                return 202, {}
            case "POST", [name, "cancel"]:
                self.cancelled.append(name)
                return 200, {}
            case "GET", [name] if self.submitted:
                sample = SampleAnswer(index=0, status="finished", step=None, reason=None)
                view = RolloutAnswer(
                    id=name, place=1, ahead=0, status="finished", environment="guessing",
                    batch=None, accepted_at=0.0, num_samples=1, reward=None,
                    outcomes=self.outcomes, policy_versions=None, samples=[sample],
                )  # fmt: skip
                return 200, json.loads(view.model_dump_json())
        return 404, "unknown"


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Release:
    mode = getattr(request, "param", "service")
    values = {"test": {"task": {"seed": 7}, "timeoutSeconds": 1}}
    return Release(manifests=rendered({**in_mode(mode), **values}))


@pytest.fixture
def address(release: Release) -> Iterator[str]:
    with answering(release.answer) as address:
        yield address


def checked(release: Release, address: str) -> tuple[int, str]:
    """Run the container of `helm test` with its own command, script and environment."""
    container = one(release.manifests, "Pod")["spec"]["containers"][0]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    told = json.loads(environment["RELEASE_CHECK"])
    # Here, the addresses of all Services are that of the test's server.
    told |= {name: address for name in ("api", "dashboard") if name in told}
    told["metrics"] = f"{address}/metrics"
    assert container["command"] == ["python", "-c"]
    done = subprocess.run(
        [sys.executable, "-c", *container["args"]],
        env={
            **os.environ,
            "RELEASE_CHECK": json.dumps(told),
            "RAYLOOM_API_KEY": KEY,
            "RAY_AUTH_TOKEN": TOKEN,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_working_release_passes_and_its_task_is_cancelled(release: Release, address: str) -> None:
    code, said = checked(release, address)
    assert code == 0, said
    assert said.split() == "ok health ok rollout ok metrics ok pods ok serve".split()
    [body] = release.submitted
    assert (body.environment, body.num_samples, body.tasks[0].seed) == ("guessing", 2, 7)
    assert release.cancelled == [body.tasks[0].id]


def test_a_task_that_ends_too_late_is_cancelled_too(release: Release, address: str) -> None:
    release.outcomes = {}
    code, said = checked(release, address)
    assert code == 1 and "FAILED rollout: waited" in said
    assert release.cancelled == [release.submitted[0].tasks[0].id]


@pytest.mark.parametrize(
    ("release", "checks"),
    [("job", "ok metrics ok pods"), ("cluster", "ok pods")],
    indirect=["release"],
)
def test_without_an_api_only_metrics_and_pods_are_checked(
    release: Release, address: str, checks: str
) -> None:
    assert checked(release, address) == (0, checks.replace(" ok", "\nok") + "\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_ready": False}, "FAILED health: /readyz is 503 after 1 s: starting: engines"),
        ({"asks_for_key": False}, "FAILED health: a request without a key is answered with 404"),
        ({"outcomes": {}}, "FAILED rollout: waited 1 s for a rollout's end"),
        ({"metrics": "up 1\n"}, "FAILED metrics: "),
        ({"status": "UNHEALTHY"}, "FAILED serve: the application is UNHEALTHY with the same"),
        ({"arguments": {"run_dir": "/x"}}, "FAILED serve: the application is RUNNING with other"),
    ],
)
def test_a_fault_is_reported_and_the_other_checks_still_run(
    release: Release, address: str, change: dict[str, Any], words: str
) -> None:
    for name, value in change.items():
        setattr(release, name, value)
    code, said = checked(release, address)
    assert code == 1 and words in said
    assert len(said.splitlines()) >= 5 and said.count("FAILED") == 1


def test_pods_of_an_older_template_are_reported_by_group(release: Release, address: str) -> None:
    release.nodes[-1]["labels"] = {"rayloom/template": "older"}
    code, said = checked(release, address)
    assert code == 1 and "suspend and resume" in said
    assert "1 of the template older, 0 to be; none of the template environment, 1 to be" in said


def test_a_dead_node_does_not_count(release: Release, address: str) -> None:
    release.nodes[1]["state"] = "DEAD"
    _, said = checked(release, address)
    assert "none of the template inference, 1 to be" in said


def test_rays_answers_have_the_fields_that_the_check_reads() -> None:
    assert {"state", "labels"} <= {each.name for each in fields(NodeState)}
    assert "result" in {each.name for each in fields(ListApiResponse)}
    assert "applications" in ServeInstanceDetails.model_fields
    assert {"status", "message", "deployed_app_config"} <= set(ApplicationDetails.model_fields)


def test_the_label_of_a_template_depends_only_on_its_content(release: Release) -> None:
    def names(values: dict[str, Any]) -> list[str]:
        cluster = cluster_of(rendered(values))
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [group["labels"]["rayloom/template"] for group in groups]

    before = names({})
    assert before == names({"config": {"run": {"steps": 7}}})
    after = names({"trainer": {"env": [{"name": "A", "value": "1"}]}})
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]


def test_the_pod_of_the_check_does_not_belong_to_the_cluster(release: Release) -> None:
    pod = one(release.manifests, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "ray.io/cluster" not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "test"
