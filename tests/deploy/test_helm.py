"""The chart, linted and rendered by real helm: what an API server and the operator would accept."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
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
)
from worlds.servers.helm_binary import HELM_3, helm_binary
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    GPU_SMALL,
    PRODUCTION,
    VARIANTS,
    HelmError,
    Manifest,
    arguments_of,
    cluster_of,
    helm,
    in_mode,
    lint,
    one,
    pod_templates,
    rendered,
    serve_config_of,
)

from deploy.chart_schema import DEFAULTS, SCHEMA, defaults_text, dumped, with_sources
from deploy.run_arguments import RunArguments
from service.config.file import load_config
from service.config.tree import Config, MetricsSettings, ServiceSettings
from service.launch.placement import Node, Role, misfit

ROOT = CHART.parent
EXISTING = VARIANTS["existing-secrets"]
every_variant = pytest.mark.parametrize("files", VARIANTS.values(), ids=list(VARIANTS))
every_mode = pytest.mark.parametrize("mode", ["service", "job", "cluster"])


def loaded(manifests: list[Manifest]) -> Config:
    return RunArguments.model_validate(arguments_of(manifests)).read_config()


def without_secrets(manifests: list[Manifest]) -> list[Manifest]:
    """Each rendering draws new ones, with no cluster to look them up in."""
    rest = [manifest for manifest in manifests if manifest["kind"] != "Secret"]
    return sorted(rest, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


def container_of(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


def environment_of(template: Manifest) -> dict[str, Any]:
    return {variable["name"]: variable for variable in container_of(template)["env"]}


def mounted_secrets(template: Manifest) -> dict[str, tuple[str, str]]:
    """The Secret and its key by the variable that names the mounted file."""
    [volume] = [v for v in template["spec"]["volumes"] if v["name"] == "secrets"]
    [mount] = [m for m in container_of(template)["volumeMounts"] if m["name"] == "secrets"]
    # A file that is mounted by subPath would never change.
    assert mount == {"name": "secrets", "mountPath": "/secrets", "readOnly": True}
    files = {
        f"/secrets/{item['path']}": (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    variables = environment_of(template).values()
    named = {each["name"]: each["value"] for each in variables if each.get("value") in files}
    assert set(named.values()) == set(files)
    return {name: files[file] for name, file in named.items()}


@pytest.mark.proof
@pytest.mark.chart
@every_variant
@every_mode
def test_both_helms_find_nothing_to_warn_of_and_render_the_same(
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
def test_every_object_is_valid_to_kubernetes_and_to_the_operator(
    files: tuple[Path, ...], mode: str
) -> None:
    manifests = rendered(in_mode(mode), *files)
    # At least a service, three budgets and four pod templates.
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
def test_the_ray_object_is_valid_to_the_operators_own_schema(
    files: tuple[Path, ...], mode: str, crds: Path
) -> None:
    check_operator_schema(rendered(in_mode(mode), *files), crds)


def test_the_operators_own_schema_refuses_what_it_does_not_know(crds: Path) -> None:
    wrong = copy.deepcopy(rendered())
    cluster_of(wrong)["workerGroupSpecs"][0]["template"]["spec"]["contaners"] = []
    with pytest.raises(jsonschema.ValidationError, match="contaners"):
        check_operator_schema(wrong, crds)


def test_the_checks_refuse_what_an_api_server_would() -> None:
    manifests = rendered()
    wrong = copy.deepcopy(manifests)
    container_of(pod_templates(wrong)["trainer"])["imagePullPolizy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolizy"):
        check_core(wrong)
    wrong = copy.deepcopy(manifests)
    cluster_of(wrong)["workerGroupSpecs"][0]["groupNme"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="groupNme"):
        check_subset(wrong)


@every_variant
def test_rayloom_reads_the_rendered_configuration(files: tuple[Path, ...]) -> None:
    config = loaded(rendered({}, *files))
    assert (config.service.host, config.metrics.host) == ("0.0.0.0", "0.0.0.0")
    assert config == loaded(rendered(in_mode("job"), *files))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (CPU_DEV, "guessing-cpu.yaml"),
        (GPU_SMALL, "one-node-gpu.yaml"),
        (PRODUCTION, "several-nodes-gpu.yaml"),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_a_value_set_has_the_whole_configuration_of_its_file(file: Path, source: str) -> None:
    vetted = ROOT / "deploy" / "configs" / source
    assert yaml.safe_load(file.read_text("utf-8"))["config"] == yaml.safe_load(vetted.read_text())
    # Nothing of the chart's own is mixed into it, but where a pod listens.
    sent = loaded(rendered({}, file))
    own = replace(sent, service=ServiceSettings(), metrics=MetricsSettings())
    assert own == load_config(vetted)


def test_the_defaults_hold_no_recipe() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["config"] == {}
    assert "0 chart(s) failed" in lint()
    with pytest.raises(HelmError, match=r"config: got none.*values-cpu-dev\.yaml"):
        helm("template", "demo", CHART)
    with pytest.raises(HelmError, match="config: has no model, or neither tasks nor a mixture"):
        helm("template", "demo", CHART, "--set", "config.model.path=x")


@every_variant
def test_serve_is_told_to_start_one_application_on_the_head(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    config, templates = serve_config_of(manifests), pod_templates(manifests)
    assert config["proxy_location"] == "HeadOnly"
    [application] = config["applications"]
    assert application["import_path"] == "deploy.serve_app:build"
    assert application["route_prefix"] == "/"
    ports = {p["name"]: p["containerPort"] for p in container_of(templates["head"])["ports"]}
    assert config["http_options"] == {"host": "0.0.0.0", "port": ports["serve"]}


@every_variant
@pytest.mark.parametrize("mode", ["service", "job"])
def test_a_run_is_told_its_configuration_and_where_it_lies(
    files: tuple[Path, ...], mode: str
) -> None:
    manifests = rendered(in_mode(mode), *files)
    head = pod_templates(manifests)["head"]
    mounts = {m["name"]: m["mountPath"] for m in container_of(head)["volumeMounts"]}
    arguments = arguments_of(manifests)
    has_secret = "RAYLOOM_DATABASE_URL_FILE" in environment_of(head)
    assert set(arguments) == {"config", "run_dir", *(() if has_secret else ("state_dir",))}
    name = arguments["config"]["run"]["name"]
    assert arguments["run_dir"] == f"{mounts['checkpoints']}/runs/{name}"
    if not has_secret:
        assert arguments["state_dir"] == f"{mounts['database']}/{name}"


def test_the_api_port_is_the_configurations() -> None:
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
        named = {p["name"]: p["containerPort"] for p in container_of(templates["head"])["ports"]}
        assert all(named[port["targetPort"]] == port["port"] for port in service["ports"])


@every_variant
def test_no_pod_runs_as_root_and_every_pod_has_time_to_drain(files: tuple[Path, ...]) -> None:
    for name, template in pod_templates(rendered({}, *files)).items():
        spec, container = template["spec"], container_of(template)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False
        drain_s = int(environment_of(template)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]["value"])
        # `ray stop` before the signal would undo the drain: the head's hook ends the run alone.
        if name == "head":
            grace = str(drain_s // 2)
            hook = {"exec": {"command": ["rayloom", "stop", "--grace", grace]}}
            assert container["lifecycle"] == {"preStop": hook}
            assert spec["terminationGracePeriodSeconds"] == 2 * drain_s + 30
        else:
            assert "lifecycle" not in container
            assert spec["terminationGracePeriodSeconds"] == drain_s + 30
        [shm] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"


@every_variant
def test_workers_are_not_probed_for_a_proxy_that_they_do_not_have(files: tuple[Path, ...]) -> None:
    templates = pod_templates(rendered({}, *files))
    # The operator configures Serve once the head is ready: its probe must not ask Serve.
    of_head = container_of(templates.pop("head")).get("readinessProbe")
    assert of_head is None or of_head["httpGet"]["port"] == 52365
    assert {"inference", "environment"} <= set(templates)
    for template in templates.values():
        assert container_of(template)["readinessProbe"]["httpGet"]["port"] == 52365


def test_the_head_offers_no_cpu_and_gpu_pods_reserve_what_ray_is_told() -> None:
    cluster = cluster_of(rendered({}, GPU_SMALL))
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        limits = container_of(group["template"])["resources"]["limits"]
        assert int(group["rayStartParams"]["num-gpus"]) == limits.get("nvidia.com/gpu", 0)


@every_variant
def test_each_group_offers_the_role_that_its_parts_ask_for(files: tuple[Path, ...]) -> None:
    cluster = cluster_of(rendered({}, *files))
    groups = {"control": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    offered = {}
    for name, group in groups.items():
        # The operator puts the value into a shell's command line as it stands.
        [value] = shlex.split(group["rayStartParams"]["resources"])
        offered[name] = json.loads(value)
    # Without pods of its own the trainer's role is the engines' pods' too.
    if "trainer" not in offered:
        assert offered["inference"].pop(Role.TRAINER) == 1
        offered["trainer"] = {Role.TRAINER: 1}
    assert offered == {
        "control": {Role.CONTROL: 1},
        "inference": {Role.INFERENCE: 1},
        "trainer": {Role.TRAINER: 1},
        "environment": {Role.ENVIRONMENTS: 1},
    }


@every_variant
def test_the_run_fits_on_the_pods(files: tuple[Path, ...]) -> None:
    manifests = rendered({}, *files)
    cluster = cluster_of(manifests)
    nodes = []
    for group in cluster["workerGroupSpecs"]:
        start = group["rayStartParams"]
        offered = json.loads(shlex.split(start["resources"])[0])
        offered |= {"CPU": float(start["num-cpus"]), "GPU": float(start["num-gpus"])}
        for number in range(group["replicas"]):
            name = f"{group['groupName']}-{number}"
            nodes.append(Node(node_id=name, address=name, resources=offered))
    assert misfit(loaded(manifests), nodes) is None


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
    manifests = rendered({}, *EXISTING)
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"Secret", "PersistentVolumeClaim", "ServiceAccount"}
    for template in pod_templates(manifests).values():
        assert mounted_secrets(template)["RAYLOOM_API_KEY_FILE"] == ("rayloom-api", "token")
    cluster = cluster_of(manifests)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}


def test_the_database_lies_with_the_head_alone_or_behind_a_secret() -> None:
    for files in ((), EXISTING):
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
            mounts = {m["name"]: m["mountPath"] for m in container_of(head)["volumeMounts"]}
            assert arguments["state_dir"].startswith(f"{mounts['database']}/")
        for template in templates.values():
            assert set(mounted_secrets(template)) == {"RAYLOOM_API_KEY_FILE"}
            assert "database" not in {volume["name"] for volume in template["spec"]["volumes"]}


def test_a_database_that_was_kept_is_gone_on_with_by_the_name_of_its_claim() -> None:
    manifests = rendered({"database": {"existingClaim": "restored"}})
    volumes = {each["name"]: each for each in pod_templates(manifests)["head"]["spec"]["volumes"]}
    assert volumes["database"]["persistentVolumeClaim"] == {"claimName": "restored"}
    assert arguments_of(manifests)["state_dir"].startswith("/database/")
    claims = [each for each in manifests if each["kind"] == "PersistentVolumeClaim"]
    assert [each["metadata"]["name"] for each in claims] == ["demo-rayloom-checkpoints"]
    # What class it is of, the chart does not know.
    rendered(
        {
            "database": {"existingClaim": "restored"},
            "checkpoints": {"accessModes": ["ReadWriteMany"]},
        }
    )


def test_the_claim_outlives_the_release_unless_it_is_told_otherwise() -> None:
    for name in ("checkpoints", "database"):
        claim = one(rendered(), "PersistentVolumeClaim", f"-{name}")
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        claim = one(rendered({name: {"keep": False}}), "PersistentVolumeClaim", f"-{name}")
        assert "annotations" not in claim["metadata"]


def test_the_ray_version_is_the_locked_one() -> None:
    cluster = cluster_of(rendered())
    assert f"\nray=={cluster['rayVersion']} " in (ROOT / "locks" / "cpu.txt").read_text("utf-8")


def test_the_schema_is_in_step_with_the_tree_and_with_kubernetes() -> None:
    text = SCHEMA.read_text("utf-8")
    assert text == dumped(with_sources(json.loads(text))), "run python -m deploy.chart_schema"
    assert DEFAULTS.read_text("utf-8") == defaults_text(), "run python -m deploy.chart_schema"


def test_every_value_has_a_default_and_every_default_a_place_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads(SCHEMA.read_text("utf-8"))
    assert set(values) == set(schema["properties"]) - {"global", "enabled", "tags"}
    assert schema["additionalProperties"] is False
    # What every pod may have, each group may have.
    pods = schema["properties"]["pods"]["properties"]
    for group in ("headGroup", "workerGroup"):
        assert pods.items() <= schema["$defs"][group]["properties"].items()


def test_a_cluster_that_is_too_old_is_refused() -> None:
    with pytest.raises(HelmError, match="kubeVersion"):
        rendered(options=["--kube-version", "1.26.0"])


def test_the_notes_tell_how_to_reach_the_api() -> None:
    notes = helm("install", "demo", CHART, "--dry-run=client", "--values", CPU_DEV)
    assert "port-forward service/demo-rayloom-api 8000:8000" in notes


# What YAML would read as a number or as a truth where it is not quoted.
MISREAD = ["20261122", "1e3", "true", "0x1f", "null", "1_000"]


@pytest.mark.proof
@pytest.mark.chart
@pytest.mark.parametrize("text", MISREAD)
def test_a_text_that_looks_like_a_number_stays_a_text(text: str) -> None:
    label = text.replace("_", "-")
    values = {
        "fullnameOverride": "agents",
        "image": {"repository": label, "tag": text},
        "imagePullSecrets": [{"name": label}],
        "config": {"run": {"name": text}},
        "auth": {"api": {"existingSecret": label, "key": text}, "ray": {"existingSecret": label}},
        "checkpoints": {"existingClaim": label},
        "database": {"existingSecret": label, "key": text},
        "serviceAccount": {"name": label, "annotations": {"a": text}},
        "service": {"annotations": {"a": text}},
        "networkPolicy": {"enabled": True, "operatorNamespace": label, "egress": [{}]},
        "trainer": {
            "nodeSelector": {"a": text},
            "env": [{"name": "A", "value": text}],
            "tolerations": [{"key": "a", "value": text}],
        },
    }
    manifests = rendered(values, options=["--namespace", label])
    check_core(manifests)
    check_subset(manifests)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {label}
    arguments = arguments_of(manifests)
    assert arguments["run_dir"] == f"/checkpoints/runs/{text}"
    assert arguments["config"]["run"]["name"] == text
    # The claims and secrets that the chart makes itself.
    del values["checkpoints"], values["database"], values["auth"]
    classes = {"checkpoints": {"storageClass": label}, "database": {"storageClass": label}}
    release = text if text.isdigit() else "demo"
    made = rendered(values | classes, release=release, options=["--namespace", label])
    check_core(made)
    for name in classes:
        claim = one(made, "PersistentVolumeClaim", f"-{name}")
        assert claim["spec"]["storageClassName"] == label


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
    """All that stands in lists of this name, however deep."""
    if isinstance(node, list):
        return [each for item in node for each in found(item, key)]
    if not isinstance(node, dict):
        return []
    own = node[key] if isinstance(node.get(key), list) else []
    return [*own, *(each for value in node.values() for each in found(value, key))]


def test_a_pod_may_ask_for_any_resource_and_for_gpus_of_any_kind() -> None:
    amounts = {"rdma/hca": 1, "hugepages-2Mi": "1Gi"}
    values = {
        "config": {
            "inference": {"gpus_per_replica": 1},
            "trainer": {"device": "cuda", "gpus_per_rank": 1},
        },
        "pods": {"gpuResource": "amd.com/gpu"},
        "inference": {"gpus": 1, "gpuResource": "nvidia.com/mig-3g.40gb"},
        "trainer": {
            "gpus": 2,
            "resources": {"requests": amounts, "limits": amounts},
        },
    }
    manifests = rendered(values)
    check_core(manifests)
    templates = pod_templates(manifests)
    asked = container_of(templates["trainer"])["resources"]
    assert asked["limits"] == {"memory": "5Gi", "amd.com/gpu": 2, **amounts}
    assert asked["requests"] == {"cpu": "2", **asked["limits"]}
    assert container_of(templates["inference"])["resources"]["limits"] == {
        "memory": "5Gi",
        "nvidia.com/mig-3g.40gb": 1,
    }


def test_checkpoints_for_many_nodes_go_with_a_database_on_block_storage() -> None:
    many = {"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}
    manifests = rendered({"checkpoints": many})
    claims = {
        name: one(manifests, "PersistentVolumeClaim", f"-{name}")["spec"]
        for name in ("checkpoints", "database")
    }
    assert claims["checkpoints"]["accessModes"] == ["ReadWriteMany"]
    assert claims["database"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claims["database"]
