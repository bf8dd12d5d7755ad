"""A service, a job or a cluster, suspended or not, over one and the same Ray cluster."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from worlds.checks.manifest_checks import check_operator_rules, check_subset
from worlds.servers.helm_chart import (
    CPU_DEV,
    PRODUCTION,
    HelmError,
    arguments_of,
    cluster_of,
    helm,
    one,
    pod_templates,
    ray_object,
    rendered,
)

KINDS = {"service": "RayService", "job": "RayJob", "cluster": "RayCluster"}


def variables(template: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("mode", KINDS)
def test_each_mode_is_one_object_of_its_kind_that_can_be_suspended(mode: str) -> None:
    running = rendered({"mode": mode})
    assert ray_object(running)["kind"] == KINDS[mode]
    # Kueue sets the field too: what is not suspended here does not name it.
    assert "suspend" not in ray_object(running)["spec"]
    suspended = rendered({"mode": mode, "suspend": True})
    spec = dict(ray_object(suspended)["spec"])
    assert spec.pop("suspend") is True
    assert spec == ray_object(running)["spec"]
    check_subset(suspended)
    check_operator_rules(suspended)


OF_THE_API = {"RAYLOOM_API_KEY_FILE", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}


def test_the_cluster_is_the_same_in_every_mode_but_for_the_api() -> None:
    clusters = {}
    for mode in KINDS:
        cluster = json.loads(json.dumps(cluster_of(rendered({"mode": mode}))))
        cluster.pop("upgradeStrategy", None)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            # A digest of the template.
            del group["labels"]
            container = group["template"]["spec"]["containers"][0]
            before = len(container["env"])
            container["env"] = [e for e in container["env"] if e["name"] not in OF_THE_API]
            for where in (container, group["template"]["spec"]):
                key = "volumes" if "volumes" in where else "volumeMounts"
                where[key] = [each for each in where[key] if each["name"] != "secrets"]
            assert before - len(container["env"]) == (0 if mode == "job" else len(OF_THE_API))
        clusters[mode] = cluster
    assert clusters["service"] == clusters["job"] == clusters["cluster"]


def test_a_job_has_no_api() -> None:
    manifests = rendered({"mode": "job"})
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    assert ("Service", "demo-rayloom-api") not in names
    assert ("Secret", "demo-rayloom-api-key") not in names
    assert ("Service", "demo-rayloom-control") in names


def test_a_job_ends_its_attempts_and_its_pods_as_it_is_told() -> None:
    job = {"backoffLimit": 5, "activeDeadlineSeconds": 31536000, "ttlSecondsAfterFinished": 60}
    spec = one(rendered({"mode": "job", "job": job}), "RayJob")["spec"]
    assert {key: spec[key] for key in job} == job
    # Nought seconds would end it at once.
    assert "activeDeadlineSeconds" not in one(rendered({"mode": "job"}), "RayJob")["spec"]


def test_no_text_of_the_configuration_ends_the_jobs_argument() -> None:
    options = {"prompt": 'it\'s $HOME `id` "quoted" \\ <b> \u00e9\n'}
    manifests = rendered({"mode": "job", "config": {"tasks": {"options": options}}})
    entrypoint = one(manifests, "RayJob")["spec"]["entrypoint"]
    assert entrypoint.count("'") == 2
    assert len(shlex.split(entrypoint)) == 4
    assert arguments_of(manifests)["config"]["tasks"]["options"]["prompt"] == options["prompt"]


def test_a_development_cluster_needs_no_configuration() -> None:
    helm("template", "demo", CPU_DEV.parent, "--set", "mode=cluster")
    with pytest.raises(HelmError, match="config: got none"):
        helm("template", "demo", CPU_DEV.parent, "--set", "mode=job")


def test_the_control_store_outlives_the_head_by_redis() -> None:
    redis = {"address": "redis.db:6379", "existingSecret": "redis", "key": "1e3"}
    manifests = rendered({"gcs": {"backend": "redis", "redis": redis}})
    check_subset(manifests)
    password = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "1e3"}}}
    assert cluster_of(manifests)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.db:6379",
        "redisPassword": password,
    }
    for template in pod_templates(manifests).values():
        # Ray's own 60 s are shorter than a head needs to come back.
        assert variables(template)["RAY_gcs_rpc_server_reconnect_timeout_s"]["value"] == "600"
    without = {"gcs": {"backend": "redis", "redis": {"address": "redis.db:6379"}}}
    options = cluster_of(rendered(without))["gcsFaultToleranceOptions"]
    assert options == {"redisAddress": "redis.db:6379"}


def test_the_control_store_outlives_the_head_on_a_volume() -> None:
    storage = {"size": "2Gi", "storageClass": "block"}
    manifests = rendered({"gcs": {"backend": "rocksdb", "storage": storage}})
    check_subset(manifests)
    check_operator_rules(manifests)
    assert cluster_of(manifests)["gcsFaultToleranceOptions"] == {
        "backend": "rocksdb",
        "storage": {"accessModes": ["ReadWriteOnce"], "size": "2Gi", "storageClassName": "block"},
    }
    assert "gcsFaultToleranceOptions" not in cluster_of(rendered())


def test_evictions_spare_what_no_step_can_do_without() -> None:
    manifests = rendered({}, PRODUCTION)
    budgets = {
        manifest["metadata"]["name"].removeprefix("demo-rayloom-"): manifest["spec"]
        for manifest in manifests
        if manifest["kind"] == "PodDisruptionBudget"
    }
    kept = {name: budget["minAvailable"] for name, budget in budgets.items()}
    # Two pods each of inference and environment, one of which may go.
    assert kept == {"head": 1, "trainer": 1, "inference": 1, "environment": 1}
    for name, template in pod_templates(manifests).items():
        selector = budgets[name]["selector"]["matchLabels"].items()
        assert selector <= template["metadata"]["labels"].items()
    off = rendered({"podDisruptionBudgets": {"enabled": False}}, PRODUCTION)
    assert "PodDisruptionBudget" not in {manifest["kind"] for manifest in off}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["service/demo-rayloom-api 8000:8000", "helm test demo", "--set suspend=true"]),
        ({"suspend": True}, ["wait --for=delete pod", "--timeout=300s", "--set suspend=false"]),
        ({"mode": "job"}, ["get rayjob demo-rayloom -w", "SUCCEEDED or FAILED"]),
        ({"mode": "cluster"}, ["rayloom train CONFIG --address auto", "--state-dir /database/"]),
    ],
    ids=["service", "suspended", "job", "cluster"],
)
def test_the_notes_say_what_to_do_next(values: dict[str, Any], words: list[str]) -> None:
    chosen = [
        part
        for key, value in values.items()
        for part in ("--set-json", f"{key}={json.dumps(value)}")
    ]
    notes = helm(
        "install", "demo", CPU_DEV.parent, "--dry-run=client", "--values", CPU_DEV, *chosen
    )
    for word in words:
        assert word in notes
