"""Tests of the configuration in the chart: every setting reaches the run unchanged."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.checks.manifest_checks import check_core, check_subset
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    GPU_SMALL,
    PRODUCTION,
    VARIANTS,
    Manifest,
    arguments_of,
    by_name,
    cluster_of,
    every_variant,
    in_mode,
    in_proof,
    merged,
    nested,
    one,
    pod_templates,
    ray_container,
    rendered,
)

from deploy.train_job import RunArguments
from service.config.file import config_schema, dump_config, load_config, parse_config
from service.config.sections import MetricsSettings, ServiceSettings
from service.config.tree import Config
from service.launch.placement import Node, misfit

SETTINGS = config_schema()
SETTING_DEFAULTS: dict[str, Any] = yaml.safe_load(
    dump_config(parse_config({"model": {"tiny": {}}, "tasks": {"environment": "a"}}, source="x"))
)
# Maps whose keys the user chooses. One entry of each map represents all.
ENTRIES: dict[str, Any] = {
    "tasks.options": {"low": 1},
    "tasks.columns": {"prompt": "question", "left": None},
    "rollouts.outcomes": {"truncated_tokens": {"disposition": "mask"}},
    "rollouts.template_options": {"enable_thinking": False},
    "mixture": {"a": {"weight": 2.5, "tasks": {"environment": "guessing"}}},
    "evaluation.sets": {"held": {"split": "test", "samples": 4}},
    "trackers.own.options": {"file": "own.jsonl"},
    "inference.engine_args": {"max_num_batched_tokens": 131072},
}
# Valid values that cannot be derived from the schema.
OTHERS: dict[str, Any] = {
    "run.checkpoint_url": "s3://bucket/runs/one",
    "tasks.file": "/opt/tasks.jsonl",
    "rollouts.stop": ["END"],
    "trainer.betas": [0.8, 0.85],
    # This is the only value that the setting can have.
    "trainer.lora.dropout": 0.0,
    "algorithm.loss.token_band": [0.5, 1.5],
    "algorithm.loss.sequence_band": [0.5, 1.5],
    "algorithm.reward.clip": [-2.5, 2.5],
    "evaluation.structured_outputs": {"regex": "[0-9]+"},
    "service.allowed_hosts": ["rayloom.example"],
}
# Pods that are large enough for each changed setting.
LARGE = {"rayCpus": 100, "replicas": 10}
# A value set without a configuration, so that Helm merges none into that of the test.
FEW = CHART / "values.yaml"
SECTIONS = list(SETTINGS["properties"])


def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in node:
        return resolved(SETTINGS["$defs"][node["$ref"].rpartition("/")[2]])
    return node


def leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the schema of each setting; a section may also be null."""
    for name, setting in node["properties"].items():
        inner = f"{path}.{name}" if path else name
        kinds = [resolved(each) for each in setting.get("anyOf", [setting])]
        section = next((each for each in kinds if "properties" in each), None)
        if section is not None and inner not in OTHERS:
            yield from leaves(section, inner)
        else:
            yield inner, next(each for each in kinds if each.get("type") != "null")


def default_of(path: str) -> Any:
    found: Any = SETTING_DEFAULTS
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def another(path: str, setting: Mapping[str, Any]) -> Any:
    """Return a value of the setting's type that is not its default."""
    for known in (ENTRIES, OTHERS):
        if path in known:
            return known[path]
    default = default_of(path)
    if "enum" in setting:
        return next(each for each in setting["enum"] if each != default)
    match setting.get("type"):
        case "boolean":
            return default is not True
        case "integer":
            least = setting.get("minimum", 0)
            return least + 7 if default != least + 7 else least + 8
        case "number":
            most = setting.get("maximum", setting.get("exclusiveMaximum"))
            return 0.34375 if most == 1 else 3.4375
        case "array":
            return ["other-1"]
        case "string":
            url = "http" in setting.get("pattern", "")
            return "http://other.example/path" if url else "other-1"
    raise AssertionError(f"{path}: add a value of {setting} to OTHERS or ENTRIES")


def check(values: dict[str, Any], section: str) -> None:
    """Check that the run receives this configuration, with the addresses of the pods added."""
    groups = {
        "inference": {**LARGE, "gpus": 8 if section == "inference" else 0},
        "trainer": {**LARGE, "gpus": 8 if section == "trainer" else 0},
        "environment": LARGE,
    }
    found = arguments_of(rendered({**groups, **values}, FEW))["config"]
    listens = {
        "service": {"host": "0.0.0.0", "port": 8000},
        "metrics": {"host": "0.0.0.0", "port": 9400},
    }
    assert found == merged(listens, values["config"])


@in_proof
@pytest.mark.parametrize("section", SECTIONS)
def test_a_value_of_each_setting_reaches_the_run(section: str) -> None:
    given: dict[str, Any] = {}
    for path, setting in leaves(SETTINGS):
        if path == section or path.startswith(f"{section}."):
            value = another(path, setting)
            assert value != default_of(path), path
            given = merged(given, nested(path, value))
    config = merged(yaml.safe_load(CPU_DEV.read_text("utf-8"))["config"], given)
    # Only one of the two settings may name the model.
    if section == "model":
        check({"config": {**config, "model": {**config["model"], "path": None}}}, section)
        config["model"]["tiny"] = None
    # Use ports that a pod may open, and different ones for the API and the metrics.
    for name, port in (("service", 8100), ("metrics", 9500)):
        if name in given:
            config[name] |= {"port": port, "host": "::"}
    check({"config": config}, section)


@in_proof
@pytest.mark.parametrize("files", VARIANTS.values(), ids=list(VARIANTS))
def test_rayloom_reads_every_value_set_as_it_is_written(files: Any) -> None:
    given: dict[str, Any] = {}
    for file in files:
        given = merged(given, yaml.safe_load(file.read_text("utf-8")).get("config", {}))
    config = loaded(rendered({}, *files))
    read = yaml.safe_load(dump_config(config))
    own = parse_config(
        merged(given, {"service": read["service"], "metrics": read["metrics"]}), source="x"
    )
    assert config == own


@in_proof
def test_an_engine_and_a_rank_share_the_gpu_of_one_pod() -> None:
    files = VARIANTS["shared-gpu"]
    config = loaded(rendered({}, *files))
    pod = {"CPU": 3.0, "GPU": 1.0, "rayloom_inference": 1.0, "rayloom_trainer": 1.0}
    actors = {"CPU": 1.0, "GPU": 0.0, "rayloom_environments": 1.0}
    nodes = [
        Node(node_id=name, address=name, resources=resources)
        for name, resources in (("inference", pod), ("environment", actors))
    ]
    assert misfit(config, nodes) is None


def loaded(manifests: list[Manifest]) -> Config:
    return RunArguments.model_validate(arguments_of(manifests)).read_config()


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
    vetted = CHART.parent / "deploy" / "configs" / source
    assert yaml.safe_load(file.read_text("utf-8"))["config"] == yaml.safe_load(vetted.read_text())
    # The chart adds only the addresses on which a pod listens.
    sent = loaded(rendered({}, file))
    own = replace(sent, service=ServiceSettings(), metrics=MetricsSettings())
    assert own == load_config(vetted)


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


@every_variant
@pytest.mark.parametrize("mode", ["service", "job"])
def test_a_run_receives_its_configuration_and_its_directories(
    files: tuple[Path, ...], mode: str
) -> None:
    manifests = rendered(in_mode(mode), *files)
    head = pod_templates(manifests)["head"]
    mounts = {m["name"]: m["mountPath"] for m in ray_container(head)["volumeMounts"]}
    arguments = arguments_of(manifests)
    has_secret = "RAYLOOM_DATABASE_URL_FILE" in by_name(ray_container(head)["env"])
    assert set(arguments) == {"config", "run_dir", *(() if has_secret else ("state_dir",))}
    name = arguments["config"]["run"]["name"]
    assert arguments["run_dir"] == f"{mounts['checkpoints']}/runs/{name}"
    if not has_secret:
        assert arguments["state_dir"] == f"{mounts['database']}/{name}"


# Texts that YAML would read as a number, a boolean or null if they were not quoted.
MISREAD = ["20261122", "1e3", "true", "0x1f", "null", "1_000"]


@in_proof
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
    # Check the claims and secrets that the chart creates.
    del values["checkpoints"], values["database"], values["auth"]
    classes = {"checkpoints": {"storageClass": label}, "database": {"storageClass": label}}
    release = text if text.isdigit() else "demo"
    made = rendered(values | classes, release=release, options=["--namespace", label])
    check_core(made)
    for name in classes:
        claim = one(made, "PersistentVolumeClaim", f"-{name}")
        assert claim["spec"]["storageClassName"] == label


def test_no_text_of_the_configuration_ends_the_quoted_argument_of_a_job() -> None:
    options = {"prompt": 'it\'s $HOME `id` "quoted" \\ <b> \u00e9\n'}
    manifests = rendered({"mode": "job", "config": {"tasks": {"options": options}}})
    entrypoint = one(manifests, "RayJob")["spec"]["entrypoint"]
    assert entrypoint.count("'") == 2
    assert len(shlex.split(entrypoint)) == 4
    assert arguments_of(manifests)["config"]["tasks"]["options"]["prompt"] == options["prompt"]
