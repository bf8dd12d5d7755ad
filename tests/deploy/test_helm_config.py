"""Every setting of the configuration through the chart: it reaches the run, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from worlds.servers.helm_chart import CHART, CPU_DEV, VARIANTS, HelmError, arguments_of, rendered

from deploy.run_arguments import RunArguments
from service.config.file import config_schema, dump_config, parse_config
from service.launch.placement import Node, misfit

pytestmark = [pytest.mark.proof, pytest.mark.chart]

SCHEMA = config_schema()
DEFAULTS: dict[str, Any] = yaml.safe_load(
    dump_config(parse_config({"model": {"tiny": {}}, "tasks": {"environment": "a"}}, source="x"))
)
# Maps whose keys are the user's own: one entry of each stands for all.
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
# Values that no rule of the schema shows.
OTHERS: dict[str, Any] = {
    "run.checkpoint_url": "s3://bucket/runs/one",
    "rollouts.stop": ["END"],
    "trainer.betas": [0.8, 0.85],
    # The only value that it can have.
    "trainer.lora.dropout": 0.0,
    "algorithm.loss.token_band": [0.5, 1.5],
    "algorithm.loss.sequence_band": [0.5, 1.5],
    "algorithm.reward.clip": [-2.5, 2.5],
    "evaluation.structured_outputs": {"regex": "[0-9]+"},
    "service.allowed_hosts": ["rayloom.example"],
}
# Values that the chart refuses, each with the beginning of its reason.
REFUSED: list[tuple[str, Any, str]] = [
    ("service.host", "127.0.0.1", "config.service.host: got 127.0.0.1, expected 0.0.0.0"),
    ("metrics.host", "localhost", "config.metrics.host: got localhost, expected 0.0.0.0"),
    ("service.port", 8265, "config.service.port: got 8265, expected 1024 or more"),
    ("metrics.port", 0, "config.metrics.port: got 0, expected 1024 or more"),
    ("inference.num_replicas", 2, "inference: 1 pods of 1 CPUs and 0 GPUs have room for 1"),
    ("inference.cpus_per_replica", 2, "inference: 1 pods of 1 CPUs and 0 GPUs have room for 0"),
    ("inference.gpus_per_replica", 1, "inference: 1 pods of 1 CPUs and 0 GPUs have room for 0"),
    ("trainer.num_ranks", 3, "trainer: 1 pods of 2 CPUs and 0 GPUs have room for 2"),
    ("trainer.gpus_per_rank", 1, "trainer: 1 pods of 2 CPUs and 0 GPUs have room for 0"),
    ("rollouts.num_actors", 2, "environment: 1 pods of 1 CPUs and 0 GPUs have room for 1"),
]
# Pods with room for whatever the walk asks for.
LARGE = {"rayCpus": 100, "replicas": 10}


def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in node:
        return resolved(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    return node


def leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each setting's path and schema; a section that may be null is a section all the same."""
    for name, setting in node["properties"].items():
        inner = f"{path}.{name}" if path else name
        kinds = [resolved(each) for each in setting.get("anyOf", [setting])]
        section = next((each for each in kinds if "properties" in each), None)
        if section is not None and inner not in OTHERS:
            yield from leaves(section, inner)
        else:
            yield inner, next(each for each in kinds if each.get("type") != "null")


def default_of(path: str) -> Any:
    found: Any = DEFAULTS
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def another(path: str, setting: Mapping[str, Any]) -> Any:
    """A value of the setting's type that is not its default."""
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


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = laid_over(old, value) if both else value
    return result


SECTIONS = list(SCHEMA["properties"])


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
    assert found == laid_over(listens, values["config"])


@pytest.mark.parametrize("section", SECTIONS)
def test_a_value_of_each_setting_reaches_the_run(section: str) -> None:
    given: dict[str, Any] = {}
    for path, setting in leaves(SCHEMA):
        if path == section or path.startswith(f"{section}."):
            value = another(path, setting)
            assert value != default_of(path), path
            given = laid_over(given, nested(path, value))
    config = laid_over(yaml.safe_load(CPU_DEV.read_text("utf-8"))["config"], given)
    # One of the two names the model.
    if section == "model":
        check({"config": {**config, "model": {**config["model"], "path": None}}}, section)
        config["model"]["tiny"] = None
    # Ports of a pod, and not the metrics' under the API's.
    for name, port in (("service", 8100), ("metrics", 9500)):
        if name in given:
            config[name] |= {"port": port, "host": "::"}
    check({"config": config}, section)


# A value set without a configuration, so that none is laid under the walk's.
FEW = CHART / "values.yaml"


@pytest.mark.parametrize(("path", "value", "words"), REFUSED, ids=[path for path, _, _ in REFUSED])
def test_a_value_that_pods_cannot_have_is_refused_with_the_reason(
    path: str, value: Any, words: str
) -> None:
    with pytest.raises(HelmError) as refusal:
        rendered({"config": nested(path, value)})
    assert words in str(refusal.value)


@pytest.mark.parametrize("files", VARIANTS.values(), ids=list(VARIANTS))
def test_every_value_set_is_read_by_rayloom_as_it_is_written(files: Any) -> None:
    given: dict[str, Any] = {}
    for file in files:
        given = laid_over(given, yaml.safe_load(file.read_text("utf-8")).get("config", {}))
    config = RunArguments.model_validate(arguments_of(rendered({}, *files))).read_config()
    read = yaml.safe_load(dump_config(config))
    own = parse_config(
        laid_over(given, {"service": read["service"], "metrics": read["metrics"]}), source="x"
    )
    assert config == own


def test_an_engine_and_a_rank_share_the_gpu_of_one_pod() -> None:
    files = VARIANTS["shared-gpu"]
    config = RunArguments.model_validate(arguments_of(rendered({}, *files))).read_config()
    pod = {"CPU": 3.0, "GPU": 1.0, "rayloom_inference": 1.0, "rayloom_trainer": 1.0}
    actors = {"CPU": 1.0, "GPU": 0.0, "rayloom_environments": 1.0}
    nodes = [
        Node(node_id=name, address=name, resources=resources)
        for name, resources in (("inference", pod), ("environment", actors))
    ]
    assert misfit(config, nodes) is None


@pytest.mark.parametrize("key", ["inference.num_replicas", "trainer.num_ranks"])
def test_more_parts_than_the_shared_pod_has_room_for_are_refused(key: str) -> None:
    with pytest.raises(HelmError, match=r"beside the engines \(trainer\.replicas is 0\)"):
        rendered({"config": nested(key, 2)}, *VARIANTS["shared-gpu"])
