"""Tests of the chart with a real API server and with Helm 3 and Helm 4.

They are optional (see `worlds.servers.kube_api_server`). There is no kubelet, so no pod runs.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.servers.helm_binary import HELM_3, HELM_4, Pinned, helm_binary
from worlds.servers.helm_chart import CHART, CPU_DEV, HelmError, Values, helm, unpack_chart
from worlds.servers.kube_api_server import ApiServer, api_server

from service import VERSION

NUMBERS = itertools.count()
PLURALS = {"service": "rayservices", "job": "rayjobs", "cluster": "rayclusters"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


class Release:
    """A release in its own namespace."""

    def __init__(self, server: ApiServer, pinned: Pinned, mode: str) -> None:
        self.server, self.mode, self.binary = server, mode, helm_binary(pinned)
        # The name is all digits, which YAML would read as a number.
        self.namespace = f"2026{next(NUMBERS)}"
        body = {"metadata": {"name": self.namespace}}
        server.client.post("/api/v1/namespaces", json=body).raise_for_status()

    def run(self, command: str, *arguments: str) -> str:
        options = [*self.server.options, "--namespace", self.namespace]
        return helm(command, "demo", *arguments, *options, binary=self.binary)

    def apply(self, command: str, values: Values, *, chart: Path = CHART) -> None:
        # An API server before 1.21 does not know the API version of the budgets.
        known = self.server.find("/apis/policy/v1") is not None
        whole = {"mode": self.mode, "podDisruptionBudgets": {"enabled": known}, **values}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(whole))
            file.flush()
            own = str(chart / CPU_DEV.name)
            self.run(command, str(chart), "--values", own, "--values", file.name)

    def ray(self) -> dict[str, Any]:
        path = f"/apis/ray.io/v1/namespaces/{self.namespace}/{PLURALS[self.mode]}/demo-rayloom"
        found = self.server.find(path)
        assert found is not None
        return found

    def secrets(self) -> dict[str, Any]:
        listed = self.server.find(f"/api/v1/namespaces/{self.namespace}/secrets")
        assert listed is not None
        return {
            item["metadata"]["name"]: item["data"]
            for item in listed["items"]
            if item["metadata"]["name"].startswith("demo-rayloom-")
        }

    def names(self, kind: str) -> set[str]:
        return self.server.names(f"/api/v1/namespaces/{self.namespace}/{kind}")


@pytest.mark.parametrize("pinned", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize("mode", PLURALS)
def test_a_release_is_installed_upgraded_rolled_back_and_uninstalled(
    server: ApiServer, pinned: Pinned, mode: str
) -> None:
    release = Release(server, pinned, mode)
    release.apply("install", {})
    first, keys = release.ray(), release.secrets()
    assert len(keys) == (1 if mode == "job" else 2)

    # The same upgrade again changes nothing, not even a key.
    release.apply("upgrade", {})
    assert release.ray()["spec"] == first["spec"] and release.secrets() == keys

    pods = {"image": {"tag": "9.9.9-cpu"}}
    release.apply("upgrade", pods)
    assert "9.9.9-cpu" in json.dumps(release.ray()["spec"])
    assert release.secrets() == keys
    release.run("rollback", "1")
    assert release.ray()["spec"] == first["spec"] and release.secrets() == keys

    release.apply("upgrade", {"suspend": True})
    assert release.ray()["spec"]["suspend"] is True
    release.apply("upgrade", {**pods, "auth": {"rotation": "again"}})
    assert not release.ray()["spec"].get("suspend")
    rotated = release.secrets()
    assert set(rotated) == set(keys) and all(rotated[name] != keys[name] for name in keys)

    release.run("uninstall")
    assert not release.secrets()
    assert not release.names("services")
    # Runs and their database outlive the release, and the next release finds them.
    claims = {"demo-rayloom-checkpoints", "demo-rayloom-database"}
    assert release.names("persistentvolumeclaims") == claims
    release.apply("install", {})
    assert release.names("persistentvolumeclaims") == claims
    release.run("uninstall")


@pytest.mark.parametrize("pinned", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize("mode", PLURALS)
def test_a_release_of_the_previous_version_is_upgraded_and_rolled_back(
    server: ApiServer, pinned: Pinned, mode: str, tmp_path: Path
) -> None:
    release = Release(server, pinned, mode)
    release.apply("install", {}, chart=unpack_chart(tmp_path))
    first, keys = release.ray(), release.secrets()
    claims = release.names("persistentvolumeclaims")
    # The upgrade changes configuration and pods, which the chart refuses while the service runs.
    release.apply("upgrade", {"suspend": True})
    release.apply("upgrade", {})
    assert f"{VERSION}-cpu" in json.dumps(release.ray()["spec"])
    assert release.secrets() == keys and release.names("persistentvolumeclaims") == claims
    release.run("rollback", "1")
    assert release.ray()["spec"] == first["spec"] and release.secrets() == keys
    release.run("uninstall")


def test_the_server_refuses_unknown_fields(server: ApiServer, tmp_path: Path) -> None:
    broken = tmp_path / "rayloom"
    broken.mkdir()
    for file in CHART.rglob("*"):
        if file.is_file():
            place = broken / file.relative_to(CHART)
            place.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text("utf-8")
            place.write_text(text.replace("minAvailable:", "minAvailabel:").replace(
                "targetPort:", "targetPrt:"))  # fmt: skip
    with pytest.raises(HelmError, match="targetPrt"):
        helm(
            "install", "broken", broken, "--values", CPU_DEV, *server.options,
            "--set=podDisruptionBudgets.enabled=false",
        )  # fmt: skip


@pytest.mark.parametrize("pinned", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_a_running_service_is_not_replaced_or_changed_in_both_parts_at_once(
    server: ApiServer, pinned: Pinned
) -> None:
    release = Release(server, pinned, "service")
    release.apply("install", {})
    both: Values = {"image": {"tag": "9.9.9-cpu"}, "config": {"run": {"steps": 7}}}
    with pytest.raises(HelmError, match="both its configuration and its pods change"):
        release.apply("upgrade", both)
    release.mode = "cluster"
    with pytest.raises(HelmError, match="RayService demo-rayloom of this release runs"):
        release.apply("upgrade", {})
    release.mode = "service"
    release.apply("upgrade", {"suspend": True})
    release.mode = "cluster"
    release.apply("upgrade", {})
    path = f"/apis/ray.io/v1/namespaces/{release.namespace}/rayservices"
    assert not server.names(path)
    release.run("uninstall")
