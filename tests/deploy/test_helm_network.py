"""Tests of network access to the pods and of the objects for Prometheus and Grafana."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.manifest_checks import check_core, checked
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    VARIANTS,
    Manifest,
    every_mode,
    every_variant,
    helm,
    in_proof,
    one,
    pod_templates,
    ray_container,
    rendered,
    serve_config_of,
)

from deploy.dashboards.__main__ import DASHBOARDS

METRICS = {"metrics": 8080, "as-metrics": 44217, "dash-metrics": 44227, "rayloom-metrics": 9400}


def test_the_api_port_is_that_of_the_configuration() -> None:
    manifests = rendered({"config": {"service": {"port": 8123}}})
    assert serve_config_of(manifests)["http_options"]["port"] == 8123
    assert one(manifests, "Service", "-api")["spec"]["ports"][0]["port"] == 8123


@every_variant
def test_the_services_reach_the_head_and_nothing_else(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    templates = pod_templates(manifests)
    for suffix, count in (("-api", 1), ("-control", 2)):
        service = one(manifests, "Service", suffix)["spec"]
        reached = {
            group
            for group, template in templates.items()
            if service["selector"].items() <= template["metadata"]["labels"].items()
        }
        assert reached == {"head"}
        assert len(service["ports"]) == count
        named = {p["name"]: p["containerPort"] for p in ray_container(templates["head"])["ports"]}
        assert all(named[port["targetPort"]] == port["port"] for port in service["ports"])


def test_every_port_names_its_protocol() -> None:
    policy = {"enabled": True, "operatorNamespace": "ray", "apiFrom": [{"podSelector": {}}]}
    ports = [
        port
        for manifest in rendered({"networkPolicy": policy})
        for port in found(manifest, "ports")
    ]
    assert len(ports) > 10
    assert {port["protocol"] for port in ports} == {"TCP", "UDP"}


def found(node: Any, key: str) -> list[Any]:
    """Return the items of every list with this name, at any depth."""
    if isinstance(node, list):
        return [each for item in node for each in found(item, key)]
    if not isinstance(node, dict):
        return []
    own = node[key] if isinstance(node.get(key), list) else []
    return [*own, *(each for value in node.values() for each in found(value, key))]


def test_the_api_is_reached_through_an_ingress_or_a_gateway() -> None:
    manifests = rendered({}, *VARIANTS["everything"])
    service = one(manifests, "Service", "-api")
    [rule] = one(manifests, "Ingress")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert rule["host"] == "rayloom.example.org"
    assert backend == {"name": service["metadata"]["name"], "port": {"name": "serve"}}
    assert [port["name"] for port in service["spec"]["ports"]] == ["serve"]
    [rule] = one(manifests, "HTTPRoute")["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert backend == {
        "name": service["metadata"]["name"],
        "port": service["spec"]["ports"][0]["port"],
    }


@in_proof
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


@in_proof
def test_name_servers_may_be_reached_on_the_port_of_their_pods_too() -> None:
    policy = {"enabled": True, "operatorNamespace": "ray"}
    rules = one(checked({"networkPolicy": policy}), "NetworkPolicy")["spec"]["egress"]
    ports = {(each["port"], each["protocol"]) for rule in rules for each in rule.get("ports", ())}
    assert ports == {(port, kind) for port in (53, 5353) for kind in ("UDP", "TCP")}


def policies(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    return {
        each["metadata"]["name"].removeprefix("demo-rayloom").removeprefix("-"): each["spec"]
        for each in manifests
        if each["kind"] == "NetworkPolicy"
    }


def labels_of(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """Return the labels of the pods by group, including the pod of `helm test`."""
    templates = pod_templates(manifests)
    labels = {group: template["metadata"]["labels"] for group, template in templates.items()}
    return {**labels, "test": one(manifests, "Pod")["metadata"]["labels"]}


def chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a label selector matches, for the two operators that the chart uses."""
    for rule in selector.get("matchExpressions", []):
        is_in = labels.get(rule["key"]) in rule["values"]
        if is_in != {"In": True, "NotIn": False}[rule["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def named_ports(manifests: list[Manifest]) -> dict[str, int]:
    container = pod_templates(manifests)["head"]["spec"]["containers"][0]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_the_network_policy_covers_every_pod_in_both_directions() -> None:
    values = {"networkPolicy": {"enabled": True, "operatorNamespace": "ray-system"}}
    manifests = rendered(values)
    [policy] = policies(manifests).values()
    assert all(chosen(policy["podSelector"], labels) for labels in labels_of(manifests).values())
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    own, operator = policy["ingress"]
    assert own["from"] == [{"podSelector": policy["podSelector"]}] and "ports" not in own
    [peer] = operator["from"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert [port["port"] for port in operator["ports"]] == ["dashboard", "serve"]
    inside, names = policy["egress"]
    assert inside["to"] == [{"podSelector": policy["podSelector"]}]
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == {
        (53, "UDP"),
        (53, "TCP"),
        (5353, "UDP"),
        (5353, "TCP"),
    }


def test_the_operators_labels_can_be_removed_with_null() -> None:
    """Remove a label with null, because Helm merges an empty map into the default."""
    labels = {"app.kubernetes.io/name": None}
    policy = {"enabled": True, "operatorNamespace": "ray", "operatorLabels": labels}
    [held] = policies(rendered({"networkPolicy": policy})).values()
    [peer] = held["ingress"][1]["from"]
    assert "podSelector" not in peer


def test_allowed_peers_reach_named_ports_that_the_head_has() -> None:
    manifests = rendered({}, *VARIANTS["everything"])
    policy = policies(manifests)[""]
    known = named_ports(manifests)
    by_peer = {}
    for rule in policy["ingress"][1:]:
        namespace = rule["from"][0]["namespaceSelector"]["matchLabels"]
        ports = [port["port"] for port in rule["ports"]]
        assert set(ports) <= set(known)
        by_peer[namespace["kubernetes.io/metadata.name"]] = ports
    assert by_peer == {
        "kuberay": ["dashboard", "serve"],
        "ingress": ["serve"],
        "monitoring": list(METRICS),
    }


def test_environments_have_their_own_egress_policy() -> None:
    manifests = rendered({}, *VARIANTS["everything"])
    labels = labels_of(manifests)
    tools = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tools"}}}
    rules: dict[str, Any] = {"egress": [{}], "environment-egress": [{"to": [tools]}]}
    held = {
        "egress": {"head", "inference", "trainer", "test"},
        "environment-egress": {"environment"},
    }
    for name, expected in rules.items():
        policy = policies(manifests)[name]
        assert policy["policyTypes"] == ["Egress"] and policy["egress"] == expected
        groups = {group for group in labels if chosen(policy["podSelector"], labels[group])}
        assert groups == held[name]


@every_mode
def test_the_monitor_reads_every_port_of_metrics_and_names_the_cluster(mode: str) -> None:
    manifests = rendered({"mode": mode, "monitoring": {"podMonitor": {"enabled": True}}})
    monitor = one(manifests, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    endpoints = {each["port"]: each for each in monitor["spec"]["podMetricsEndpoints"]}
    assert {name: named_ports(manifests)[name] for name in endpoints} == METRICS
    for endpoint in endpoints.values():
        assert endpoint["relabelings"] == [
            {
                "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"],
                "targetLabel": "ray_io_cluster",
            },
            {"targetLabel": "release", "replacement": "demo"},
        ]
    for group, labels in labels_of(manifests).items():
        assert chosen(monitor["spec"]["selector"], labels), group
    # Workers have only Ray's port for metrics.
    for group, template in pod_templates(manifests).items():
        names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert names & set(METRICS) == (set(METRICS) if group == "head" else {"metrics"})


def test_ray_measures_the_disk_of_every_pod() -> None:
    """Check this because Ray's agent reports 0 % in a pod unless the variable is set."""
    templates = pod_templates(rendered({}, *VARIANTS["everything"]))
    for group, template in templates.items():
        container = template["spec"]["containers"][0]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE"] == "1", group


def test_unused_series_are_dropped_by_default() -> None:
    def dropped(monitor: dict[str, Any]) -> list[str]:
        values = {"monitoring": {"podMonitor": {"enabled": True, **monitor}}}
        [endpoint, *_] = one(rendered(values), "PodMonitor")["spec"]["podMetricsEndpoints"]
        return [rule["regex"] for rule in endpoint["metricRelabelings"] if rule["action"] == "drop"]

    assert dropped({}) == ["ray_grpc_server_.*|ray_operation_.*|ray_io_context_.*"]
    assert dropped({"dropSeries": ""}) == []


def test_every_series_gets_the_given_labels_unchanged() -> None:
    """Escape $ as $$, because Prometheus expands $ in a replacement."""
    labels = {"cluster": "eu-1", "cost": "$1"}
    monitor = one(rendered(monitored(labels)), "PodMonitor")
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        added = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
        assert added.items() >= {"cluster": "eu-1", "cost": "$$1", "release": "demo"}.items()


def monitored(labels: dict[str, str]) -> dict[str, Any]:
    return {"monitoring": {"podMonitor": {"enabled": True, "seriesLabels": labels}}}


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds() -> None:
    manifests = rendered({"monitoring": {"dashboards": {"enabled": True}}})
    check_core(manifests)
    found: dict[str, str] = {}
    for each in manifests:
        if each["kind"] == "ConfigMap":
            [_] = each["data"]
            assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert each["metadata"]["annotations"] == {"grafana_folder": "Rayloom"}
            # Helm stores it in etcd with other objects; an object may have at most 1.5 MiB there.
            assert len(json.dumps(each)) < 900_000
            found |= each["data"]
    files = {file.name: json.loads(file.read_text("utf-8")) for file in DASHBOARDS.iterdir()}
    assert sum(without_runbooks(each) for each in files.values()) > 10
    assert {name: json.loads(text) for name, text in found.items()} == files
    # Without an address of the runbooks, no dashboard links to them.
    assert "unbook" not in "".join(found.values())


def without_runbooks(dashboard: dict[str, Any]) -> int:
    """Remove the links to runbooks and return the number of panels that had links."""
    listed = dashboard["templating"]["list"]
    listed[:] = [each for each in listed if each["name"] != "runbooks"]
    return len([panel.pop("links") for panel in dashboard["panels"] if "links" in panel])


def test_dashboards_and_alerts_link_to_the_address_of_the_runbooks() -> None:
    dashboards, address = {"enabled": True}, "https://wiki.example/rayloom"
    rules = {"enabled": True, "runbooks": address}
    manifests = rendered({"monitoring": {"dashboards": dashboards, "rules": rules}})
    found = [each for each in manifests if each["kind"] == "ConfigMap"]
    texts = [text for each in found for text in each["data"].values()]
    assert len(texts) == len(list(DASHBOARDS.iterdir()))
    for text in texts:
        [variable] = [
            item for item in json.loads(text)["templating"]["list"] if item["name"] == "runbooks"
        ]
        assert variable["query"] == variable["current"]["value"] == address
    assert all(rule["annotations"]["runbook_url"].startswith(address) for rule in alerts(manifests))


def alerts(manifests: list[Manifest]) -> list[dict[str, Any]]:
    groups = one(manifests, "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_without_an_address_of_runbooks_alerts_have_no_link_and_a_note_says_so() -> None:
    rules = {"enabled": True}
    linked = {"monitoring": {"rules": {**rules, "runbooks": "https://wiki.example/rayloom"}}}
    expected = alerts(rendered(linked))
    for rule in expected:
        del rule["annotations"]["runbook_url"]
    assert expected and alerts(rendered({"monitoring": {"rules": rules}})) == expected
    for option, is_said in (("rules.enabled=true", True), ("podMonitor.enabled=true", False)):
        notes = helm(
            "install", "demo", CHART, "--dry-run=client", "--values", CPU_DEV,
            "--set", f"monitoring.{option}",
        )  # fmt: skip
        assert ("monitoring.rules.runbooks" in notes) == is_said


def without(rules: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [rule for rule in rules if rule["alert"] != name]


@pytest.mark.parametrize("runbooks", ["", "https://wiki.example/rayloom"])
def test_a_single_alert_can_be_disabled_without_other_changes(runbooks: str) -> None:
    chosen: dict[str, Any] = {"enabled": True, "runbooks": runbooks}
    whole = rendered({"monitoring": {"rules": chosen}})
    names = [rule["alert"] for rule in alerts(whole)]
    assert len(names) > 20
    for name in names[:: len(names) // 3]:
        less = rendered({"monitoring": {"rules": {**chosen, "disabled": [name]}}})
        check_core(less)
        assert alerts(less) == without(alerts(whole), name)
        assert recorded(less) == recorded(whole)
        assert [m for m in less if m["kind"] == "Service"] == [
            m for m in whole if m["kind"] == "Service"
        ]


def recorded(manifests: list[Manifest]) -> list[dict[str, Any]]:
    groups = one(manifests, "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"] if "record" in rule]


def test_alerts_have_common_labels_and_labels_of_their_own() -> None:
    before = alerts(rendered({"monitoring": {"rules": {"enabled": True}}}))
    name = before[0]["alert"]
    chosen: dict[str, Any] = {
        "enabled": True,
        "alertLabels": {"team": "rl", "cluster": "a"},
        "labelsOf": {name: {"severity": "info", "cluster": "b"}},
    }
    manifests = rendered({"monitoring": {"rules": chosen}})
    check_core(manifests)
    after = alerts(manifests)
    for old, new in zip(before, after, strict=True):
        own = chosen["labelsOf"].get(old["alert"], {})
        assert new == {**old, "labels": {**old["labels"], **chosen["alertLabels"], **own}}
    # A recorded series has no labels of alerts.
    assert recorded(manifests) == recorded(rendered({"monitoring": {"rules": {"enabled": True}}}))


def test_each_file_of_rules_is_a_prometheus_rule_with_unchanged_templates(
    tmp_path: Path,
) -> None:
    chart = tmp_path / "rayloom"
    shutil.copytree(CHART, chart)
    folder = chart / "files" / "rules"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    annotations = {
        "summary": "{{ $labels.run }} stands since {{ humanizeDuration $value }}",
        "runbook_url": "RUNBOOKS#stalled",
    }
    rule = {"alert": "Stalled", "expr": "up == 0", "for": "5m", "annotations": annotations}
    spec = {"groups": [{"name": "run", "rules": [rule]}]}
    for name in ("alerts", "recording"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    runbooks = {"runbooks": "https://wiki.example/rayloom"}
    manifests = rendered({"monitoring": {"rules": {"enabled": True, **runbooks}}}, chart=chart)
    check_core(manifests)
    annotations["runbook_url"] = "https://wiki.example/rayloom#stalled"
    rules = [each for each in manifests if each["kind"] == "PrometheusRule"]
    assert {each["metadata"]["name"] for each in rules} == {
        "demo-rayloom-alerts",
        "demo-rayloom-recording",
    }
    for each in rules:
        assert each["spec"] == spec
        assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_a_monitoring_label_may_replace_a_label_of_the_chart() -> None:
    label = {"app.kubernetes.io/part-of": "kube-prometheus"}
    watched = {
        name: {"enabled": True, "labels": label} for name in ("podMonitor", "rules", "dashboards")
    }
    manifests = rendered({"monitoring": watched})
    check_core(manifests)
    kinds = ("PodMonitor", "PrometheusRule", "ConfigMap")
    chosen_by = [each["metadata"]["labels"] for each in manifests if each["kind"] in kinds]
    assert len(chosen_by) == 2 + len(list(DASHBOARDS.iterdir()))
    for labels in chosen_by:
        assert label.items() <= labels.items() and labels["app.kubernetes.io/instance"] == "demo"


def test_monitoring_objects_are_rendered_only_if_enabled() -> None:
    kinds = {manifest["kind"] for manifest in rendered()}
    assert not kinds & {"NetworkPolicy", "PodMonitor", "PrometheusRule", "ConfigMap"}


@in_proof
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
