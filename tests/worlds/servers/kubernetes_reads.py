"""A read-only Kubernetes API server, with the objects that helm looks up before it renders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worlds.servers.helm_chart import Manifest
from worlds.servers.json_server import answering

# By API version: the kinds that helm looks up, and those that the server only has to know.
KINDS = {
    "v1": ["Secret", "ConfigMap", "PersistentVolumeClaim", "Pod", "Service", "ServiceAccount"],
    "policy/v1": ["PodDisruptionBudget"],
    "ray.io/v1": ["RayService", "RayJob", "RayCluster"],
}


def _base(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _answers(objects: Sequence[Manifest]) -> dict[str, Any]:
    """Return the answer for each path."""
    groups = []
    for version in KINDS:
        group, slash, number = version.partition("/")
        if slash:
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kinds in KINDS.items():
        answers[_base(version)] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": [
                {
                    "name": f"{kind.lower()}s",
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["get", "list"],
                }
                for kind in kinds
            ],
        }
        for kind in kinds:
            place = f"{_base(version)}/namespaces/default/{kind.lower()}s"
            found = [each for each in objects if each["kind"] == kind]
            answers[place] = {"kind": f"{kind}List", "apiVersion": version, "items": found}
            answers |= {f"{place}/{each['metadata']['name']}": each for each in found}
    return answers


@contextmanager
def cluster_with(objects: Sequence[Manifest]) -> Iterator[str]:
    """Serve a cluster whose default namespace has these objects. Yields: the address."""
    answers = _answers(objects)
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}

    def answer(_method: str, path: str, _token: str, _body: Any) -> tuple[int, Any]:
        found = answers.get(path.partition("?")[0])
        return (404, {**missing, "code": 404}) if found is None else (200, found)

    with answering(answer) as address:
        yield address
