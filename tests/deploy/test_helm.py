"""The chart, linted and rendered by real helm: what an API server and the operator would accept."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from worlds.helm_chart import (
    CHART,
    VARIANTS,
    HelmError,
    Manifest,
    helm,
    lint,
    one,
    pod_templates,
    rendered,
    run_config_text,
    serve_config,
    serve_config_of,
)
from worlds.manifest_checks import (
    check_core,
    check_operator_rules,
    check_operator_schema,
    check_subset,
    operator_schema,
)

from deploy.chart_schema import SCHEMA, dumped, with_config
from service.config.file import load_config
from service.config.tree import Config
from service.launch.placement import Node, Role, misfit

ROOT = CHART.parent
# No file (the defaults), and each variant.
FILES: list[tuple[Path, ...]] = [(), *((file,) for file in VARIANTS)]
every_variant = pytest.mark.parametrize(
    "files", FILES, ids=["defaults", *(file.stem for file in VARIANTS)]
)


def loaded(manifests: list[Manifest], directory: Path) -> Config:
    file = directory / "config.yaml"
    file.write_text(run_config_text(manifests))
    return load_config(file)


def container_of(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


def environment_of(template: Manifest) -> dict[str, Any]:
    return {variable["name"]: variable for variable in container_of(template)["env"]}


@every_variant
def test_real_helm_finds_nothing_to_warn_of(files: tuple[Path, ...]) -> None:
    assert "0 chart(s) failed" in lint(*files)


@every_variant
def test_every_object_is_valid_to_kubernetes_strictly(files: tuple[Path, ...]) -> None:
    # At least the configuration, two services and four pod templates.
    assert check_core(rendered({}, *files)) >= 7


@every_variant
def test_the_ray_service_is_valid_to_kuberay(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    check_subset(one(manifests, "RayService"))
    check_operator_rules(manifests)


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("KUBERAY_CRDS names no folder with the operator's own schemas")
    return operator_schema(Path(folder))


@every_variant
def test_the_ray_service_is_valid_to_the_operators_own_schema(
    files: tuple[Path, ...], crd: dict[str, Any]
) -> None:
    check_operator_schema(one(rendered({}, *files), "RayService"), crd)


def test_the_operators_own_schema_refuses_what_it_does_not_know(crd: dict[str, Any]) -> None:
    service = one(rendered(), "RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["contaners"] = []
    with pytest.raises(jsonschema.ValidationError, match="contaners"):
        check_operator_schema(service, crd)


def test_the_checks_refuse_what_an_api_server_would() -> None:
    manifests = rendered()
    wrong = copy.deepcopy(manifests)
    container_of(pod_templates(wrong)["trainer"])["imagePullPolizy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolizy"):
        check_core(wrong)
    wrong = copy.deepcopy(manifests)
    service = one(wrong, "RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["groupNme"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="groupNme"):
        check_subset(service)


@every_variant
def test_rayloom_reads_the_rendered_configuration(files: tuple[Path, ...], tmp_path: Path) -> None:
    config = loaded(rendered({}, *files), tmp_path)
    assert (config.service.host, config.metrics.host) == ("0.0.0.0", "0.0.0.0")


def test_the_default_run_learns_with_the_vetted_settings(tmp_path: Path) -> None:
    config = loaded(rendered(), tmp_path)
    vetted = load_config(ROOT / "deploy" / "configs" / "guessing-cpu.yaml")
    for section in ("model", "rollouts", "algorithm", "inference", "trainer", "queue"):
        assert getattr(config, section) == getattr(vetted, section), section


@every_variant
def test_serve_is_told_to_start_one_application_on_the_head(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    config, templates = serve_config_of(manifests), pod_templates(manifests)
    assert config["proxy_location"] == "HeadOnly"
    [application] = config["applications"]
    assert application["import_path"] == "deploy.serve_app:build"
    assert application["route_prefix"] == "/"
    mounts = {m["name"]: m["mountPath"] for m in container_of(templates["head"])["volumeMounts"]}
    has_secret = "RAYLOOM_DATABASE_URL" in environment_of(templates["head"])
    assert set(application["args"]) == {
        "config",
        "run_dir",
        *(() if has_secret else ("state_dir",)),
    }
    assert application["args"]["config"] == f"{mounts['config']}/config.yaml"
    assert application["args"]["run_dir"].startswith(f"{mounts['checkpoints']}/runs/")
    ports = {p["name"]: p["containerPort"] for p in container_of(templates["head"])["ports"]}
    assert config["http_options"] == {"host": "0.0.0.0", "port": ports["serve"]}


def test_the_api_port_is_the_configurations() -> None:
    assert serve_config({"config": {"service": {"port": 8123}}})["http_options"]["port"] == 8123


@every_variant
def test_the_services_reach_the_head_and_nothing_else(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    templates = pod_templates(manifests)
    for suffix in ("-api", "-metrics"):
        service = one(manifests, "Service", suffix)["spec"]
        reached = {
            group
            for group, template in templates.items()
            if service["selector"].items() <= template["metadata"]["labels"].items()
        }
        assert reached == {"head"}
        [port] = service["ports"]
        named = {p["name"]: p["containerPort"] for p in container_of(templates["head"])["ports"]}
        assert named[port["targetPort"]] == port["port"]


@every_variant
def test_no_pod_runs_as_root_and_every_pod_has_time_to_drain(files: tuple[Path, ...]) -> None:
    for template in pod_templates(rendered({}, *files)).values():
        spec, container = template["spec"], container_of(template)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        drain_s = int(environment_of(template)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]["value"])
        assert spec["terminationGracePeriodSeconds"] >= drain_s + 30
        # `ray stop` before the signal would undo the drain.
        assert "lifecycle" not in container
        [shm] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"


@every_variant
def test_workers_are_not_probed_for_a_proxy_that_they_do_not_have(files: tuple[Path, ...]) -> None:
    templates = pod_templates(rendered({}, *files))
    # The operator configures Serve once the head is ready: its probe must not ask Serve.
    assert "readinessProbe" not in container_of(templates.pop("head"))
    assert set(templates) == {"inference", "trainer", "environment"}
    for template in templates.values():
        assert container_of(template)["readinessProbe"]["httpGet"]["port"] == 52365


def test_the_head_offers_no_cpu_and_gpu_pods_reserve_what_ray_is_told() -> None:
    cluster = one(rendered({}, CHART / "ci" / "gpu.yaml"), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        limits = container_of(group["template"])["resources"]["limits"]
        assert int(group["rayStartParams"]["num-gpus"]) == limits.get("nvidia.com/gpu", 0)


@every_variant
def test_each_group_offers_the_role_that_its_parts_ask_for(files: tuple[Path, ...]) -> None:
    cluster = one(rendered({}, *files), "RayService")["spec"]["rayClusterConfig"]
    groups = {"control": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    offered = {}
    for name, group in groups.items():
        # The operator puts the value into a shell's command line as it stands.
        [value] = shlex.split(group["rayStartParams"]["resources"])
        offered[name] = json.loads(value)
    assert offered == {
        "control": {Role.CONTROL: 1},
        "inference": {Role.INFERENCE: 1},
        "trainer": {Role.TRAINER: 1},
        "environment": {Role.ENVIRONMENTS: 1},
    }


@every_variant
def test_the_run_fits_on_the_pods(files: tuple[Path, ...], tmp_path: Path) -> None:
    manifests = rendered({}, *files)
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    nodes = []
    for group in cluster["workerGroupSpecs"]:
        start = group["rayStartParams"]
        offered = json.loads(shlex.split(start["resources"])[0])
        offered |= {"CPU": float(start["num-cpus"]), "GPU": float(start["num-gpus"])}
        for number in range(group["replicas"]):
            name = f"{group['groupName']}-{number}"
            nodes.append(Node(node_id=name, address=name, resources=offered))
    assert misfit(loaded(manifests, tmp_path), nodes) is None


def test_a_new_release_of_the_chart_asks_for_no_new_cluster(tmp_path: Path) -> None:
    newer = tmp_path / "rayloom"
    shutil.copytree(CHART, newer)
    file = newer / "Chart.yaml"
    chart = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**chart, "version": "9.9.9", "appVersion": "9.9.9"}))
    before, after = rendered(), rendered(chart=newer, options=["--is-upgrade"])
    old, new = one(before, "RayService"), one(after, "RayService")
    assert old["metadata"]["labels"] != new["metadata"]["labels"]
    assert old["spec"] == new["spec"]


def test_secrets_stand_in_secrets_alone() -> None:
    first, second = rendered(), rendered(options=["--is-upgrade"])
    rest = [m for m in first if m["kind"] != "Secret"]
    # With no cluster to look them up in, each rendering draws new ones: nothing else differs.
    assert rest == [m for m in second if m["kind"] != "Secret"] and first != second
    secrets = [manifest for manifest in first if manifest["kind"] == "Secret"]
    assert len(secrets) == 2
    for secret in secrets:
        for value in secret["data"].values():
            key = base64.b64decode(value).decode()
            # The service asks for 16 characters at least.
            assert re.fullmatch(r"[A-Za-z0-9]{48}", key)
            assert key not in json.dumps(rest) and value not in json.dumps(rest)


def test_existing_secrets_are_named_and_none_is_made() -> None:
    manifests = rendered({}, CHART / "ci" / "existing-secrets.yaml")
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"Secret", "PersistentVolumeClaim", "ServiceAccount"}
    for template in pod_templates(manifests).values():
        key = environment_of(template)["RAYLOOM_API_KEY"]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "rayloom-api", "key": "token"}
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}


def test_the_network_policy_holds_for_every_pod_and_no_rule_is_open() -> None:
    manifests = rendered({"networkPolicy": {"enabled": True, "operatorNamespace": "ray-system"}})
    policy = one(manifests, "NetworkPolicy")["spec"]
    selector = policy["podSelector"]["matchLabels"].items()
    for template in pod_templates(manifests).values():
        assert selector <= template["metadata"]["labels"].items()
    assert len(policy["ingress"]) == 2 and all(rule["from"] for rule in policy["ingress"])


def test_the_database_lies_with_the_head_alone_or_behind_a_secret() -> None:
    for files in ((), (CHART / "ci" / "existing-secrets.yaml",)):
        manifests = rendered({}, *files)
        templates = pod_templates(manifests)
        head = templates.pop("head")
        volumes = {volume["name"]: volume for volume in head["spec"]["volumes"]}
        arguments = serve_config_of(manifests)["applications"][0]["args"]
        if files:
            source = environment_of(head)["RAYLOOM_DATABASE_URL"]["valueFrom"]["secretKeyRef"]
            assert source == {"name": "postgres", "key": "address"}
            assert "database" not in volumes and "state_dir" not in arguments
        else:
            claim = volumes["database"]["persistentVolumeClaim"]["claimName"]
            assert one(manifests, "PersistentVolumeClaim", "-database")["metadata"]["name"] == claim
            mounts = {m["name"]: m["mountPath"] for m in container_of(head)["volumeMounts"]}
            assert arguments["state_dir"].startswith(f"{mounts['database']}/")
        for template in templates.values():
            assert "RAYLOOM_DATABASE_URL" not in environment_of(template)
            assert "database" not in {volume["name"] for volume in template["spec"]["volumes"]}


def test_the_claim_outlives_the_release_unless_it_is_told_otherwise() -> None:
    for name in ("checkpoints", "database"):
        claim = one(rendered(), "PersistentVolumeClaim", f"-{name}")
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        claim = one(rendered({name: {"keep": False}}), "PersistentVolumeClaim", f"-{name}")
        assert "annotations" not in claim["metadata"]


def test_the_ray_version_is_the_locked_one() -> None:
    cluster = one(rendered(), "RayService")["spec"]["rayClusterConfig"]
    assert f"\nray=={cluster['rayVersion']} " in (ROOT / "locks" / "cpu.txt").read_text("utf-8")


def test_the_schema_of_config_is_that_of_the_tree() -> None:
    text = SCHEMA.read_text("utf-8")
    assert text == dumped(with_config(json.loads(text))), "run python -m deploy.chart_schema"


def test_every_value_has_a_default_and_every_default_a_place_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads(SCHEMA.read_text("utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainr": {}}, ["trainr", "not allowed"]),
        ({"trainer": {"gpu": 1}}, ["trainer", "gpu", "not allowed"]),
        ({"trainer": {"replicas": -1}}, ["trainer.replicas"]),
        ({"trainer": {"env": [{"name": "A"}]}}, ["trainer.env.0", "value"]),
        ({"head": {"replicas": 2}}, ["head", "replicas", "not allowed"]),
        (
            {"head": {"resources": {"limits": {"memory": "4 GB"}}}},
            ["head.resources.limits.memory"],
        ),
        (
            {"inference": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
            ["inference.resources.limits", "nvidia.com", "not allowed"],
        ),
        ({"config": {"trainer": {"num_rankz": 2}}}, ["config.trainer", "num_rankz", "not allowed"]),
        ({"config": {"run": {"steps": 0}}}, ["config.run.steps"]),
        ({"config": {"metrics": None}}, ["config", "metrics"]),
        ({"upgrade": {"strategy": "InPlace"}}, ["upgrade.strategy", "None"]),
        ({"auth": {"api": {"token": "abc"}}}, ["auth.api", "token", "not allowed"]),
        ({"rayVersion": 2.6}, ["rayVersion", "string"]),
        ({"image": {"digest": "sha256:12"}}, ["image.digest"]),
        ({"checkpoints": {"mountPath": "data"}}, ["checkpoints.mountPath"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_wrong_value_is_refused_by_its_path(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HelmError) as refusal:
        rendered(values)
    # Helm 4 writes /trainer/gpus, helm 3 trainer.gpus.
    text = str(refusal.value).replace("/", ".").replace("is not", "not")
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fullnameOverride": "a" * 48}, ["fullnameOverride", "48 characters", "at most 47"]),
        ({"fullnameOverride": "9lives"}, ["fullnameOverride", "9lives", "with a letter"]),
        ({"trainer": {"minReplicas": 2}}, ["trainer.minReplicas: got 2", "maxReplicas (1)"]),
        ({"environment": {"replicas": 3}}, ["environment.replicas: got 3", "expected 1 to 1"]),
        ({"config": {"trainer": {"num_ranks": 9}}}, ["rayCpus", "offer 4 CPUs", "asks for 11"]),
        ({"trainer": {"gpus": 1}}, ["gpus", "reserve 1 GPUs", "config uses none"]),
        (
            {"config": {"trainer": {"device": "cuda", "gpus_per_rank": 1}}},
            ["gpus", "offer 0 GPUs", "asks for 2"],
        ),
        (
            {
                "config": {"inference": {"gpus_per_replica": 2, "tensor_parallel_size": 2}},
                "inference": {"gpus": 1, "replicas": 2, "maxReplicas": 2},
            },
            ["config.inference.gpus_per_replica: got 2", "the 1 GPUs of one pod"],
        ),
        ({"config": {"model": {"path": "x"}}}, ["config.model: both", "tiny: null"]),
        (
            {"config": {"service": {"host": "127.0.0.1"}}},
            ["config.service.host: got 127.0.0.1", "expected 0.0.0.0"],
        ),
        ({"config": {"metrics": {"host": "localhost"}}}, ["config.metrics.host: got localhost"]),
        ({"config": {"service": {"port": 8265}}}, ["config.service.port: got 8265", "Ray's own"]),
        ({"config": {"metrics": {"port": 0}}}, ["config.metrics.port: got 0", "1024 or more"]),
        ({"auth": {"api": {"create": False}}}, ["auth.api.existingSecret", "beyond loopback"]),
        ({"auth": {"ray": {"create": False}}}, ["auth.ray.existingSecret", "auth_token"]),
        ({"rayVersion": "2.51.0"}, ["rayVersion: got 2.51.0", "2.52.0 or newer"]),
        ({"checkpoints": {"create": False}}, ["checkpoints.existingClaim", "name a claim"]),
        ({"networkPolicy": {"enabled": True}}, ["networkPolicy.operatorNamespace", "namespace"]),
        (
            {"head": {"env": [{"name": "RAY_AUTH_TOKEN", "value": "x"}]}},
            ["head.env: RAY_AUTH_TOKEN", "take it out"],
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_values_that_do_not_agree_are_refused_with_what_got_and_remedy(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(HelmError) as refusal:
        rendered(values)
    for word in ("these values are refused", *words):
        assert word in str(refusal.value)


def test_all_that_does_not_agree_is_told_at_once() -> None:
    with pytest.raises(HelmError) as refusal:
        rendered({"trainer": {"minReplicas": 2}, "rayVersion": "2.40.0"})
    assert "trainer.minReplicas" in str(refusal.value) and "rayVersion" in str(refusal.value)


def test_a_cluster_that_is_too_old_is_refused() -> None:
    with pytest.raises(HelmError, match="kubeVersion"):
        rendered(options=["--kube-version", "1.26.0"])


def test_the_notes_tell_how_to_reach_the_api() -> None:
    notes = helm("install", "demo", CHART, "--dry-run=client")
    assert "port-forward service/demo-rayloom-api 8000:8000" in notes
