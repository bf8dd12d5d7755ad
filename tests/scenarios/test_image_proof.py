"""Tests of the CPU image: its content, and a run of the rendered chart that trains in it.

One pod runs the parts of all groups: it is the head's pod, with the resources that the workers'
pods would offer to Ray. The tests do the operator's work: `ray start` with the chart's
parameters, Ray's token, and the PUT of the Serve configuration.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from packaging.utils import canonicalize_name
from worlds.runs.run_driver import SMALL
from worlds.servers.chart_pod import Pod, running_pod, secret
from worlds.servers.helm_chart import Manifest, one, pod_templates, rendered
from worlds.servers.image_build import ROOT, Image, built
from worlds.servers.nodes import network, require_nodes

pytestmark = [pytest.mark.proof, pytest.mark.images]

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile.cpu"
# A limit for each wait on a busy machine, not an expected time.
LIMIT_S = 900.0
DASHBOARD, API, METRICS, RAYS_METRICS = 8265, 8000, 9400, 8080
SERVE = f":{DASHBOARD}/api/serve/applications/"
VALUES = {
    "config": {
        **SMALL,
        "run": {"name": "image", "steps": 4, "checkpoint_every": 1, "evaluate_every": 1000},
        "tasks": {"environment": "guessing", "evaluation_tasks": 0},
        "trainer": {**SMALL["trainer"], "num_ranks": 1},
        "service": {"host": "0.0.0.0", "port": API},
        "metrics": {"host": "0.0.0.0", "port": METRICS},
    }
}
INSTALLED = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    require_nodes()
    with tempfile.TemporaryDirectory() as directory, built(DOCKERFILE, Path(directory)) as image:
        yield image


def test_image_has_the_locked_packages_and_no_compiler(image: Image) -> None:
    project = {"rayloom", "pip"}
    texts = [
        (ROOT / "locks" / f"{name}.txt").read_text() for name in ("torch-cpu", "cpu", "source")
    ]
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", "".join(texts), re.MULTILINE))
    installed = json.loads(image.output_of("python", "-c", INSTALLED))
    found = {canonicalize_name(name): version for name, version in installed.items()}
    assert {name: found[name] for name in found.keys() - project} == locked
    for tool in ("cc", "c++", "make", "pytest", "ruff", "git"):
        assert image.output_of("bash", "-c", f"command -v {tool} || echo none") == "none\n"


def test_image_has_labels_and_a_user_and_nothing_of_the_building_machine(image: Image) -> None:
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.title"] == "Rayloom on CPU"
    assert labels["org.opencontainers.image.base.name"] == "localhost/base"
    assert image.config["User"] == "1000:1000"
    # deploy/stack/compose.yaml mounts a volume here.
    assert (image.files / "runs").stat().st_uid == 1000
    pip = image.files / "etc" / "pip.conf"
    assert not pip.exists() or pip.read_text() == ""


def test_chart_configuration_trains_in_the_image(image: Image, tmp_path: Path) -> None:
    manifests = rendered(VALUES)
    service = one(manifests, "RayService")["spec"]
    token = secret(
        manifests, service["rayClusterConfig"]["authOptions"]["secretName"], "auth_token"
    )
    with (
        network(tmp_path) as net,
        running_pod(
            image,
            pod_templates(manifests)["head"],
            manifests,
            command=ray_start(service["rayClusterConfig"]),
            environ={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            net=net,
        ) as pod,
    ):
        where = f"http://{pod.address}"
        # The dashboard answers before the node has joined, and ends if the start fails.
        wait_until(lambda: "Ray runtime started" in pod.log.read_text(), pod)
        wait_until(lambda: answers(f"{where}:{DASHBOARD}/api/gcs_healthz"), pod)
        config = yaml.safe_load(service["serveConfigV2"])
        assert httpx.put(where + SERVE, json=config, timeout=60).status_code == 401
        # The operator sends this header.
        headers = {"x-ray-authorization": f"Bearer {token}"}
        put = httpx.put(where + SERVE, json=config, headers=headers, timeout=60)
        assert put.status_code == 200, put.text
        wait_until(lambda: answers(f"{where}:{API}/readyz"), pod)
        train(where, key=key_of(pod), pod=pod)
        metrics = httpx.get(f"{where}:{METRICS}/metrics", timeout=60).text
        [steps] = re.findall(r"^rayloom_train_steps_total(?:{.*})? (\S+)$", metrics, re.MULTILINE)
        assert float(steps) >= 1
        assert "ray_node_cpu_count" in httpx.get(f"{where}:{RAYS_METRICS}/metrics", timeout=60).text
        check_rights(pod)


def ray_start(cluster: Manifest) -> list[str]:
    """Return the operator's `ray start` for the head, with the resources of all groups."""
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    parameters = [group["rayStartParams"] for group in groups]
    # The chart quotes the value for a shell.
    offered = [json.loads(shlex.split(each["resources"])[0]) for each in parameters]
    resources = {name: amount for each in offered for name, amount in each.items()}
    return [
        "ray", "start", "--head", "--block", "--port=6379", f"--metrics-export-port={RAYS_METRICS}",
        f"--dashboard-host={parameters[0]['dashboard-host']}",
        f"--num-cpus={sum(int(each['num-cpus']) for each in parameters)}",
        f"--resources={json.dumps(resources)}",
        "--object-store-memory=268435456",
    ]  # fmt: skip


def train(where: str, *, key: str, pod: Pod) -> None:
    """Submit the tasks of one step through the API, and wait until they are trained."""
    tasks = [f"task-{number}" for number in range(SMALL["algorithm"]["groups_per_step"])]
    body = {"environment": "guessing", "tasks": [{"id": task} for task in tasks]}
    path = f"{where}:{API}/api/v1/rollouts"
    assert httpx.post(path, json=body, timeout=60).status_code == 401
    headers = {"authorization": f"Bearer {key}"}
    submitted = httpx.post(path, json=body, headers=headers, timeout=60)
    assert submitted.status_code == 202, submitted.text

    def are_trained() -> bool:
        views = [httpx.get(f"{path}/{task}", headers=headers, timeout=60).json() for task in tasks]
        return {view.get("status") for view in views} == {"trained"}

    wait_until(are_trained, pod)


def key_of(pod: Pod) -> str:
    """Return the key of the API from the file that the pod's processes read."""
    first = pod.processes()[0]
    return Path(f"/proc/{first.pid}/root{first.environ()['RAYLOOM_API_KEY_FILE']}").read_text()


def check_rights(pod: Pod) -> None:
    """Check that no process can become another user, and that only volumes can be written."""
    seen = set()
    for process in pod.processes():
        # The process may have ended.
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert re.search(r"^Uid:(\t1000){4}$", status, re.MULTILINE), status
            assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE), status
            assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE), status
            seen.add(process.name())
    assert {"ray", "raylet", "gcs_server"} <= seen
    for place in ("/opt/rayloom/file", "/file", "/var/file"):
        refused = pod.run("touch", place)
        assert "Read-only file system" in refused.stderr, refused
    assert pod.run("touch", "/tmp/file").returncode == 0


def wait_until(happened: Callable[[], bool], pod: Pod) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert pod.process.poll() is None, pod.log.read_text()[-4000:]
        assert time.monotonic() < deadline, pod.log.read_text()[-4000:]
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
