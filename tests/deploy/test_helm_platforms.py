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
