"""Checks of manifests that an API server and the KubeRay operator would make, without either.

A check that fails raises an error that names the wrong field. Unknown fields are errors in all
checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from worlds.servers.helm_chart import (
    CLUSTER_FIELDS,
    Manifest,
    Values,
    cluster_of,
    pod_templates,
    ray_object,
    rendered,
)

KUBERNETES = "1.36"
MAX_NAME = 47
_SUBSET = Path(__file__).parent / "kuberay_subset.yaml"
_CUSTOM = Path(__file__).parent / "custom_kinds.yaml"
# Environment variables that the operator sets itself or refuses.
_OPERATORS_VARIABLES = {
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_REDIS_ADDRESS",
    "REDIS_PASSWORD",
    "RAY_enable_autoscaler_v2",
}


def check_core(manifests: Sequence[Manifest]) -> int:
    """Validate all objects except KubeRay's. Return how many are core objects or pod templates."""
    custom = yaml.safe_load(_CUSTOM.read_text("utf-8"))
    elsewhere = {*CLUSTER_FIELDS, *custom["$defs"]}
    own = [manifest for manifest in manifests if manifest["kind"] not in elsewhere]
    for manifest in manifests:
        if manifest["kind"] in custom["$defs"]:
            kind = {**custom, "$ref": f"#/$defs/{manifest['kind']}"}
            Draft202012Validator(kind).validate(manifest)
    templates = [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": template,
        }
        for name, template in pod_templates(manifests).items()
    ]
    for manifest in (*own, *templates):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return len(own) + len(templates)


def check_subset(manifests: Sequence[Manifest]) -> None:
    """Check that the KubeRay object has only fields of kuberay_subset.yaml."""
    found = ray_object(manifests)
    schema = yaml.safe_load(_SUBSET.read_text("utf-8"))
    kind = {**schema, "$ref": f"#/$defs/{found['kind']}"}
    Draft202012Validator(kind).validate(found)


def check_operator_schema(manifests: Sequence[Manifest], folder: Path) -> None:
    """Check the KubeRay object against the operator's own schema, with unknown fields forbidden.

    folder: directory with the schemas of the operator.
    """
    found = ray_object(manifests)
    Draft202012Validator(_operator_schema(folder, found["kind"])).validate(found)


@cache
def _operator_schema(folder: Path, kind: str) -> dict[str, Any]:
    text = (folder / f"ray.io_{kind.lower()}s.yaml").read_text("utf-8")
    definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    strict: dict[str, Any] = _strict(version["schema"]["openAPIV3Schema"])
    # The API server defines the metadata; the schema only says that it is an object.
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    if strict.get("x-kubernetes-int-or-string") is True:
        strict.pop("type", None)
    is_open = strict.get("x-kubernetes-preserve-unknown-fields") is True
    has_fields = isinstance(strict.get("properties"), dict) and strict.get("type") == "object"
    if has_fields and not is_open:
        strict.setdefault("additionalProperties", False)
    return strict


def check_operator_rules(manifests: Sequence[Manifest]) -> None:
    """Check the rules that the operator's code applies beyond its schema."""
    found = ray_object(manifests)
    kind, name, spec = found["kind"], found["metadata"]["name"], found["spec"]
    assert len(name) <= MAX_NAME and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
    cluster = cluster_of(manifests)
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert "headService" not in head
    # Only a RayCluster object may have an upgrade strategy, not the cluster of another object.
    assert ("upgradeStrategy" in cluster) == (kind == "RayCluster")
    for group in (head, *workers):
        assert not {"labels", "redis-password"} & set(group["rayStartParams"])
        # Ray's resources may be given in only one place, and the chart uses rayStartParams.
        assert "resources" not in group
        _check_pod(group["template"]["spec"])
    names = [group["groupName"] for group in workers]
    assert len(set(names)) == len(names)
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"], group["groupName"]
    ports = {port["name"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert "serve" in ports
    if cluster["authOptions"]["mode"] == "token":
        major, minor, _ = (int(part) for part in cluster["rayVersion"].split("."))
        assert (major, minor) >= (2, 52)
    assert "enableK8sTokenAuth" not in cluster["authOptions"]
    store = cluster.get("gcsFaultToleranceOptions", {})
    assert ("storage" in store) == (store.get("backend") == "rocksdb")
    if kind == "RayJob":
        assert spec["submissionMode"] == "HTTPMode" and "clusterSelector" not in spec
        # `suspend` requires shutdownAfterJobFinishes, and forbids deletion rules.
        assert spec["shutdownAfterJobFinishes"] is True and "deletionStrategy" not in spec


def _check_pod(spec: Manifest) -> None:
    container = spec["containers"][0]
    assert container["name"].startswith("ray-")
    assert not {variable["name"] for variable in container["env"]} & _OPERATORS_VARIABLES
    assert all(len(port["name"]) <= 15 for port in container["ports"])
    numbers = [port["containerPort"] for port in container["ports"]]
    assert len(set(numbers)) == len(numbers)


def checked(values: Values, *files: Path) -> list[Manifest]:
    """Render the objects, and make the checks of an API server and of the operator."""
    manifests = rendered(values, *files)
    check_core(manifests)
    check_subset(manifests)
    check_operator_rules(manifests)
    return manifests
