"""The table of docs/deploy.md on what a change of each value does, held to what it changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml
from worlds.servers.helm_chart import CHART, Manifest, ray_object, rendered

DOCUMENT = CHART.parent / "docs" / "deploy.md"
# | `a`, `b` | yes | | | in place, and why |
EFFECT = r" \| (in place|at the next resume|refused)"
ROW = re.compile(r"^\| (`[^|]+)" + 3 * r" \| ?(yes|)" + EFFECT)
# Keys of the user's own choice: the map as a whole is the value.
OPEN_MAPS = (
    "labels",
    "annotations",
    "operatorLabels",
    "revisions",
    "commonLabels",
    "rayStartParams",
    "dataSource",
    "selector",
)


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """As helm lays values over others."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value
    return result


REDIS = {"gcs": {"backend": "redis", "redis": {"address": "redis:6379", "existingSecret": "a"}}}
ROCKSDB = {"gcs": {"backend": "rocksdb"}}
HUB_MODEL = {"config": {"model": {"tiny": None, "path": "a/b"}}}
CACHE = {**HUB_MODEL, "modelCache": {"enabled": True}}
POSTGRES = {"database": {"existingSecret": "a"}}
FILES = {"workspace": {"files": {"a": "b"}}}
INGRESS = {"ingress": {"enabled": True}}
ROUTE = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}
POLICY = {"networkPolicy": {"enabled": True, "operatorNamespace": "a"}}
PEER = {"podSelector": {}}
MONITOR = {"monitoring": {"podMonitor": {"enabled": True}}}
DASHBOARDS = {"monitoring": {"dashboards": {"enabled": True}}}
RULES = {"monitoring": {"rules": {"enabled": True}}}
JOB = {"mode": "job"}
GPUS = {
    "config": {"inference": {"gpus_per_replica": 1}, "trainer": {"gpus_per_rank": 1}},
    "trainer": {"gpus": 2},
    "inference": {"gpus": 1},
}
MOUNT = {"volumes": [{"name": "v", "emptyDir": {}}]}
CONTAINER = [{"name": "c", "image": "i"}]

# Of each value: another one, and the values under which it means something.
CHANGES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "mode": ("job", {}),
    "suspend": (True, {}),
    "nameOverride": ("other", {}),
    "fullnameOverride": ("other", {}),
    "commonLabels": ({"a": "b"}, {}),
    "labels": ({"a": "b"}, {}),
    "annotations": ({"a": "b"}, {}),
    "image.repository": ("other", {}),
    "image.tag": ("other", {}),
    "image.digest": ("sha256:" + "0" * 64, {}),
    "image.pullPolicy": ("Always", {}),
    "imagePullSecrets": ([{"name": "a"}], {}),
    "rayVersion": ("2.61.0", {}),
    "config": ({"run": {"steps": 7}}, {}),
    "config.run.name": ("other", {}),
    "config.service.port": (8001, {}),
    "config.metrics.port": (9401, {}),
    "auth.rotation": ("other", {}),
    "auth.api.existingSecret": ("a", {}),
    "auth.api.key": ("other", {}),
    "auth.ray.mode": ("disabled", {}),
    "auth.ray.existingSecret": ("a", {}),
    "gcs.backend": ("rocksdb", {}),
    "gcs.redis.address": ("other:6379", REDIS),
    "gcs.redis.existingSecret": ("b", REDIS),
    "gcs.redis.key": ("other", REDIS),
    "gcs.storage.size": ("2Gi", ROCKSDB),
    "gcs.storage.storageClass": ("a", ROCKSDB),
    "podDisruptionBudgets.enabled": (False, {}),
    "job.backoffLimit": (9, JOB),
    "job.activeDeadlineSeconds": (9, JOB),
    "job.ttlSecondsAfterFinished": (9, JOB),
    "drain.timeoutSeconds": (9, {}),
    "pods.env": ([{"name": "A", "value": "b"}], {}),
    "pods.envFrom": ([{"secretRef": {"name": "a"}}], {}),
    "pods.volumes": (MOUNT["volumes"], {}),
    "pods.volumeMounts": ([{"name": "v", "mountPath": "/v"}], {"pods": MOUNT}),
    "pods.initContainers": (CONTAINER, {}),
    "pods.sidecars": (CONTAINER, {}),
    "pods.annotations": ({"a": "b"}, {}),
    "pods.labels": ({"a": "b"}, {}),
    "pods.nodeSelector": ({"a": "b"}, {}),
    "pods.tolerations": ([{"key": "a"}], {}),
    "pods.affinity": ({"nodeAffinity": {}}, {}),
    "pods.topologySpreadConstraints": (
        [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
        {},
    ),
    "pods.priorityClassName": ("a", {}),
    "pods.runtimeClassName": ("a", {}),
    "pods.schedulerName": ("a", {}),
    "pods.dnsConfig": ({"searches": ["a.example"]}, {}),
    "pods.hostAliases": ([{"ip": "10.0.0.1", "hostnames": ["a"]}], {}),
    "pods.dnsPolicy": ("Default", {}),
    "pods.hostNetwork": (True, {}),
    "pods.readinessProbe": ({"periodSeconds": 30}, {}),
    "pods.livenessProbe": ({"periodSeconds": 30}, {}),
    "pods.startupProbe": ({"periodSeconds": 30}, {}),
    "pods.capabilities": (
        {"add": ["IPC_LOCK"]},
        {"pods": {"podSecurityContext": {"runAsUser": 0}}},
    ),
    "pods.resourceClaims": ([{"name": "a", "resourceClaimTemplateName": "b"}], {}),
    "pods.podSecurityContext.runAsUser": (None, {}),
    "pods.podSecurityContext.runAsGroup": (2000, {}),
    "pods.podSecurityContext.fsGroup": (2000, {}),
    "pods.podSecurityContext.fsGroupChangePolicy": ("Always", {}),
    "pods.rayStartParams": ({"node-manager-port": "6380"}, {}),
    "pods.gpuResource": ("amd.com/gpu", GPUS),
    "pods.readOnlyRootFilesystem": (False, {}),
    "pods.tmpSize": ("1Gi", {}),
    "pods.homeSize": ("1Gi", {}),
    **{
        f"{group}.{key}": (value, {})
        for group in ("head", "inference", "trainer", "environment")
        for key, value in {
            "resources.requests.cpu": "3",
            "resources.requests.memory": "1Gi",
            "resources.limits.memory": "9Gi",
            "shmSize": "512Mi",
        }.items()
    },
    **{
        f"{group}.{key}": (value, {})
        for group in ("inference", "trainer", "environment")
        for key, value in {"replicas": 2, "rayCpus": 3}.items()
    },
    **{f"{group}.gpus": (4, GPUS) for group in ("inference", "trainer")},
    "environment.gpus": (1, {"mode": "cluster"}),
    "checkpoints.existingClaim": ("a", {}),
    "checkpoints.size": ("9Gi", {}),
    "checkpoints.storageClass": ("a", {}),
    "checkpoints.accessModes": (["ReadWriteMany"], {"database": {"storageClass": "a"}}),
    "checkpoints.keep": (False, {}),
    "checkpoints.mountPath": ("/other", {}),
    **{
        f"{claim}.{key}": (value, CACHE if claim == "modelCache" else {})
        for claim in ("checkpoints", "database", "modelCache")
        for key, value in {
            "annotations": {"a": "b"},
            "dataSource": {"kind": "PersistentVolumeClaim", "name": "a"},
            "labels": {"a": "b"},
            "selector": {"matchLabels": {"a": "b"}},
            "volumeName": "a",
        }.items()
    },
    "database.existingSecret": ("a", {}),
    "database.existingClaim": ("a", {}),
    "database.key": ("other", POSTGRES),
    "database.size": ("9Gi", {}),
    "database.storageClass": ("a", {}),
    "database.accessModes": (["ReadWriteOncePod"], {}),
    "database.keep": (False, {}),
    "modelCache.enabled": (True, HUB_MODEL),
    "modelCache.existingClaim": ("a", CACHE),
    "modelCache.size": ("9Gi", CACHE),
    "modelCache.storageClass": ("a", CACHE),
    "modelCache.accessModes": (["ReadWriteMany"], CACHE),
    "modelCache.keep": (False, CACHE),
    "modelCache.mountPath": ("/other", CACHE),
    "modelCache.downloadTimeoutSeconds": (9, CACHE),
    "modelCache.revisions": ({"a/b": "0" * 40}, CACHE),
    "hub.existingSecret": ("a", {}),
    "hub.key": ("other", {"hub": {"existingSecret": "a"}}),
    "workspace.files": ({"a": "c"}, FILES),
    "workspace.existingConfigMap": ("a", {}),
    "workspace.existingClaim": ("a", {}),
    "workspace.mountPath": ("/other", FILES),
    "service.type": ("NodePort", {}),
    "service.annotations": ({"a": "b"}, {}),
    "service.loadBalancerSourceRanges": (["10.0.0.0/8"], {"service": {"type": "LoadBalancer"}}),
    "ingress.enabled": (True, {}),
    "ingress.className": ("a", INGRESS),
    "ingress.annotations": ({"a": "b"}, INGRESS),
    "ingress.host": ("a.example.org", INGRESS),
    "ingress.hosts": (["a.example.org"], INGRESS),
    "ingress.path": ("/rl", INGRESS),
    "ingress.paths": (["/rl"], INGRESS),
    "ingress.tlsSecret": ("a", merged(INGRESS, nested("ingress.host", "a.example.org"))),
    "httpRoute.enabled": (True, {"httpRoute": {"parentRefs": [{"name": "a"}]}}),
    "httpRoute.annotations": ({"a": "b"}, ROUTE),
    "httpRoute.parentRefs": ([{"name": "b"}], ROUTE),
    "httpRoute.hostnames": (["a.example.org"], ROUTE),
    "kueue.queueName": ("a", {}),
    "kueue.priorityClass": ("a", {}),
    "extraManifests": (
        [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}],
        {},
    ),
    "networkPolicy.enabled": (True, {"networkPolicy": {"operatorNamespace": "a"}}),
    "networkPolicy.operatorNamespace": ("b", POLICY),
    "networkPolicy.operatorLabels": ({"a": "b"}, POLICY),
    "networkPolicy.apiFrom": ([PEER], POLICY),
    "networkPolicy.metricsFrom": ([PEER], POLICY),
    "networkPolicy.egress": ([{}], POLICY),
    "networkPolicy.environmentEgress": ([{}], POLICY),
    "monitoring.podMonitor.enabled": (True, {}),
    "monitoring.podMonitor.namespace": ("a", MONITOR),
    "monitoring.podMonitor.interval": ("60s", MONITOR),
    "monitoring.podMonitor.scrapeTimeout": ("9s", MONITOR),
    "monitoring.podMonitor.labels": ({"a": "b"}, MONITOR),
    "monitoring.podMonitor.dropSeries": ("a", MONITOR),
    "monitoring.podMonitor.seriesLabels": ({"cluster": "a"}, MONITOR),
    "monitoring.rules.enabled": (True, {}),
    "monitoring.rules.namespace": ("a", RULES),
    "monitoring.rules.labels": ({"a": "b"}, RULES),
    "monitoring.rules.disabled": (["RayloomEngineMissing"], RULES),
    "monitoring.rules.alertLabels": ({"team": "rl"}, RULES),
    "monitoring.rules.labelsOf": ({"RayloomEngineMissing": {"severity": "info"}}, RULES),
    "monitoring.rules.runbooks": ("https://wiki.example/rayloom", RULES),
    "monitoring.dashboards.enabled": (True, {}),
    "monitoring.dashboards.namespace": ("a", DASHBOARDS),
    "monitoring.dashboards.labels": ({"a": "b"}, DASHBOARDS),
    "monitoring.dashboards.annotations": ({"a": "b"}, DASHBOARDS),
    "test.task": ({"seed": 1}, {}),
    "test.timeoutSeconds": (9, {}),
    "serviceAccount.create": (False, {}),
    "serviceAccount.name": ("a", {}),
    "serviceAccount.annotations": ({"a": "b"}, {}),
}

# What the kinds of objects that change do not tell.
RULED = {
    # The chart does not replace what runs (test_helm_upgrades.py), nor Kubernetes a claim's class.
    "refused": {
        "mode",
        "nameOverride",
        "fullnameOverride",
        *(
            f"{claim}.{key}"
            for claim in ("checkpoints", "database", "modelCache")
            for key in ("storageClass", "accessModes", "dataSource", "volumeName", "selector")
        ),
    },
    # Read when a pod starts; or by the operator when it starts a job.
    "at the next resume": {"auth.rotation", "workspace.files", "job.*"},
}


def leaves(node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in node.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value and key not in OPEN_MAPS:
            yield from leaves(value, inner)
        else:
            yield inner


def parts(manifests: list[Manifest]) -> tuple[Any, Any, Any]:
    """The run's arguments, the cluster, and all the rest without keys that each rendering draws."""
    own = json.loads(json.dumps(ray_object(manifests)))
    for digest in [each for each in own["metadata"]["annotations"] if each.startswith("rayloom/")]:
        del own["metadata"]["annotations"][digest]
    spec = own["spec"]
    run = spec.pop("serveConfigV2", None) or spec.pop("entrypoint", None)
    cluster = spec.pop("rayClusterConfig", None) or spec.pop("rayClusterSpec", None)
    if own["kind"] == "RayCluster":
        cluster, own["spec"] = spec, {}
    rest = [own]
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            rest.append({**manifest, "data": sorted(manifest["data"])})
        # `helm test` is told what ought to run; that is no effect of its own.
        elif not is_told(manifest) and not manifest["apiVersion"].startswith("ray.io/"):
            rest.append(manifest)
    return run, cluster, sorted(json.dumps(each, sort_keys=True) for each in rest)


def is_told(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == "Pod")


def effect(path: str) -> tuple[tuple[bool, bool, bool], str]:
    """What a change of the value changes (the run, pods, other objects), and what comes of it."""
    value, under = CHANGES[path]
    before, after = (rendered(values) for values in (under, merged(under, nested(path, value))))
    differs = [old != new for old, new in zip(parts(before), parts(after), strict=True)]
    if path.startswith("test."):
        pods = [[each for each in objects if is_told(each)] for objects in (before, after)]
        differs[2] = pods[0] != pods[1]
    run, pods_differ, others = differs
    for ruled, patterns in RULED.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            return (run, pods_differ, others), ruled
    if run and pods_differ:
        return (run, pods_differ, others), "refused"
    return (run, pods_differ, others), "at the next resume" if pods_differ else "in place"


def documented() -> dict[str, tuple[tuple[bool, bool, bool], str]]:
    """By the pattern of a value, as it stands in the table."""
    rows = {}
    for line in DOCUMENT.read_text("utf-8").splitlines():
        if found := ROW.match(line):
            names, *marks, said = found.groups()
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in rows, name
                rows[name] = ((marks[0] == "yes", marks[1] == "yes", marks[2] == "yes"), said)
    return rows


def row_of(path: str) -> tuple[tuple[bool, bool, bool], str]:
    """The row that names the value itself, or else the only one whose pattern it fits."""
    rows = documented()
    if path in rows:
        return rows[path]
    [pattern] = [pattern for pattern in rows if fnmatchcase(path, pattern)]
    return rows[pattern]


def test_every_value_stands_in_the_table_and_is_tried() -> None:
    values = set(leaves(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))))
    tried = {path for path in CHANGES if not path.startswith("config.")}
    assert tried == values
    for path in values:
        row_of(path)
    known = values | set(CHANGES)
    for pattern in documented():
        assert any(fnmatchcase(path, pattern) for path in known), pattern


@pytest.mark.proof
@pytest.mark.chart
@pytest.mark.parametrize("path", CHANGES)
def test_a_change_does_what_the_table_says(path: str) -> None:
    assert effect(path) == row_of(path)
