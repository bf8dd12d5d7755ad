"""Tests of the objects that Helm renders: validity, modes, secrets, claims and labels."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from worlds.checks.manifest_checks import (
    check_core,
    check_operator_rules,
    check_operator_schema,
    check_subset,
    checked,
)
from worlds.servers.helm_binary import HELM_3, helm_binary
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    GROUPS,
    PRODUCTION,
    VARIANTS,
    Manifest,
    arguments_of,
    by_name,
    cluster_of,
    every_mode,
    every_variant,
    helm,
    in_mode,
    in_proof,
    lint,
    one,
    parsed,
    pod_templates,
    ray_container,
    ray_object,
    rendered,
    serve_config_of,
)

from deploy.chart_schema import (
    DEFAULTS,
    NAMES,
    SCHEMA,
    defaults_text,
    module_names,
    schema_text,
)

ROOT = CHART.parent
KINDS = {"service": "RayService", "job": "RayJob", "cluster": "RayCluster"}
OF_THE_API = {"RAYLOOM_API_KEY_FILE", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}


def without_secrets(manifests: list[Manifest]) -> list[Manifest]:
    """Return sorted objects without Secrets, because each rendering draws new keys."""
    rest = [manifest for manifest in manifests if manifest["kind"] != "Secret"]
    return sorted(rest, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


def mounted_secrets(template: Manifest) -> dict[str, tuple[str, str]]:
    """Return the Secret and key of each mounted file, by the variable that names the file."""
    [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "secrets"]
    [mount] = [m for m in ray_container(template)["volumeMounts"] if m["name"] == "secrets"]
    # A file that is mounted with subPath would not be updated.
    assert mount == {"name": "secrets", "mountPath": "/secrets", "readOnly": True}
    files = {
        f"/secrets/{item['path']}": (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    variables = by_name(ray_container(template)["env"]).values()
    named = {each["name"]: each["value"] for each in variables if each.get("value") in files}
    assert set(named.values()) == set(files)
    return {name: files[file] for name, file in named.items()}


@in_proof
@every_variant
@every_mode
def test_helm_3_and_helm_4_render_the_same_without_warnings(
    files: tuple[Path, ...], mode: str, tmp_path: Path
) -> None:
    helm_3 = helm_binary(HELM_3)
    values = tmp_path / "mode.json"
    values.write_text(json.dumps(in_mode(mode)))
    assert "0 chart(s) failed" in lint(*files, values)
    assert "0 chart(s) failed" in lint(*files, values, binary=helm_3)
    by_4, by_3 = (rendered(in_mode(mode), *files, binary=binary) for binary in (None, helm_3))
    assert without_secrets(by_4) == without_secrets(by_3)


@every_variant
@every_mode
def test_every_object_is_valid_for_kubernetes_and_the_operator(
    files: tuple[Path, ...], mode: str
) -> None:
    manifests = rendered(in_mode(mode), *files)
    # There are at least a service, three budgets and four pod templates.
    assert check_core(manifests) >= 7
    check_subset(manifests)
    check_operator_rules(manifests)


@pytest.fixture(scope="module")
def crds() -> Path:
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("KUBERAY_CRDS names no folder with the operator's own schemas")
    return Path(folder)


@every_variant
@every_mode
def test_the_ray_object_is_valid_by_the_operators_schema(
    files: tuple[Path, ...], mode: str, crds: Path
) -> None:
    check_operator_schema(rendered(in_mode(mode), *files), crds)


def test_the_operators_schema_refuses_an_unknown_field(crds: Path) -> None:
    wrong = copy.deepcopy(rendered())
    cluster_of(wrong)["workerGroupSpecs"][0]["template"]["spec"]["contaners"] = []
    with pytest.raises(jsonschema.ValidationError, match="contaners"):
        check_operator_schema(wrong, crds)


def test_the_checks_refuse_what_an_api_server_would() -> None:
    manifests = rendered()
    wrong = copy.deepcopy(manifests)
    ray_container(pod_templates(wrong)["trainer"])["imagePullPolizy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolizy"):
        check_core(wrong)
    wrong = copy.deepcopy(manifests)
    cluster_of(wrong)["workerGroupSpecs"][0]["groupNme"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="groupNme"):
        check_subset(wrong)


@every_variant
def test_the_serve_config_starts_one_application_on_the_head(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    config, templates = serve_config_of(manifests), pod_templates(manifests)
    assert config["proxy_location"] == "HeadOnly"
    [application] = config["applications"]
    assert application["import_path"] == "deploy.serve_app:build"
    assert application["route_prefix"] == "/"
    ports = {p["name"]: p["containerPort"] for p in ray_container(templates["head"])["ports"]}
    assert config["http_options"] == {"host": "0.0.0.0", "port": ports["serve"]}


def test_a_new_version_of_the_chart_keeps_the_cluster(tmp_path: Path) -> None:
    newer = tmp_path / "rayloom"
    shutil.copytree(CHART, newer)
    file = newer / "Chart.yaml"
    chart = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**chart, "version": "9.9.9", "appVersion": "9.9.9"}))
    before, after = rendered(), rendered(chart=newer, options=["--is-upgrade"])
    old, new = one(before, "RayService"), one(after, "RayService")
    assert old["metadata"]["labels"] != new["metadata"]["labels"]
    assert old["spec"] == new["spec"]


def test_keys_are_only_in_secrets() -> None:
    first, second = rendered(), rendered(options=["--is-upgrade"])
    rest = [m for m in first if m["kind"] != "Secret"]
    # Without a cluster to look the keys up in, each rendering draws new ones. Nothing else differs.
    assert rest == [m for m in second if m["kind"] != "Secret"] and first != second
    secrets = [manifest for manifest in first if manifest["kind"] == "Secret"]
    assert len(secrets) == 2
    for secret in secrets:
        for value in secret["data"].values():
            key = base64.b64decode(value).decode()
            # The service requires at least 16 characters.
            assert re.fullmatch(r"[A-Za-z0-9]{48}", key)
            assert key not in json.dumps(rest) and value not in json.dumps(rest)


def test_existing_secrets_are_used_and_none_is_created() -> None:
    manifests = rendered({}, *VARIANTS["existing-secrets"])
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"Secret", "PersistentVolumeClaim", "ServiceAccount"}
    for template in pod_templates(manifests).values():
        assert mounted_secrets(template)["RAYLOOM_API_KEY_FILE"] == ("rayloom-api", "token")
    cluster = cluster_of(manifests)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}


def test_only_the_head_has_the_database_volume_or_the_secret_with_its_url() -> None:
    for files in ((), VARIANTS["existing-secrets"]):
        manifests = rendered({}, *files)
        templates = pod_templates(manifests)
        head = templates.pop("head")
        volumes = {volume["name"]: volume for volume in head["spec"]["volumes"]}
        arguments = arguments_of(manifests)
        if files:
            source = mounted_secrets(head)["RAYLOOM_DATABASE_URL_FILE"]
            assert source == ("postgres", "address")
            assert "database" not in volumes and "state_dir" not in arguments
        else:
            claim = volumes["database"]["persistentVolumeClaim"]["claimName"]
            assert one(manifests, "PersistentVolumeClaim", "-database")["metadata"]["name"] == claim
            mounts = {m["name"]: m["mountPath"] for m in ray_container(head)["volumeMounts"]}
            assert arguments["state_dir"].startswith(f"{mounts['database']}/")
        for template in templates.values():
            assert set(mounted_secrets(template)) == {"RAYLOOM_API_KEY_FILE"}
            assert "database" not in {volume["name"] for volume in template["spec"]["volumes"]}


def test_an_existing_claim_of_a_database_is_used() -> None:
    manifests = rendered({"database": {"existingClaim": "restored"}})
    volumes = {each["name"]: each for each in pod_templates(manifests)["head"]["spec"]["volumes"]}
    assert volumes["database"]["persistentVolumeClaim"] == {"claimName": "restored"}
    assert arguments_of(manifests)["state_dir"].startswith("/database/")
    claims = [each for each in manifests if each["kind"] == "PersistentVolumeClaim"]
    assert [each["metadata"]["name"] for each in claims] == ["demo-rayloom-checkpoints"]
    # The chart does not know the storage class of an existing claim, so it accepts this.
    rendered(
        {
            "database": {"existingClaim": "restored"},
            "checkpoints": {"accessModes": ["ReadWriteMany"]},
        }
    )


def test_a_claim_outlives_the_release_unless_keep_is_false() -> None:
    for name in ("checkpoints", "database"):
        claim = one(rendered(), "PersistentVolumeClaim", f"-{name}")
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        claim = one(rendered({name: {"keep": False}}), "PersistentVolumeClaim", f"-{name}")
        assert "annotations" not in claim["metadata"]


def test_the_ray_version_is_the_locked_one() -> None:
    cluster = cluster_of(rendered())
    assert f"\nray=={cluster['rayVersion']} " in (ROOT / "locks" / "cpu.txt").read_text("utf-8")


def test_the_schema_is_up_to_date_with_the_settings_and_kubernetes() -> None:
    text = SCHEMA.read_text("utf-8")
    assert text == schema_text(text), "run python -m deploy.chart_schema"
    assert DEFAULTS.read_text("utf-8") == defaults_text(), "run python -m deploy.chart_schema"


@in_proof
def test_the_modules_that_a_start_imports_are_up_to_date() -> None:
    found, names = module_names(), NAMES.read_text("utf-8").split()
    assert set(found) <= set(names), "run python -m deploy.chart_schema"
    # Another version of Python than that of the images imports other modules.
    if sys.version_info[:2] == (3, 11):
        assert found == names, "run python -m deploy.chart_schema"


def test_every_value_has_a_default_and_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads(SCHEMA.read_text("utf-8"))
    assert set(values) == set(schema["properties"]) - {"global", "enabled", "tags"}
    assert schema["additionalProperties"] is False
    # Each group may have all values that `pods` may have.
    pods = schema["properties"]["pods"]["properties"]
    for group in ("headGroup", "workerGroup"):
        assert pods.items() <= schema["$defs"][group]["properties"].items()


def test_checkpoints_on_shared_storage_keep_the_database_on_block_storage() -> None:
    many = {"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}
    manifests = rendered({"checkpoints": many})
    claims = {
        name: one(manifests, "PersistentVolumeClaim", f"-{name}")["spec"]
        for name in ("checkpoints", "database")
    }
    assert claims["checkpoints"]["accessModes"] == ["ReadWriteMany"]
    assert claims["database"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claims["database"]


@pytest.mark.parametrize("mode", KINDS)
def test_each_mode_is_one_object_of_its_kind_that_can_be_suspended(mode: str) -> None:
    running = rendered({"mode": mode})
    assert ray_object(running)["kind"] == KINDS[mode]
    # Kueue sets the field too, so an object that is not suspended does not name it.
    assert "suspend" not in ray_object(running)["spec"]
    suspended = rendered({"mode": mode, "suspend": True})
    spec = dict(ray_object(suspended)["spec"])
    assert spec.pop("suspend") is True
    assert spec == ray_object(running)["spec"]
    check_subset(suspended)
    check_operator_rules(suspended)


def test_the_cluster_is_the_same_in_every_mode_except_for_the_api() -> None:
    clusters = {}
    for mode in KINDS:
        cluster = json.loads(json.dumps(cluster_of(rendered({"mode": mode}))))
        cluster.pop("upgradeStrategy", None)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            # This label is a digest of the template.
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


def test_the_limits_of_a_job_reach_the_ray_job() -> None:
    job = {"backoffLimit": 5, "activeDeadlineSeconds": 31536000, "ttlSecondsAfterFinished": 60}
    spec = one(rendered({"mode": "job", "job": job}), "RayJob")["spec"]
    assert {key: spec[key] for key in job} == job
    # A deadline of 0 seconds would end the job at once.
    assert "activeDeadlineSeconds" not in one(rendered({"mode": "job"}), "RayJob")["spec"]


def test_the_control_store_outlives_the_head_with_redis() -> None:
    redis = {"address": "redis.db:6379", "existingSecret": "redis", "key": "1e3"}
    manifests = rendered({"gcs": {"backend": "redis", "redis": redis}})
    check_subset(manifests)
    password = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "1e3"}}}
    assert cluster_of(manifests)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.db:6379",
        "redisPassword": password,
    }
    for template in pod_templates(manifests).values():
        # Ray's default of 60 s is shorter than the restart of a head.
        assert (
            by_name(ray_container(template)["env"])["RAY_gcs_rpc_server_reconnect_timeout_s"][
                "value"
            ]
            == "600"
        )
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


def test_disruption_budgets_keep_the_pods_that_every_step_needs() -> None:
    manifests = rendered({}, PRODUCTION)
    budgets = {
        manifest["metadata"]["name"].removeprefix("demo-rayloom-"): manifest["spec"]
        for manifest in manifests
        if manifest["kind"] == "PodDisruptionBudget"
    }
    kept = {name: budget["minAvailable"] for name, budget in budgets.items()}
    # Of the two pods of inference and of environment, one may be evicted.
    assert kept == {"head": 1, "trainer": 1, "inference": 1, "environment": 1}
    for name, template in pod_templates(manifests).items():
        selector = budgets[name]["selector"]["matchLabels"].items()
        assert selector <= template["metadata"]["labels"].items()
    off = rendered({"podDisruptionBudgets": {"enabled": False}}, PRODUCTION)
    assert "PodDisruptionBudget" not in {manifest["kind"] for manifest in off}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {},
            [
                "port-forward service/demo-rayloom-api 8000:8000",
                "helm test demo",
                "--set suspend=true",
            ],
        ),
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


@in_proof
@pytest.mark.parametrize("is_helm_3", [False, True])
@pytest.mark.parametrize("own", [{"enabled": True}, {"enabled": False}, {}])
def test_the_chart_works_as_a_conditional_dependency(
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


@in_proof
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
    # Only Kueue suspends and resumes the object, an upgrade does not.
    assert "suspend" not in ray_object(manifests)["spec"]
    assert cluster_of(manifests) == cluster_of(before)


@in_proof
def test_the_priority_class_of_kueue_is_a_label_of_the_ray_object() -> None:
    labels = ray_object(checked({"kueue": {"priorityClass": "high"}}))["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/priority-class"] == "high"


@in_proof
def test_common_labels_are_on_every_object_and_change_no_pod() -> None:
    manifests = checked({"commonLabels": {"team": "rl"}})
    objects = [each for each in manifests if each["kind"] != "Pod"]
    assert len(objects) > 5
    assert {each["metadata"]["labels"]["team"] for each in objects} == {"rl"}
    assert pod_templates(manifests) == pod_templates(rendered())


@in_proof
def test_claims_have_labels_and_may_select_a_volume_by_labels() -> None:
    selector = {"matchLabels": {"tier": "fast"}}
    values = {"modelCache": {"enabled": True}, "database": {"accessModes": ["ReadWriteOncePod"]}}
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


@every_mode
def test_the_ray_object_has_the_queue_label_of_kueue(mode: str) -> None:
    found = ray_object(rendered({"mode": mode, "kueue": {"queueName": "research"}}))
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in ray_object(rendered())["metadata"]["labels"]


def test_further_manifests_are_rendered_as_templates() -> None:
    note = one(rendered({}, *VARIANTS["everything"]), "ConfigMap", "-note")
    assert (note["metadata"]["name"], note["data"]["note"]) == ("demo-note", "of demo")


@pytest.mark.parametrize("create", [True, False])
def test_no_pod_has_a_token_and_environments_have_an_account_without_rights(
    create: bool,
) -> None:
    annotations = {"cloud/role": "bucket"} if create else {}
    account = {"create": create, "name": "trainers", "annotations": annotations}
    manifests = rendered({"serviceAccount": account})
    accounts = {
        group: template["spec"]["serviceAccountName"]
        for group, template in pod_templates(manifests).items()
    }
    bare = "demo-rayloom-environment" if create else "default"
    assert accounts == dict.fromkeys(GROUPS, "trainers") | {"environment": bare}
    made = {
        each["metadata"]["name"]: each for each in manifests if each["kind"] == "ServiceAccount"
    }
    assert set(made) == ({"trainers", bare} if create else set())
    for name, each in made.items():
        assert each["automountServiceAccountToken"] is False
        assert each["metadata"].get("annotations", {}) == (
            {"cloud/role": "bucket"} if name == "trainers" else {}
        )


def test_a_new_rotation_text_is_an_annotation_of_the_drawn_secrets() -> None:
    manifests = rendered({"auth": {"rotation": "1e3"}})
    secrets = [each for each in manifests if each["kind"] == "Secret"]
    assert len(secrets) == 2
    for secret in secrets:
        assert secret["metadata"]["annotations"] == {"rayloom/rotation": "1e3"}
    # The pods do not change, because they contain only the Secret's name.
    assert ray_object(manifests) == ray_object(rendered())
