"""What a pod has beside Ray: what every pod gets, what a group lays over it, caches, accounts."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.servers.helm_chart import (
    CHART,
    PRODUCTION,
    VARIANTS,
    HelmError,
    Manifest,
    arguments_of,
    cluster_of,
    one,
    pod_templates,
    ray_object,
    rendered,
)

EVERYTHING = VARIANTS["everything"]
GROUPS = ("head", "inference", "trainer", "environment")
GIB = 1024**3


@pytest.fixture(scope="module")
def everything() -> dict[str, Manifest]:
    """The pods of helm/ci/everything.yaml, by group."""
    return pod_templates(rendered({}, *EVERYTHING))


def ray_container(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("group", GROUPS)
def test_every_pod_has_what_pods_says(everything: dict[str, Manifest], group: str) -> None:
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
    # The operator takes the first container for Ray's.
    assert [each["name"] for each in spec["containers"]][1:] == ["logs"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert {"key": "shared", "operator": "Exists"} in spec["tolerations"]
    assert "nodeAffinity" in spec["affinity"]
    assert (spec["priorityClassName"], spec["schedulerName"]) == ("research", "volcano")
    spread, across = spec["topologySpreadConstraints"]
    assert spread["maxSkew"] == 1
    # Its own selector stays as it is.
    assert across["labelSelector"] == {"matchLabels": {"app.kubernetes.io/instance": "demo"}}
    selector = spread["labelSelector"]["matchLabels"]
    others = [everything[other]["metadata"]["labels"] for other in GROUPS if other != group]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert not any(selector.items() <= labels.items() for labels in others)


def test_a_group_appends_to_lists_lays_over_maps_and_replaces_the_rest(
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


def test_what_is_written_to_lies_on_volumes() -> None:
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
        # Not in /tmp, which is smaller: what a pod fetches, and the caches.
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
        # Ray takes the disk where its store is not smaller than what is free in /dev/shm.
        assert int(group["rayStartParams"]["object-store-memory"]) == int(0.8 * expected)
        shm = by_name(group["template"]["spec"]["volumes"])["shm"]["emptyDir"]
        assert shm == {"medium": "Memory", "sizeLimit": str(size)}


def test_models_of_a_hub_are_fetched_once_before_the_head_starts_and_within_a_deadline(
    everything: dict[str, Manifest],
) -> None:
    # Last: a sidecar of the pod's own, or what brings certificates, is there before.
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
    # The hub is asked through a proxy, and known by a certificate, of the pod's own.
    assert by_name(fetch["env"])["NCCL_DEBUG"] == {"name": "NCCL_DEBUG", "value": "WARN"}
    assert fetch["envFrom"] == ray["envFrom"]
    assert mounts["certificates"] == by_name(ray["volumeMounts"])["certificates"]
    assert "RAYLOOM_DATABASE_URL_FILE" not in by_name(fetch["env"])
    claim = one(rendered({}, *EVERYTHING), "PersistentVolumeClaim", "-models")
    for group, template in everything.items():
        variables = by_name(ray_container(template)["env"])
        assert variables["HF_HOME"]["value"] == "/models"
        # What runs environments of others needs no token of the hub.
        assert variables["HF_HUB_OFFLINE"]["value"] == "1" and "HF_TOKEN" not in variables
        volume = by_name(template["spec"]["volumes"])["models"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        if group != "head":
            assert "fetch-models" not in by_name(template["spec"]["initContainers"])


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fetched(config: dict[str, Any], **cache: Any) -> list[dict[str, str]]:
    """What fetch-models is told to fetch, under values-production."""
    values = {"config": config, "modelCache": {"enabled": True, **cache}}
    head = pod_templates(rendered(values, PRODUCTION))["head"]
    found: list[dict[str, str]] = json.loads(
        by_name(head["spec"]["initContainers"])["fetch-models"]["args"][1]
    )
    return found


def test_data_sets_of_a_hub_are_fetched_with_the_models_each_split_at_its_revision() -> None:
    gsm8k = {"name": "openai/gsm8k", "subset": "main", "revision": COMMIT}
    found = fetched(
        {
            "tasks": {"dataset": "openai/gsm8k", "subset": "main", "evaluation_split": "test"},
            "evaluation": {
                "sets": {
                    "hard": {"dataset": "HuggingFaceH4/MATH-500", "split": "test"},
                    "again": {"split": "train"},
                    "local": {"file": "/workspace/held.jsonl"},
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


def test_each_part_of_a_mixture_has_its_data_set_fetched() -> None:
    parts = {
        "a": {"tasks": {"environment": "single_turn", "dataset": "squad"}},
        "b": {"tasks": {"environment": "single_turn", "dataset": "./rows"}},
        "c": {"tasks": {"environment": "single_turn", "dataset": "rows.JSONL.gz"}},
        "d": {"tasks": {"environment": "single_turn", "dataset": "/data/rows"}},
    }
    [_, only] = fetched({"tasks": None, "mixture": parts})
    assert only == {"name": "squad", "subset": "", "split": "train", "revision": ""}


def test_pods_are_offline_also_if_only_a_data_set_is_of_a_hub() -> None:
    values = {"config": {"tasks": {"dataset": "a/b"}}, "modelCache": {"enabled": True}}
    for name, template in pod_templates(rendered(values)).items():
        assert by_name(ray_container(template)["env"])["HF_HUB_OFFLINE"]["value"] == "1"
        assert ("initContainers" in template["spec"]) == (name == "head")


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"enabled": True, "revisions": {"a/b": COMMIT}}, "got a/b, expected names of a hub"),
        ({"enabled": False, "revisions": {"x/y": COMMIT}}, "without modelCache.enabled"),
        ({"enabled": True, "revisions": {"x/y": "main"}}, "revisions"),
    ],
)
def test_a_revision_that_would_not_be_fetched_is_refused(cache: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        rendered({"config": {"tasks": {"dataset": "x/y"}}, "modelCache": cache})


def test_without_a_cache_every_pod_has_the_token_because_each_loads_the_tokenizer() -> None:
    values = {"hub": {"existingSecret": "hugging-face", "key": "1e3"}}
    for template in pod_templates(rendered(values)).values():
        variables = by_name(ray_container(template)["env"])
        source = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert source == {"name": "hugging-face", "key": "1e3"}
        assert "HF_HOME" not in variables
        assert "initContainers" not in template["spec"]


@pytest.mark.parametrize("path", ["/models/mine", "./mine", "~/mine"])
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
        # Nothing was fetched, so that what is asked for has still to come.
        assert "HF_HUB_OFFLINE" not in variables
        volume = by_name(template["spec"]["volumes"])["models"]
        assert volume["persistentVolumeClaim"]["claimName"] == "cache"
    assert not [each for each in manifests if each["metadata"]["name"].endswith("-models")]


def test_a_sidecar_that_the_document_has_shows_the_runs_log_and_ends_when_told_to(
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
        # The container is there before the run.
        log.parent.mkdir()
        log.write_text("step 1\n")
        assert process.stdout.readline() == b"step 1\n"
        # As a file that is full is put away.
        log.rename(log.with_suffix(".log.1"))
        log.write_text("step 2\n")
        assert process.stdout.readline() == b"step 2\n"
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.stdout.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_task_files_and_environments_come_by_the_workspace(
    everything: dict[str, Manifest],
) -> None:
    manifests = rendered({}, *EVERYTHING)
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
def test_the_workspace_may_be_somebody_elses(key: str, volume: dict[str, Any]) -> None:
    for template in pod_templates(rendered({"workspace": {key: "mine"}})).values():
        assert by_name(template["spec"]["volumes"])["workspace"] == {"name": "workspace", **volume}
    assert "workspace" not in by_name(pod_templates(rendered())["head"]["spec"]["volumes"])


@pytest.mark.parametrize("create", [True, False])
def test_no_pod_has_a_token_and_environments_run_under_an_account_without_rights(
    create: bool,
) -> None:
    account = {"create": create, "name": "trainers", "annotations": {"cloud/role": "bucket"}}
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


def test_a_new_text_of_rotation_is_noted_on_the_secrets_that_it_draws() -> None:
    manifests = rendered({"auth": {"rotation": "1e3"}})
    secrets = [each for each in manifests if each["kind"] == "Secret"]
    assert len(secrets) == 2
    for secret in secrets:
        assert secret["metadata"]["annotations"] == {"rayloom/rotation": "1e3"}
    # It is no change of the pods, which are told the Secret's name.
    assert ray_object(manifests) == ray_object(rendered())


def test_the_api_is_reached_through_an_ingress_or_a_gateway() -> None:
    manifests = rendered({}, *EVERYTHING)
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


@pytest.mark.parametrize("mode", ["service", "job", "cluster"])
def test_the_ray_object_waits_in_kueues_queue(mode: str) -> None:
    found = ray_object(rendered({"mode": mode, "kueue": {"queueName": "research"}}))
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in ray_object(rendered())["metadata"]["labels"]


def test_further_manifests_are_rendered_as_templates() -> None:
    note = one(rendered({}, *EVERYTHING), "ConfigMap", "-note")
    assert (note["metadata"]["name"], note["data"]["note"]) == ("demo-note", "of demo")
