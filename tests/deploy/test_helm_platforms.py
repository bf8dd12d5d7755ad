"""The chart on platforms and in charts of others: umbrella charts, OpenShift, queues, firewalls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.manifest_checks import check_core, check_operator_rules, check_subset
from worlds.servers.helm_binary import HELM_3
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    Manifest,
    cluster_of,
    helm,
    helm_binary,
    in_mode,
    one,
    parsed,
    pod_templates,
    ray_object,
    rendered,
)

pytestmark = [pytest.mark.proof, pytest.mark.chart]

GROUPS = ("head", "inference", "trainer", "environment")
every_mode = pytest.mark.parametrize("mode", ["service", "job", "cluster"])


def checked(values: dict[str, Any], *files: Path) -> list[Manifest]:
    """The objects, which an API server and the operator would take."""
    manifests = rendered(values, *files)
    check_core(manifests)
    check_subset(manifests)
    check_operator_rules(manifests)
    return manifests


def groups_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    cluster = cluster_of(manifests)
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


@pytest.mark.parametrize("is_helm_3", [False, True])
@pytest.mark.parametrize("own", [{"enabled": True}, {"enabled": False}, {}])
def test_the_chart_is_a_dependency_that_a_condition_turns_on_and_off(
    own: dict[str, Any], is_helm_3: bool, tmp_path: Path
) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / "rayloom")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["version"]
    dependency = {"name": "rayloom", "version": version, "condition": "rayloom.enabled"}
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump({**about, "dependencies": [dependency]}))
    values = {**yaml.safe_load(CPU_DEV.read_text("utf-8")), **own}
    outer = {"global": {"imageRegistry": "registry.example"}, "rayloom": values}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(outer))
    binary = helm_binary(HELM_3) if is_helm_3 else None
    manifests = parsed(helm("template", "demo", tmp_path, binary=binary))
    assert ("RayService" in {each["kind"] for each in manifests}) is own.get("enabled", True)
    assert bool(manifests) is own.get("enabled", True)


def test_ids_can_be_left_to_the_platform() -> None:
    left = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"))
    manifests = checked({"pods": {"podSecurityContext": left}})
    pods = [each["spec"] for each in pod_templates(manifests).values()]
    for spec in [*pods, one(manifests, "Pod")["spec"]]:
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_a_group_may_have_ids_of_its_own() -> None:
    values = {"trainer": {"podSecurityContext": {"runAsUser": None, "supplementalGroups": [5000]}}}
    pods = pod_templates(checked(values))
    own, other = (pods[name]["spec"]["securityContext"] for name in ("trainer", "head"))
    assert "runAsUser" not in own and own["supplementalGroups"] == [5000]
    assert own["fsGroup"] == 1000 and other["runAsUser"] == 1000


def test_name_servers_are_reached_on_their_pods_port_too() -> None:
    policy = {"enabled": True, "operatorNamespace": "ray"}
    rules = one(checked({"networkPolicy": policy}), "NetworkPolicy")["spec"]["egress"]
    ports = {(each["port"], each["protocol"]) for rule in rules for each in rule.get("ports", ())}
    assert ports == {(port, kind) for port in (53, 5353) for kind in ("UDP", "TCP")}


@every_mode
def test_queues_are_named_on_the_ray_object(mode: str) -> None:
    labels = {
        "kueue.x-k8s.io/priority-class": "high",
        "kai.scheduler/queue": "team",
        "yunikorn.apache.org/queue": "root.team",
    }
    annotations = {"ray.io/initializing-timeout": "1h"}
    values = {**in_mode(mode), "labels": labels, "annotations": annotations}
    before = checked(in_mode(mode))
    manifests = checked({**values, "kueue": {"queueName": "queue"}})
    metadata = ray_object(manifests)["metadata"]
    assert {**labels, "kueue.x-k8s.io/queue-name": "queue"}.items() <= metadata["labels"].items()
    assert annotations.items() <= metadata["annotations"].items()
    # Kueue suspends and resumes the object: an upgrade does not.
    assert "suspend" not in ray_object(manifests)["spec"]
    assert cluster_of(manifests) == cluster_of(before)


def test_common_labels_are_on_every_object_and_change_no_pod() -> None:
    manifests = checked({"commonLabels": {"team": "rl"}})
    objects = [each for each in manifests if each["kind"] != "Pod"]
    assert len(objects) > 5
    assert {each["metadata"]["labels"]["team"] for each in objects} == {"rl"}
    assert pod_templates(manifests) == pod_templates(rendered())


def test_options_of_ray_start_reach_their_group_and_all_groups() -> None:
    values = {
        "pods": {"rayStartParams": {"node-manager-port": "6380"}},
        "head": {"rayStartParams": {"min-worker-port": "20000", "max-worker-port": "20999"}},
    }
    groups = groups_of(checked(values))
    before = groups_of(rendered())
    for name in GROUPS:
        added = dict(
            groups[name]["rayStartParams"].items() - before[name]["rayStartParams"].items()
        )
        assert before[name]["rayStartParams"].items() <= groups[name]["rayStartParams"].items()
        own = values["head"]["rayStartParams"] if name == "head" else {}
        assert added == {"node-manager-port": "6380", **own}


def test_a_limit_without_a_request_is_the_request() -> None:
    values = {"trainer": {"resources": {"limits": {"rdma/hca": 1}}}}
    resources = pod_templates(checked(values))["trainer"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["rdma/hca"] == 1 and "rdma/hca" not in resources["requests"]


def test_pods_have_the_names_and_name_servers_that_are_given() -> None:
    names = {
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
    }
    manifests = checked({"pods": names})
    for spec in [
        *(each["spec"] for each in pod_templates(manifests).values()),
        one(manifests, "Pod")["spec"],
    ]:
        assert names.items() <= spec.items()


@pytest.mark.parametrize(
    ("image", "own", "name"),
    [
        ({}, {"repository": "envs", "tag": "1"}, "envs:1"),
        ({}, {"tag": "other"}, "rayloom:other"),
        ({"digest": f"sha256:{'0' * 64}"}, {"tag": "other"}, "rayloom:other"),
        ({}, {"digest": f"sha256:{'1' * 64}"}, f"rayloom@sha256:{'1' * 64}"),
    ],
)
def test_a_group_has_an_image_of_its_own(
    image: dict[str, str], own: dict[str, str], name: str
) -> None:
    pods = pod_templates(checked({"image": image, "environment": {"image": own}}))
    images = {group: each["spec"]["containers"][0]["image"] for group, each in pods.items()}
    assert images.pop("environment") == name
    assert len(set(images.values())) == 1 and name not in images.values()


PROBES = ("readinessProbe", "livenessProbe", "startupProbe")
AGENT = {"path": "/api/healthz", "port": 52365}


def ray_containers(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    pods = pod_templates(manifests)
    return {group: each["spec"]["containers"][0] for group, each in pods.items()}


def test_the_operator_keeps_its_probes_until_a_group_has_periods() -> None:
    before = ray_containers(checked({}))
    values = {
        "head": {"readinessProbe": {"periodSeconds": 30}},
        "inference": {"startupProbe": {"failureThreshold": 9}},
        "trainer": {"livenessProbe": {"tcpSocket": {"port": 52365}, "periodSeconds": 60}},
    }
    after = ray_containers(checked(values))
    probes = {
        group: {kind: each[kind] for kind in PROBES if kind in each}
        for group, each in after.items()
    }
    own = {kind: before["trainer"][kind] for kind in PROBES if kind in before["trainer"]}
    assert list(own) == ["readinessProbe"] and not set(PROBES) & set(before["head"])
    assert probes["environment"] == own
    assert probes["head"] == {"readinessProbe": {**own["readinessProbe"], "periodSeconds": 30}}
    assert probes["head"]["readinessProbe"]["httpGet"] == AGENT
    startup = probes["inference"].pop("startupProbe")
    assert (startup["httpGet"], startup["failureThreshold"]) == (AGENT, 9)
    assert probes["inference"] == own
    liveness = probes["trainer"]["livenessProbe"]
    assert liveness["tcpSocket"] == {"port": 52365} and "httpGet" not in liveness
    assert liveness["periodSeconds"] == 60


def test_probes_of_pods_are_those_of_each_group() -> None:
    values = {"pods": {kind: {"timeoutSeconds": 7} for kind in PROBES}}
    for container in ray_containers(checked(values)).values():
        assert {container[kind]["timeoutSeconds"] for kind in PROBES} == {7}


def test_a_group_on_the_nodes_network_finds_the_head_by_its_name() -> None:
    pods = pod_templates(checked({"trainer": {"hostNetwork": True}}))
    assert pods["trainer"]["spec"]["hostNetwork"] is True
    assert pods["trainer"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert not {"hostNetwork", "dnsPolicy"} & set(pods["head"]["spec"])
    own = {"trainer": {"hostNetwork": True, "dnsPolicy": "Default"}}
    assert pod_templates(checked(own))["trainer"]["spec"]["dnsPolicy"] == "Default"


def test_root_may_have_capabilities() -> None:
    values = {
        "pods": {"podSecurityContext": {"runAsUser": 0}},
        "trainer": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    manifests = checked(values)
    for group, container in ray_containers(manifests).items():
        added = {"add": ["IPC_LOCK"]} if group == "trainer" else {}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], **added}
    security = pod_templates(manifests)["trainer"]["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)


def test_gpus_are_claimed_from_a_class_of_devices() -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "h100"}
    values = {
        "config": {"trainer": {"device": "cuda", "gpus_per_rank": 1}},
        "trainer": {
            "gpus": 2,
            "gpuResource": "",
            "resourceClaims": [claim],
            "resources": {"claims": [{"name": "gpu"}]},
        },
    }
    manifests = checked(values)
    spec = pod_templates(manifests)["trainer"]["spec"]
    assert spec["resourceClaims"] == [claim]
    resources = spec["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "gpu"}]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert groups_of(manifests)["trainer"]["rayStartParams"]["num-gpus"] == "2"


def test_claims_have_labels_and_choose_their_volume_by_labels() -> None:
    selector = {"matchLabels": {"tier": "fast"}}
    values = {
        "modelCache": {"enabled": True},
        "database": {"accessModes": ["ReadWriteOncePod"]},
    }
    for claim in ("checkpoints", "database", "modelCache"):
        values[claim] = {**values.get(claim, {}), "labels": {"team": "rl"}, "selector": selector}
    claims = [each for each in checked(values) if each["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == 3
    for each in claims:
        assert each["metadata"]["labels"]["team"] == "rl"
        assert each["spec"]["selector"] == selector
        is_database = each["metadata"]["name"].endswith("-database")
        mode = "ReadWriteOncePod" if is_database else "ReadWriteOnce"
        assert each["spec"]["accessModes"] == [mode]


def test_monitors_rules_and_dashboards_may_be_in_another_namespace() -> None:
    kinds = ("podMonitor", "rules", "dashboards")
    here = {"monitoring": {kind: {"enabled": True} for kind in kinds}}
    there = {"monitoring": {kind: {"enabled": True, "namespace": "monitoring"} for kind in kinds}}
    before, after = checked(here), checked(there)
    own = one(after, "PodMonitor")["spec"]["namespaceSelector"]
    assert own == {"matchNames": ["default"]}
    moved = 0
    for old, new in zip(before, after, strict=True):
        if new["metadata"]["namespace"] == "monitoring":
            moved += 1
            assert new["metadata"]["name"] == f"default-{old['metadata']['name']}"
        else:
            assert new["kind"] in ("Secret", "Pod", "RayService") or new == old
    dashboards = len(list((CHART / "dashboards").glob("*.json")))
    assert moved == 1 + len(list((CHART / "files" / "rules").glob("*.yaml"))) + dashboards


def test_an_ingress_has_several_hosts_and_paths() -> None:
    values = {
        "enabled": True,
        "host": "a.example.org",
        "hosts": ["b.example.org", "a.example.org"],
        "path": "/api",
        "paths": ["/v1"],
        "tlsSecret": "certificate",
    }
    spec = one(checked({"ingress": values}), "Ingress")["spec"]
    hosts = ["a.example.org", "b.example.org"]
    assert spec["tls"] == [{"hosts": hosts, "secretName": "certificate"}]
    assert [rule["host"] for rule in spec["rules"]] == hosts
    for rule in spec["rules"]:
        assert [each["path"] for each in rule["http"]["paths"]] == ["/api", "/v1"]
    [rule] = one(checked({"ingress": {"enabled": True}}), "Ingress")["spec"]["rules"]
    assert rule["host"] == ""


def test_the_priority_class_of_kueue_is_a_label_of_the_ray_object() -> None:
    labels = ray_object(checked({"kueue": {"priorityClass": "high"}}))["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
