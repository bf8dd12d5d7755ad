"""What an upgrade finds in the cluster, and keeps, draws anew or refuses."""

from __future__ import annotations

import base64
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds.servers.helm_binary import HELM_3, HELM_4, Pinned, helm_binary
from worlds.servers.helm_chart import (
    CHART,
    CPU_DEV,
    HelmError,
    Manifest,
    Values,
    helm,
    one,
    parsed,
    ray_object,
    rendered,
    unpack_chart,
)
from worlds.servers.kubernetes_reads import cluster_with

pytestmark = [pytest.mark.proof, pytest.mark.chart]
both_helms = pytest.mark.parametrize("pinned", [HELM_3, HELM_4], ids=["helm 3", "helm 4"])


def upgraded(
    before: Sequence[Manifest], values: Values, binary: Path | None = None
) -> list[Manifest]:
    """The objects of an upgrade in a cluster that has those of before."""
    with cluster_with(before) as address, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(values))
        file.flush()
        text = helm(
            "template", "demo", CHART, "--values", CPU_DEV, "--values", file.name, "--is-upgrade",
            "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address,
            binary=binary,
        )  # fmt: skip
    return parsed(text)


def keys_of(manifests: Sequence[Manifest]) -> dict[str, str]:
    return {
        f"{manifest['metadata']['name']}/{key}": base64.b64decode(value).decode()
        for manifest in manifests
        if manifest["kind"] == "Secret"
        for key, value in manifest["data"].items()
    }


@both_helms
def test_keys_are_kept_until_the_text_of_rotation_is_another(pinned: Pinned) -> None:
    binary = helm_binary(pinned)
    before = rendered()
    kept = upgraded(before, {}, binary)
    assert keys_of(kept) == keys_of(before)
    rotated = upgraded(kept, {"auth": {"rotation": "2026-11-23"}}, binary)
    assert set(keys_of(rotated)) == set(keys_of(before))
    assert not set(keys_of(rotated).values()) & set(keys_of(before).values())
    again = upgraded(rotated, {"auth": {"rotation": "2026-11-23"}}, binary)
    assert keys_of(again) == keys_of(rotated)


def test_an_installation_into_an_empty_cluster_draws_its_keys() -> None:
    assert len(keys_of(upgraded([], {}))) == 2


@pytest.mark.parametrize("mode", ["service", "job", "cluster"])
def test_a_release_of_the_version_before_is_upgraded_without_a_change_that_kubernetes_refuses(
    mode: str, tmp_path: Path
) -> None:
    old = unpack_chart(tmp_path)
    own = ("--values", old / CPU_DEV.name, "--set", f"mode={mode}")
    before = parsed(helm("template", "demo", old, *own))
    after = upgraded(before, {"mode": mode, "suspend": True})

    def fixed(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Any]:
        """Return the fields that an API server refuses to change, by kind and name."""
        kept: dict[tuple[str, str], Any] = {}
        for each in manifests:
            spec = each.get("spec", {})
            match each["kind"]:
                case "PersistentVolumeClaim":
                    held = {key: value for key, value in spec.items() if key != "resources"}
                case "Deployment" | "StatefulSet" | "DaemonSet":
                    held = spec["selector"]
                case "Service":
                    held = spec.get("clusterIP")
                case "RayService" | "RayCluster" | "RayJob":
                    held = each["apiVersion"]
                case "Secret":
                    held = (each.get("type"), each.get("data"))
                case _:
                    continue
            kept[each["kind"], each["metadata"]["name"]] = held
        return kept

    found = fixed(after)
    assert fixed(before) and all(found[key] == held for key, held in fixed(before).items())


STEPS: Values = {"config": {"run": {"steps": 7}}}
IMAGE: Values = {"image": {"tag": "9.9.9-cpu"}}


@both_helms
def test_configuration_and_pods_do_not_change_together_while_the_service_runs(
    pinned: Pinned,
) -> None:
    binary = helm_binary(pinned)
    running = rendered()
    for alone in (STEPS, IMAGE, {"service": {"type": "NodePort"}}):
        upgraded(running, alone, binary)
    with pytest.raises(HelmError, match="both its configuration and its pods change"):
        upgraded(running, {**STEPS, **IMAGE}, binary)
    # To suspend it at once is as good as to have done so.
    upgraded(running, {**STEPS, **IMAGE, "suspend": True}, binary)
    upgraded(rendered({"suspend": True}), {**STEPS, **IMAGE}, binary)
    # One after the other is allowed: the second upgrade finds what the first has stored.
    upgraded(upgraded(running, IMAGE, binary), {**STEPS, **IMAGE}, binary)


@both_helms
@pytest.mark.parametrize(
    "change", [{"mode": "job"}, {"mode": "cluster"}, {"fullnameOverride": "other"}], ids=json.dumps
)
def test_what_runs_is_not_replaced_by_another_object(
    pinned: Pinned, change: dict[str, Any]
) -> None:
    binary = helm_binary(pinned)
    with pytest.raises(HelmError, match="RayService demo-rayloom of this release runs"):
        upgraded(rendered(), change, binary)
    upgraded(rendered({"suspend": True}), change, binary)


def test_objects_of_others_and_of_the_operator_are_let_be() -> None:
    running = rendered()
    foreign = copy.deepcopy(rendered({"mode": "cluster"}))
    ray_object(foreign)["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"
    child = copy.deepcopy(rendered({"mode": "cluster"}))
    ray_object(child)["metadata"]["name"] = "demo-rayloom-x7k2p"
    ray_object(child)["metadata"]["ownerReferences"] = [{"kind": "RayService"}]
    others = [ray_object(foreign), ray_object(child)]
    assert ray_object(upgraded([*running, *others], {})) == ray_object(running)


def test_the_digests_change_with_what_they_are_of() -> None:
    def digests(values: Values) -> dict[str, str]:
        found: dict[str, str] = one(rendered(values), "RayService")["metadata"]["annotations"]
        return found

    before = digests({})
    assert set(before) == {"rayloom/cluster", "rayloom/serve"}
    for values, changed in ((STEPS, {"rayloom/serve"}), (IMAGE, {"rayloom/cluster"})):
        after = digests(values)
        assert {name for name in before if before[name] != after[name]} == changed
