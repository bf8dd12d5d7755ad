"""Tests of the pods: common values, values of a group, resources, caches and accounts."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.manifest_checks import check_core, checked
from worlds.servers.helm_chart import (
    CHART,
    GPU_SMALL,
    GROUPS,
    PRODUCTION,
    VARIANTS,
    Manifest,
    arguments_of,
    by_name,
    cluster_of,
    every_variant,
    groups_of,
    in_proof,
    one,
    pod_templates,
    ray_container,
    rendered,
)

GIB = 1024**3


@pytest.fixture(scope="module")
def everything() -> dict[str, Manifest]:
    """Return the pod templates of helm/ci/everything.yaml by group."""
    return pod_templates(rendered({}, *VARIANTS["everything"]))


PROBES = ("readinessProbe", "livenessProbe", "startupProbe")
AGENT = {"path": "/api/healthz", "port": 52365}


def ray_containers(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    return {group: ray_container(each) for group, each in pod_templates(manifests).items()}


@every_variant
def test_no_pod_runs_as_root_and_every_pod_has_time_to_drain(files: tuple[Path, ...]) -> None:
    for name, template in pod_templates(rendered({}, *files)).items():
        spec, container = template["spec"], ray_container(template)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False
        variables = by_name(container["env"])
        drain_s = int(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]["value"])
        # `ray stop` before the signal would undo the drain, so the head's hook ends only the run.
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
def test_readiness_probes_do_not_ask_for_a_serve_proxy(files: tuple[Path, ...]) -> None:
    templates = pod_templates(rendered({}, *files))
    # The operator configures Serve only when the head is ready, so its probe must not ask Serve.
    of_head = ray_container(templates.pop("head")).get("readinessProbe")
    assert of_head is None or of_head["httpGet"]["port"] == 52365
    assert {"inference", "environment"} <= set(templates)
    for template in templates.values():
        assert ray_container(template)["readinessProbe"]["httpGet"]["port"] == 52365


def test_the_head_offers_no_cpu_and_gpu_pods_reserve_the_gpus_of_ray() -> None:
    cluster = cluster_of(rendered({}, GPU_SMALL))
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        limits = ray_container(group["template"])["resources"]["limits"]
        assert int(group["rayStartParams"]["num-gpus"]) == limits.get("nvidia.com/gpu", 0)


@every_variant
def test_each_group_offers_the_resource_that_its_parts_require(files: tuple[Path, ...]) -> None:
    cluster = cluster_of(rendered({}, *files))
    groups = {"control": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    offered = {}
    for name, group in groups.items():
        # The operator puts the value into a shell's command line without quoting it.
        [value] = shlex.split(group["rayStartParams"]["resources"])
        offered[name] = json.loads(value)
    # If the trainer has no pods, the pods of the engines offer its resource too.
    if "trainer" not in offered:
        assert offered["inference"].pop("rayloom_trainer") == 1
        offered["trainer"] = {"rayloom_trainer": 1}
    assert offered == {
        "control": {"rayloom_control": 1},
        "inference": {"rayloom_inference": 1},
        "trainer": {"rayloom_trainer": 1},
        "environment": {"rayloom_environments": 1},
    }


def test_a_pod_may_request_any_resource_and_any_kind_of_gpu() -> None:
    amounts = {"rdma/hca": 1, "hugepages-2Mi": "1Gi"}
    values = {
        "config": {
            "inference": {"gpus_per_replica": 1},
            "trainer": {"device": "cuda", "gpus_per_rank": 1},
        },
        "pods": {"gpuResource": "amd.com/gpu"},
        "inference": {"gpus": 1, "gpuResource": "nvidia.com/mig-3g.40gb"},
        "trainer": {"gpus": 2, "resources": {"requests": amounts, "limits": amounts}},
    }
    manifests = rendered(values)
    check_core(manifests)
    templates = pod_templates(manifests)
    asked = ray_container(templates["trainer"])["resources"]
    assert asked["limits"] == {"memory": "5Gi", "amd.com/gpu": 2, **amounts}
    assert asked["requests"] == {"cpu": "2", **asked["limits"]}
    assert ray_container(templates["inference"])["resources"]["limits"] == {
        "memory": "5Gi",
        "nvidia.com/mig-3g.40gb": 1,
    }


@pytest.mark.parametrize("group", GROUPS)
def test_every_pod_has_the_values_of_pods(everything: dict[str, Manifest], group: str) -> None:
    template = everything[group]
    spec, container = template["spec"], ray_container(template)
    assert template["metadata"]["annotations"] == {"example.org/owner": "research"}
    assert template["metadata"]["labels"]["example.org/cost-centre"] == "1e3"
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == group
    assert by_name(container["env"])["NCCL_DEBUG"]["value"] == "WARN"
    assert container["envFrom"] == [{"secretRef": {"name": "tracking", "optional": True}}]
    assert by_name(spec["volumes"])["certificates"]["configMap"] == {"name": "certificates"}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/etc/ssl/own"]["readOnly"] is True
    assert "greet" in by_name(spec["initContainers"])
    # The operator treats the first container as that of Ray.
    assert [each["name"] for each in spec["containers"]][1:] == ["logs"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert {"key": "shared", "operator": "Exists"} in spec["tolerations"]
    assert "nodeAffinity" in spec["affinity"]
    assert (spec["priorityClassName"], spec["schedulerName"]) == ("research", "volcano")
    spread, across = spec["topologySpreadConstraints"]
    assert spread["maxSkew"] == 1
    # A selector that the user gives is not changed.
    assert across["labelSelector"] == {"matchLabels": {"app.kubernetes.io/instance": "demo"}}
    selector = spread["labelSelector"]["matchLabels"]
    others = [everything[other]["metadata"]["labels"] for other in GROUPS if other != group]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert not any(selector.items() <= labels.items() for labels in others)


def test_a_group_appends_to_lists_merges_maps_and_replaces_other_values(
    everything: dict[str, Manifest],
) -> None:
    own, other = everything["environment"], everything["trainer"]
    variables = by_name(ray_container(own)["env"])
    assert {"NCCL_DEBUG", "SANDBOX"} <= set(variables)
    assert "SANDBOX" not in by_name(ray_container(other)["env"])
    assert [each["key"] for each in own["spec"]["tolerations"]] == ["shared", "sandbox"]
    assert own["metadata"]["labels"]["example.org/untrusted"] == "true"
    assert (own["spec"]["runtimeClassName"], other["spec"]["runtimeClassName"]) == (
        "kata",
        "gvisor",
    )
    read_only = [
        ray_container(template)["securityContext"]["readOnlyRootFilesystem"]
        for template in (own, other)
    ]
    assert read_only == [False, True]
    sizes = [
        by_name(template["spec"]["volumes"])["tmp"]["emptyDir"]["sizeLimit"]
        for template in (own, other)
    ]
    assert sizes == ["2Gi", "20Gi"]


def test_all_written_directories_are_on_volumes() -> None:
    for template in pod_templates(rendered()).values():
        container = ray_container(template)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        writable = {
            mount["mountPath"]: mount["name"]
            for mount in container["volumeMounts"]
            if not mount.get("readOnly")
        }
        home = by_name(container["env"])["HOME"]["value"]
        assert {"/tmp", home, "/dev/shm", "/checkpoints"} <= set(writable)
        volumes = by_name(template["spec"]["volumes"])
        assert set(writable.values()) <= set(volumes)
        # Fetched files and caches are in HOME, because /tmp is smaller.
        assert volumes[writable[home]]["emptyDir"] == {"sizeLimit": "50Gi"}


@pytest.mark.parametrize(
    ("size", "expected"), [("1Gi", GIB), ("1536Mi", 1.5 * GIB), ("2G", 2e9), (3000000000, 3e9)]
)
def test_the_object_store_fits_into_shared_memory(size: str | int, expected: float) -> None:
    values = {group: {"shmSize": size} for group in ("head", "trainer")}
    manifests = rendered(values)
    cluster = cluster_of(manifests)
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for group in (cluster["headGroupSpec"], groups["trainer"]):
        # Ray uses the disk if its store is not smaller than the free space of /dev/shm.
        assert int(group["rayStartParams"]["object-store-memory"]) == int(0.8 * expected)
        shm = by_name(group["template"]["spec"]["volumes"])["shm"]["emptyDir"]
        assert shm == {"medium": "Memory", "sizeLimit": str(size)}


def test_models_of_a_hub_are_fetched_once_before_the_head_starts(
    everything: dict[str, Manifest],
) -> None:
    # The fetching container is the last one, because those of the user may provide certificates.
    greet, fetch = everything["head"]["spec"]["initContainers"]
    assert (greet["name"], fetch["name"]) == ("greet", "fetch-models")
    assert fetch["command"][:3] == ["timeout", "--kill-after=30", "900"]
    script, wanted = fetch["args"]
    ast.parse(script)
    assert json.loads(wanted) == [
        {"name": "Qwen/Qwen3-0.6B", "revision": ""},
        {"name": "Qwen/Qwen3-0.6B-Base", "revision": ""},
    ]
    assert by_name(fetch["env"])["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "hugging-face",
        "key": "token",
    }
    mounts = by_name(fetch["volumeMounts"])
    assert by_name(fetch["env"])["HF_HOME"]["value"] == mounts["models"]["mountPath"]
    ray = ray_container(everything["head"])
    assert by_name(fetch["env"])["HOME"] == by_name(ray["env"])["HOME"]
    # The container has the user's environment and volumes, for example a proxy and certificates.
    assert by_name(fetch["env"])["NCCL_DEBUG"] == {"name": "NCCL_DEBUG", "value": "WARN"}
    assert fetch["envFrom"] == ray["envFrom"]
    assert mounts["certificates"] == by_name(ray["volumeMounts"])["certificates"]
    assert "RAYLOOM_DATABASE_URL_FILE" not in by_name(fetch["env"])
    claim = one(rendered({}, *VARIANTS["everything"]), "PersistentVolumeClaim", "-models")
    for group, template in everything.items():
        variables = by_name(ray_container(template)["env"])
        assert variables["HF_HOME"]["value"] == "/models"
        # Pods that run environments of others must not have the token of the hub.
        assert variables["HF_HUB_OFFLINE"]["value"] == "1" and "HF_TOKEN" not in variables
        volume = by_name(template["spec"]["volumes"])["models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        if group != "head":
            assert "fetch-models" not in by_name(template["spec"]["initContainers"])


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fetched(config: dict[str, Any], **cache: Any) -> list[dict[str, str]]:
    """Return the list that fetch-models receives, with values-production."""
    values = {"config": config, "modelCache": {"enabled": True, **cache}}
    head = pod_templates(rendered(values, PRODUCTION))["head"]
    found: list[dict[str, str]] = json.loads(
        by_name(head["spec"]["initContainers"])["fetch-models"]["args"][1]
    )
    return found


def test_data_sets_of_a_hub_are_fetched_each_split_at_its_revision() -> None:
    gsm8k = {"name": "openai/gsm8k", "subset": "main", "revision": COMMIT}
    found = fetched(
        {
            "tasks": {"dataset": "openai/gsm8k", "subset": "main", "evaluation_split": "test"},
            "evaluation": {
                "sets": {
                    "hard": {"dataset": "HuggingFaceH4/MATH-500", "split": "test"},
                    "again": {"split": "train"},
                    "local": {"file": "/models/held.jsonl"},
                    "own": {"samples": 4},
                }
            },
        },
        revisions={"openai/gsm8k": COMMIT, "Qwen/Qwen3-0.6B": COMMIT},
    )
    assert found == [
        {"name": "Qwen/Qwen3-0.6B", "revision": COMMIT},
        {**gsm8k, "split": "train"},
        {**gsm8k, "split": "test"},
        {"name": "HuggingFaceH4/MATH-500", "subset": "", "split": "test", "revision": ""},
    ]


def test_the_data_set_of_each_entry_of_a_mixture_is_fetched() -> None:
    parts = {
        "a": {"tasks": {"environment": "single_turn", "dataset": "squad"}},
        "b": {"tasks": {"environment": "single_turn", "dataset": "/models/rows.csv"}},
        "c": {"tasks": {"environment": "single_turn", "dataset": "/opt/rows.JSONL.gz"}},
        "d": {"tasks": {"environment": "single_turn", "dataset": "/models/rows"}},
    }
    [_, only] = fetched({"tasks": None, "mixture": parts})
    assert only == {"name": "squad", "subset": "", "split": "train", "revision": ""}


def test_pods_are_offline_even_if_only_a_data_set_comes_from_a_hub() -> None:
    values = {"config": {"tasks": {"dataset": "a/b"}}, "modelCache": {"enabled": True}}
    for name, template in pod_templates(rendered(values)).items():
        assert by_name(ray_container(template)["env"])["HF_HUB_OFFLINE"]["value"] == "1"
        assert ("initContainers" in template["spec"]) == (name == "head")


def test_without_a_cache_every_pod_has_the_token_because_each_loads_the_tokenizer() -> None:
    values = {"hub": {"existingSecret": "hugging-face", "key": "1e3"}}
    for template in pod_templates(rendered(values)).values():
        variables = by_name(ray_container(template)["env"])
        source = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert source == {"name": "hugging-face", "key": "1e3"}
        assert "HF_HOME" not in variables
        assert "initContainers" not in template["spec"]


@pytest.mark.parametrize("path", ["/models/mine", "/opt/mine"])
def test_a_models_directory_is_not_fetched(path: str) -> None:
    values = {
        "config": {"model": {"tiny": None, "path": path}},
        "modelCache": {"enabled": True, "existingClaim": "cache"},
    }
    manifests = rendered(values)
    for template in pod_templates(manifests).values():
        assert "initContainers" not in template["spec"]
        variables = by_name(ray_container(template)["env"])
        assert variables["HF_HOME"]["value"] == "/models"
        # Nothing was fetched before, so the pods must still be able to fetch.
        assert "HF_HUB_OFFLINE" not in variables
        volume = by_name(template["spec"]["volumes"])["models"]
        assert volume["persistentVolumeClaim"]["claimName"] == "cache"
    assert not [each for each in manifests if each["metadata"]["name"].endswith("-models")]


def test_the_sidecar_on_the_page_shows_the_log_of_the_run_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    document = (CHART.parent / "docs" / "deploy.md").read_text("utf-8")
    [text] = [
        each for each in re.findall(r"```yaml\n(.*?)```", document, re.S) if "run-log" in each
    ]
    spec = pod_templates(rendered(yaml.safe_load(text)))["head"]["spec"]
    sidecar = by_name(spec["containers"])["run-log"]
    log = tmp_path / "NAME" / "run.log"
    command = [part.replace("/checkpoints/runs/", f"{tmp_path}/") for part in sidecar["command"]]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    try:
        # The container starts before the run.
        log.parent.mkdir()
        log.write_text("step 1\n")
        assert process.stdout.readline() == b"step 1\n"
        # Rotate the log, as the run does with a full file.
        log.rename(log.with_suffix(".log.1"))
        log.write_text("step 2\n")
        assert process.stdout.readline() == b"step 2\n"
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.stdout.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_task_files_and_environments_are_in_the_workspace(everything: dict[str, Manifest]) -> None:
    manifests = rendered({}, *VARIANTS["everything"])
    files = one(manifests, "ConfigMap", "-workspace")
    assert set(files["data"]) == {"tasks.jsonl", "my_game.py"}
    assert arguments_of(manifests)["config"]["tasks"]["file"] == "/workspace/tasks.jsonl"
    for template in everything.values():
        assert by_name(ray_container(template)["env"])["PYTHONPATH"]["value"] == "/workspace"
        mount = by_name(ray_container(template)["volumeMounts"])["workspace"]
        assert mount == {"name": "workspace", "mountPath": "/workspace", "readOnly": True}
        volume = by_name(template["spec"]["volumes"])["workspace"]
        assert volume["configMap"]["name"] == files["metadata"]["name"]


def test_a_file_of_the_workspace_has_every_character_of_its_text() -> None:
    texts = {"a": " lead\n\n\n", "b": "{{ .Values }}\t<&>\r\n", "c": "null", "d": "", "e": "é\n\n"}
    files = one(rendered({"workspace": {"files": texts}}), "ConfigMap", "-workspace")
    assert files["data"] == texts


@pytest.mark.parametrize(
    ("key", "volume"),
    [
        ("existingConfigMap", {"configMap": {"name": "mine"}}),
        ("existingClaim", {"persistentVolumeClaim": {"claimName": "mine", "readOnly": True}}),
    ],
)
def test_the_workspace_may_be_an_existing_volume(key: str, volume: dict[str, Any]) -> None:
    for template in pod_templates(rendered({"workspace": {key: "mine"}})).values():
        assert by_name(template["spec"]["volumes"])["workspace"] == {"name": "workspace", **volume}
    assert "workspace" not in by_name(pod_templates(rendered())["head"]["spec"]["volumes"])


@in_proof
def test_ids_can_be_left_to_the_platform() -> None:
    left = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"))
    manifests = checked({"pods": {"podSecurityContext": left}})
    pods = [each["spec"] for each in pod_templates(manifests).values()]
    for spec in [*pods, one(manifests, "Pod")["spec"]]:
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


@in_proof
def test_a_group_may_have_its_own_user_and_group_ids() -> None:
    values = {"trainer": {"podSecurityContext": {"runAsUser": None, "supplementalGroups": [5000]}}}
    pods = pod_templates(checked(values))
    own, other = (pods[name]["spec"]["securityContext"] for name in ("trainer", "head"))
    assert "runAsUser" not in own and own["supplementalGroups"] == [5000]
    assert own["fsGroup"] == 1000 and other["runAsUser"] == 1000


@in_proof
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


@in_proof
def test_a_limit_without_a_request_is_also_the_request() -> None:
    values = {"trainer": {"resources": {"limits": {"rdma/hca": 1}}}}
    resources = pod_templates(checked(values))["trainer"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["rdma/hca"] == 1 and "rdma/hca" not in resources["requests"]


@in_proof
def test_pods_have_the_given_host_names_and_name_servers() -> None:
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


@in_proof
@pytest.mark.parametrize(
    ("image", "own", "name"),
    [
        ({}, {"repository": "envs", "tag": "1"}, "envs:1"),
        ({}, {"tag": "other"}, "rayloom:other"),
        ({"digest": f"sha256:{'0' * 64}"}, {"tag": "other"}, "rayloom:other"),
        ({}, {"digest": f"sha256:{'1' * 64}"}, f"rayloom@sha256:{'1' * 64}"),
    ],
)
def test_a_group_may_have_its_own_image(
    image: dict[str, str], own: dict[str, str], name: str
) -> None:
    pods = pod_templates(checked({"image": image, "environment": {"image": own}}))
    images = {group: each["spec"]["containers"][0]["image"] for group, each in pods.items()}
    assert images.pop("environment") == name
    assert len(set(images.values())) == 1 and name not in images.values()


@in_proof
def test_the_operators_probes_are_kept_unless_a_group_sets_periods() -> None:
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


@in_proof
def test_probes_in_pods_apply_to_each_group() -> None:
    values = {"pods": {kind: {"timeoutSeconds": 7} for kind in PROBES}}
    for container in ray_containers(checked(values)).values():
        assert {container[kind]["timeoutSeconds"] for kind in PROBES} == {7}


@in_proof
def test_a_group_on_the_nodes_network_finds_the_head_by_its_name() -> None:
    pods = pod_templates(checked({"trainer": {"hostNetwork": True}}))
    assert pods["trainer"]["spec"]["hostNetwork"] is True
    assert pods["trainer"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert not {"hostNetwork", "dnsPolicy"} & set(pods["head"]["spec"])
    own = {"trainer": {"hostNetwork": True, "dnsPolicy": "Default"}}
    assert pod_templates(checked(own))["trainer"]["spec"]["dnsPolicy"] == "Default"


@in_proof
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


@in_proof
def test_gpus_can_be_claimed_from_a_device_class() -> None:
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
