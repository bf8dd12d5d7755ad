"""Tests of changed values: the table in docs/deploy.md, and what an upgrade keeps or refuses."""

from __future__ import annotations

import base64
import copy
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.servers.helm_binary import HELM_3, HELM_4, Pinned, helm_binary
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    GROUPS,
    MODES,
    HelmError,
    Manifest,
    Values,
    helm,
    in_proof,
    merged,
    nested,
    one,
    parsed,
    ray_object,
    rendered,
    unpack_chart,
)
from worlds.servers.kubernetes_reads import cluster_with

DOCUMENT = CHART.parent / "docs" / "deploy.md"
# | `a`, `b` | yes | | | in place, and why |
EFFECT = r" \| (in place|at the next resume|refused)"
ROW = re.compile(r"^\| (`[^|]+)" + 3 * r" \| ?(yes|)" + EFFECT)
# The user chooses the keys of these maps, so each map counts as one value.
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


both_helms = pytest.mark.parametrize("pinned", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
STEPS: Values = {"config": {"run": {"steps": 7}}}
OWN_IMAGE: Values = {"image": {"tag": "9.9.9-cpu"}}
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

# For each value, another value, and the values that it needs to have an effect.
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
        for group in GROUPS
        for key, value in {
            "resources.requests.cpu": "3",
            "resources.requests.memory": "1Gi",
            "resources.limits.memory": "9Gi",
            "shmSize": "512Mi",
        }.items()
    },
    **{
        f"{group}.{key}": (value, {})
        for group in GROUPS[1:]
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
    "extraManifests": ([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}], {}),
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

# Effects that do not follow from the kinds of the changed objects.
RULED = {
    # The chart does not replace a running object, and Kubernetes does not change a claim's class.
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
    # These are read when a pod starts, or by the operator when it starts a job.
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
    """Return the run's arguments, the cluster, and all other objects without their drawn keys."""
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
        # The pod of `helm test` contains what should run; its change is not a separate effect.
        elif not is_test_pod(manifest) and not manifest["apiVersion"].startswith("ray.io/"):
            rest.append(manifest)
    return run, cluster, sorted(json.dumps(each, sort_keys=True) for each in rest)


def is_test_pod(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == "Pod")


def effect(path: str) -> tuple[tuple[bool, bool, bool], str]:
    """Return what a changed value changes (run, pods, other objects), and when it takes effect."""
    value, under = CHANGES[path]
    before, after = (rendered(values) for values in (under, merged(under, nested(path, value))))
    differs = [old != new for old, new in zip(parts(before), parts(after), strict=True)]
    if path.startswith("test."):
        pods = [[each for each in objects if is_test_pod(each)] for objects in (before, after)]
        differs[2] = pods[0] != pods[1]
    run, pods_differ, others = differs
    for ruled, patterns in RULED.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            return (run, pods_differ, others), ruled
    if run and pods_differ:
        return (run, pods_differ, others), "refused"
    return (run, pods_differ, others), "at the next resume" if pods_differ else "in place"


def documented() -> dict[str, tuple[tuple[bool, bool, bool], str]]:
    """Return the rows of the page's table, by the pattern of a value."""
    rows = {}
    for line in DOCUMENT.read_text("utf-8").splitlines():
        if found := ROW.match(line):
            names, *marks, said = found.groups()
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in rows, name
                rows[name] = ((marks[0] == "yes", marks[1] == "yes", marks[2] == "yes"), said)
    return rows


def row_of(path: str) -> tuple[tuple[bool, bool, bool], str]:
    """Return the row that names a value, or else the only row whose pattern matches it."""
    rows = documented()
    if path in rows:
        return rows[path]
    [pattern] = [pattern for pattern in rows if fnmatchcase(path, pattern)]
    return rows[pattern]


def test_every_value_is_in_the_table_and_is_tried() -> None:
    values = set(leaves(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))))
    tried = {path for path in CHANGES if not path.startswith("config.")}
    assert tried == values
    for path in values:
        row_of(path)
    known = values | set(CHANGES)
    for pattern in documented():
        assert any(fnmatchcase(path, pattern) for path in known), pattern


@in_proof
@pytest.mark.parametrize("path", CHANGES)
def test_a_change_does_what_the_table_says(path: str) -> None:
    assert effect(path) == row_of(path)


def upgraded(
    before: Sequence[Manifest], values: Values, binary: Path | None = None
) -> list[Manifest]:
    """Return the objects of an upgrade in a cluster that contains the objects `before`."""
    with cluster_with(before) as address, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(values))
        file.flush()
        text = helm(
            "template", "demo", CHART, "--values", CPU_DEV, "--values", file.name, "--is-upgrade",
            "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address,
            binary=binary,
        )  # fmt: skip
    return parsed(text)


def keys_of(manifests: Sequence[Manifest]) -> dict[str, str]:
    return {
        f"{manifest['metadata']['name']}/{key}": base64.b64decode(value).decode()
        for manifest in manifests
        if manifest["kind"] == "Secret"
        for key, value in manifest["data"].items()
    }


@in_proof
@both_helms
def test_keys_are_kept_until_the_rotation_text_changes(pinned: Pinned) -> None:
    binary = helm_binary(pinned)
    before = rendered()
    kept = upgraded(before, {}, binary)
    assert keys_of(kept) == keys_of(before)
    rotated = upgraded(kept, {"auth": {"rotation": "2026-11-23"}}, binary)
    assert set(keys_of(rotated)) == set(keys_of(before))
    assert not set(keys_of(rotated).values()) & set(keys_of(before).values())
    again = upgraded(rotated, {"auth": {"rotation": "2026-11-23"}}, binary)
    assert keys_of(again) == keys_of(rotated)


@in_proof
def test_an_installation_into_an_empty_cluster_draws_its_keys() -> None:
    assert len(keys_of(upgraded([], {}))) == 2


@in_proof
@pytest.mark.parametrize("mode", MODES)
def test_an_upgrade_from_the_previous_version_changes_no_immutable_field(
    mode: str, tmp_path: Path
) -> None:
    old = unpack_chart(tmp_path)
    own = ("--values", old / CPU_DEV.name, "--set", f"mode={mode}")
    before = parsed(helm("template", "demo", old, *own))
    after = upgraded(before, {"mode": mode, "suspend": True})

    def fixed(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Any]:
        """Return the fields that an API server refuses to change, by kind and name."""
        kept: dict[tuple[str, str], Any] = {}
        for each in manifests:
            spec = each.get("spec", {})
            match each["kind"]:
                case "PersistentVolumeClaim":
                    held = {key: value for key, value in spec.items() if key != "resources"}
                case "Deployment" | "StatefulSet" | "DaemonSet":
                    held = spec["selector"]
                case "Service":
                    held = spec.get("clusterIP")
                case "RayService" | "RayCluster" | "RayJob":
                    held = each["apiVersion"]
                case "Secret":
                    held = (each.get("type"), each.get("data"))
                case _:
                    continue
            kept[each["kind"], each["metadata"]["name"]] = held
        return kept

    found = fixed(after)
    assert fixed(before) and all(found[key] == held for key, held in fixed(before).items())


@in_proof
@both_helms
def test_configuration_and_pods_do_not_change_together_while_the_service_runs(
    pinned: Pinned,
) -> None:
    binary = helm_binary(pinned)
    running = rendered()
    for alone in (STEPS, OWN_IMAGE, {"service": {"type": "NodePort"}}):
        upgraded(running, alone, binary)
    with pytest.raises(HelmError, match="both its configuration and its pods change"):
        upgraded(running, {**STEPS, **OWN_IMAGE}, binary)
    # An upgrade that also suspends the release is accepted, like one of a suspended release.
    upgraded(running, {**STEPS, **OWN_IMAGE, "suspend": True}, binary)
    upgraded(rendered({"suspend": True}), {**STEPS, **OWN_IMAGE}, binary)
    # Two upgrades in sequence are accepted: the second finds what the first has stored.
    upgraded(upgraded(running, OWN_IMAGE, binary), {**STEPS, **OWN_IMAGE}, binary)


@in_proof
@both_helms
@pytest.mark.parametrize(
    "change", [{"mode": "job"}, {"mode": "cluster"}, {"fullnameOverride": "other"}], ids=json.dumps
)
def test_a_running_service_is_not_replaced_by_another_object(
    pinned: Pinned, change: dict[str, Any]
) -> None:
    binary = helm_binary(pinned)
    with pytest.raises(HelmError, match="RayService demo-rayloom of this release is running"):
        upgraded(rendered(), change, binary)
    upgraded(rendered({"suspend": True}), change, binary)


@in_proof
def test_objects_of_other_releases_and_of_the_operator_are_ignored() -> None:
    running = rendered()
    foreign = copy.deepcopy(rendered({"mode": "cluster"}))
    ray_object(foreign)["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"
    child = copy.deepcopy(rendered({"mode": "cluster"}))
    ray_object(child)["metadata"]["name"] = "demo-rayloom-x7k2p"
    ray_object(child)["metadata"]["ownerReferences"] = [{"kind": "RayService"}]
    others = [ray_object(foreign), ray_object(child)]
    assert ray_object(upgraded([*running, *others], {})) == ray_object(running)


@in_proof
def test_the_digests_change_with_their_part_of_the_object() -> None:
    def digests(values: Values) -> dict[str, str]:
        found: dict[str, str] = one(rendered(values), "RayService")["metadata"]["annotations"]
        return found

    before = digests({})
    assert set(before) == {"rayloom/cluster", "rayloom/serve"}
    for values, changed in ((STEPS, {"rayloom/serve"}), (OWN_IMAGE, {"rayloom/cluster"})):
        after = digests(values)
        assert {name for name in before if before[name] != after[name]} == changed
