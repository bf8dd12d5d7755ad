"""Renders the chart with real helm, for the tests of the chart and of its Serve configuration."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from worlds.helm_binary import helm_binary

CHART = Path(__file__).parents[2] / "helm"
CPU_DEV, GPU_SMALL, PRODUCTION = (
    CHART / f"values-{name}.yaml" for name in ("cpu-dev", "gpu-small", "production")
)
# Each value set, and the smallest one under each file of helm/ci/; all are linted and rendered.
VARIANTS: dict[str, tuple[Path, ...]] = {
    file.stem: (file,) for file in (CPU_DEV, GPU_SMALL, PRODUCTION)
} | {file.stem: (CPU_DEV, file) for file in sorted((CHART / "ci").glob("*.yaml"))}
RELEASE = "demo"
LIMIT_S = 60

Manifest = dict[str, Any]
Values = Mapping[str, Any]


class HelmError(Exception):
    """Helm refused; the text is what it printed."""


def helm(*arguments: str | Path, binary: Path | None = None) -> str:
    """Run helm with nothing of the user's own; returns what it printed. Raises: HelmError."""
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
    """The objects that `helm install` would send: `values` over `files`, values-cpu-dev if none."""
    text = _template(
        json.dumps(values or {}), files or (CPU_DEV,), chart, release, tuple(options), binary
    )
    return [manifest for manifest in yaml.safe_load_all(text) if manifest is not None]


@cache
def _template(
    values: str,
    files: tuple[Path, ...],
    chart: Path,
    release: str,
    options: tuple[str, ...],
    binary: Path | None,
) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        last = Path(scratch) / "values.json"
        last.write_text(values)
        return helm("template", release, chart, *_named([*files, last]), *options, binary=binary)


def one(manifests: Sequence[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The only object of a kind whose name ends so."""
    [found] = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(suffix)
    ]
    return found


def serve_config(values: Values | None = None, *files: Path) -> dict[str, Any]:
    """The Serve configuration that the operator would submit, as Ray Serve reads it."""
    return serve_config_of(rendered(values, *files))


def serve_config_of(manifests: Sequence[Manifest]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(one(manifests, "RayService")["spec"]["serveConfigV2"])
    return config


def run_config_text(manifests: Sequence[Manifest]) -> str:
    """Rayloom's configuration, as the pods find it in /etc/rayloom/config.yaml."""
    text: str = one(manifests, "ConfigMap")["data"]["config.yaml"]
    return text


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """By group."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **workers}


def _named(files: Sequence[Path]) -> list[str]:
    return [part for file in files for part in ("--values", str(file))]
