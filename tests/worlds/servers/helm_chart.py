"""The chart rendered by real helm, for the tests of the chart and of its Serve configuration."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from worlds.servers.helm_binary import helm_binary

CHART = Path(__file__).parents[3] / "helm"
CPU_DEV, GPU_SMALL, PRODUCTION = (
    CHART / f"values-{name}.yaml" for name in ("cpu-dev", "gpu-small", "production")
)
# Each set of values, and the smallest set with each file of helm/ci/ over it. All are linted and
# rendered.
VARIANTS: dict[str, tuple[Path, ...]] = {
    file.stem: (file,) for file in (CPU_DEV, GPU_SMALL, PRODUCTION)
} | {file.stem: (CPU_DEV, file) for file in sorted((CHART / "ci").glob("*.yaml"))}
MODES = ("service", "job", "cluster")
GROUPS = ("head", "inference", "trainer", "environment")
# The field that contains the cluster in each of the operator's kinds; None: the whole spec.
CLUSTER_FIELDS = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec", "RayCluster": None}
RELEASE = "demo"
LIMIT_S = 60

every_mode = pytest.mark.parametrize("mode", MODES)
every_variant = pytest.mark.parametrize("files", VARIANTS.values(), ids=list(VARIANTS))

Manifest = dict[str, Any]
Values = Mapping[str, Any]


def in_proof(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that only `make proof PART=chart` runs."""
    return pytest.mark.proof(pytest.mark.chart(test))


class GoLoader(yaml.SafeLoader):
    """A loader that reads 1e-06 as a number, as YAML 1.2 and the operator do."""


GoLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class OnceLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that refuses a duplicate key; PyYAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"{', '.join(sorted(twice))} twice: {node.start_mark}")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class HelmError(Exception):
    """An error of helm; the text is what helm printed."""


def helm(*arguments: str | Path, binary: Path | None = None) -> str:
    """Run helm without the user's own settings; return what it printed. Raises: HelmError."""
    with tempfile.TemporaryDirectory() as home:
        homes = {f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [binary or helm_binary(), *arguments],
            env={**homes, "HOME": home, "KUBECONFIG": f"{home}/none"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode != 0:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def unpack_chart(directory: Path) -> Path:
    """Unpack the chart as it was before 0.2.0, the first release that has its own version."""
    with tarfile.open(Path(__file__).parents[2] / "data" / "chart-of-0.1.0.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "helm"


def lint(*files: Path, binary: Path | None = None) -> str:
    return helm("lint", "--strict", CHART, *_named(files), binary=binary)


def rendered(
    values: Values | None = None,
    *files: Path,
    chart: Path = CHART,
    release: str = RELEASE,
    options: Sequence[str] = (),
    binary: Path | None = None,
) -> list[Manifest]:
    """Return the objects that `helm install` would send.

    values: override `files`. files: none means values-cpu-dev.yaml.
    """
    objects: list[Manifest] = pickle.loads(
        _template(
            json.dumps(values or {}), files or (CPU_DEV,), chart, release, tuple(options), binary
        )
    )
    return objects


def parsed(text: str) -> list[Manifest]:
    """Return the objects of a stream of YAML documents."""
    return [each for each in yaml.load_all(text, Loader=OnceLoader) if each is not None]


@cache
def _template(
    values: str,
    files: tuple[Path, ...],
    chart: Path,
    release: str,
    options: tuple[str, ...],
    binary: Path | None,
) -> bytes:
    """Return the rendered objects, pickled so that each caller gets a copy.

    They are cached because many tests use the same ones, and reading YAML takes longest.
    """
    with tempfile.TemporaryDirectory() as scratch:
        last = Path(scratch) / "values.json"
        last.write_text(values)
        text = helm("template", release, chart, *_named([*files, last]), *options, binary=binary)
    return pickle.dumps(parsed(text))


def in_mode(mode: str) -> Values:
    """Return the values for a mode; a job has no API that could be reached from outside."""
    closed = {"ingress": {"enabled": False}, "httpRoute": {"enabled": False}}
    return {"mode": mode, **(closed if mode == "job" else {})}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return the value under the keys of a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merged(below: Values, above: Values) -> dict[str, Any]:
    """Merge values over others, as helm does."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value
    return result


def one(manifests: Sequence[Manifest], kind: str, suffix: str = "") -> Manifest:
    """Return the only object of a kind whose name has a suffix."""
    [found] = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(suffix)
    ]
    return found


def ray_object(manifests: Sequence[Manifest]) -> Manifest:
    """Return the only object of the operator's kinds."""
    [found] = [each for each in manifests if each["apiVersion"].startswith("ray.io/")]
    return found


def cluster_of(manifests: Sequence[Manifest]) -> Manifest:
    """Return the spec of the Ray cluster, whichever kind of object contains it."""
    found = ray_object(manifests)
    spec: Manifest = found["spec"]
    field = CLUSTER_FIELDS[found["kind"]]
    return spec if field is None else spec[field]


def serve_config_of(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the Serve configuration that the operator would submit, as it reads it."""
    text = one(manifests, "RayService")["spec"]["serveConfigV2"]
    config: dict[str, Any] = yaml.load(text, Loader=GoLoader)
    return config


def arguments_of(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the run's arguments, from the Serve configuration or the job's command line."""
    arguments: dict[str, Any]
    if ray_object(manifests)["kind"] == "RayService":
        arguments = serve_config_of(manifests)["applications"][0]["args"]
    else:
        *command, text = shlex.split(one(manifests, "RayJob")["spec"]["entrypoint"])
        assert command == ["python", "-m", "deploy.train_job"]
        arguments = json.loads(text)
    return arguments


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the pod template of each group by the group's name."""
    return {name: group["template"] for name, group in groups_of(manifests).items()}


def ray_container(template: Manifest) -> Manifest:
    """Return Ray's container, which is the first."""
    container: Manifest = template["spec"]["containers"][0]
    return container


def by_name(items: Sequence[Manifest]) -> dict[str, Manifest]:
    return {item["name"]: item for item in items}


def groups_of(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the groups of the cluster by name."""
    cluster = cluster_of(manifests)
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def _named(files: Sequence[Path]) -> list[str]:
    return [part for file in files for part in ("--values", str(file))]
