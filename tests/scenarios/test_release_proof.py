"""Tests of a whole release of the chart: pods, Serve configuration, rollouts and dashboards.

Each pod of the rendered RayService is its own node (`worlds.servers.nodes`), started with its
group's parameters, variables and Ray's token, as the operator does. The volumes are directories of
this machine's file system, which all nodes share.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.runs.run_driver import ENGINE, SMALL
from worlds.servers.chart_pod import secret, variables_of
from worlds.servers.helm_chart import (
    Manifest,
    cluster_of,
    one,
    pod_templates,
    rendered,
    serve_config_of,
)
from worlds.servers.nodes import Network, Node, network
from worlds.servers.prometheus_server import Target, panels_without_data, scraping_all
from worlds.servers.redis_server import redis_server

from service.inspect.audit import audit
from service.inspect.reader import open_journal
from service.launch.run_dir import RunDir
from service.store.lineage import read_history

pytestmark = [pytest.mark.proof, pytest.mark.release, pytest.mark.timeout(2400)]

# A limit for each wait on a busy machine, not an expected time.
LIMIT_S = 900.0
DRAIN_S = 60
LOADED_S = 30.0
# A restarted head takes more than a minute on a busy machine.
HEAD_BACK_S = 300
RUN, NAMESPACE = "release", "rayloom"
DASHBOARD, API = 8265, 8000
VALUES = {
    "config": {
        **SMALL,
        "run": {"name": RUN, "steps": 100_000, "checkpoint_every": 2, "evaluate_every": 4},
        "algorithm": {**SMALL["algorithm"], "max_lag": 1, "loss": {"kl": {"coefficient": 0.01}}},
        # Turns in flight wait until a new engine replaces the one that ends.
        "rollouts": {**SMALL["rollouts"], "turn_deadline_s": 500},
        "trainer": {**SMALL["trainer"], "num_ranks": 1},
        "service": {"host": "0.0.0.0", "port": API},
        "metrics": {"host": "0.0.0.0", "port": 9400},
    },
    "monitoring": {"podMonitor": {"enabled": True}},
    "drain": {"timeoutSeconds": DRAIN_S},
}
# Panels for events that do not happen here.
ONLY_WHEN_FAILING = {
    "Rayloom Overview: Alerts that fire",
    "Rayloom Infrastructure: Killed and failed workers",
}
OF_A_CRITIC = {
    "Rayloom Learning: Explained variance",
    "Rayloom Learning: Loss and gradient norm of the critic",
    "Rayloom Learning: Values and their targets",
}
# No session is opened, and no user's function is called.
NOT_CALLED = {
    "Rayloom Rollouts and environments: Calls without an answer, by function",
    "Rayloom Rollouts and environments: Ended sessions per minute, by outcome",
    "Rayloom Rollouts and environments: Memory of the largest worker",
    "Rayloom Rollouts and environments: Refused requests per second, by code",
    "Rayloom Rollouts and environments: Time of a turn",
    "Rayloom Rollouts and environments: Turns of ended sessions per minute, by use",
}
# run.checkpoint_url is not set; the run of test_metrics_scenarios.py has one.
OF_COPIES = {"Rayloom Trainer: Copies of checkpoints"}
OF_GPUS = {
    "Rayloom Infrastructure: GPU, by node and index",
    "Rayloom Infrastructure: GPU memory, by node and index",
    "Rayloom Trainer: Model FLOPs utilisation",
}


def test_release_fills_its_panels_and_a_terminated_worker_fails_no_request(
    tmp_path: Path,
) -> None:
    manifests = rendered(VALUES)
    token = secret(manifests, cluster_of(manifests)["authOptions"]["secretName"], "auth_token")
    with network(tmp_path) as net:
        # A second pod can take the engines when their first one ends.
        pods = started_pods(net, manifests, token=token, twice="inference")
        where = f"http://{net.head.address}"
        wait_until(lambda: answers(f"{where}:{DASHBOARD}/api/gcs_healthz"))
        put(f"{where}:{DASHBOARD}", config_in(manifests, tmp_path), token=token)
        headers = {"authorization": f"Bearer {secret(manifests, 'api-key', 'api-key')}"}
        with (
            httpx.Client(base_url=f"{where}:{API}", headers=headers, timeout=120) as client,
            scraping_all(targets(manifests, pods), tmp_path / "prometheus", run=RUN) as prometheus,
        ):
            began = time.time()
            wait_until(lambda: answers(f"{where}:{API}/readyz"))
            first = [f"first-{number}" for number in range(16)]
            submit(client, *first)
            wait_until(lambda: are_trained(client, first))
            with Load(client) as load:
                time.sleep(LOADED_S)
                [leaving] = [node for node in pods["inference"] if node.processes(ENGINE)]
                leaving.end_by_sigterm(limit_s=DRAIN_S + 60)
                time.sleep(LOADED_S)
            assert load.failures == [] and load.num_answered > 50
            wait_until(lambda: are_trained(client, load.tasks))
            assert prometheus.down() == {f"{leaving.address}:8080"}
            empty = panels_without_data(prometheus, since=began)
            unused = ONLY_WHEN_FAILING | NOT_CALLED | OF_A_CRITIC | OF_COPIES | OF_GPUS
            assert empty == unused


def test_killed_head_comes_back_with_its_run_and_the_engines_stay(
    tmp_path: Path,
) -> None:
    """Kill all processes of the head: control store, Serve, the run's host, supervisor, board."""
    with network(tmp_path) as net, redis_server(tmp_path, host=net.gateway) as redis:
        gcs = {"backend": "redis", "redis": {"address": redis}}
        run = {**VALUES["config"]["run"], "orphan_timeout_s": HEAD_BACK_S}
        manifests = rendered({**VALUES, "gcs": gcs, "config": {**VALUES["config"], "run": run}})
        token = secret(manifests, cluster_of(manifests)["authOptions"]["secretName"], "auth_token")
        # The operator sets both variables.
        waits = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_BACK_S)}
        of_head = {"RAY_REDIS_ADDRESS": redis}
        pods = started_pods(net, manifests, token=token, added=waits, of_head=of_head)
        run_dir = RunDir(path=tmp_path / "run_dir")
        with serving(net, manifests, tmp_path, token=token) as client:
            first = [f"first-{number}" for number in range(16)]
            submit(client, *first)
            wait_until(lambda: are_trained(client, first))
            engines = [each for node in pods["inference"] for each in node.processes(ENGINE)]
            with run_dir.looked_into() as store:
                before, newest = read_history(store), store.checkpoints()[0].step
            net.head.kill()
            net.head.start()
            wait_until(lambda: answers(f"{client.base_url}/readyz"))
            later = [f"later-{number}" for number in range(16)]
            submit(client, *later)
            wait_until(lambda: are_trained(client, [*first, *later]))
            assert engines and all(each.is_running() for each in engines)
        with run_dir.looked_into() as store:
            after = read_history(store)
        assert after.num_terms == before.num_terms + 1
        committed = tuple(each for each in before.steps if each.step <= newest)
        assert committed and after.steps[: len(committed)] == committed
        assert audit(open_journal(run_dir.path)).is_clean


def test_suspended_release_loses_nothing_and_continues_when_resumed(
    tmp_path: Path,
) -> None:
    """Terminate all pods at once in the middle of steps, and later start a new cluster."""
    manifests = rendered(VALUES)
    token = secret(manifests, cluster_of(manifests)["authOptions"]["secretName"], "auth_token")
    run_dir = RunDir(path=tmp_path / "run_dir")
    first, later = ([f"{name}-{number}" for number in range(16)] for name in ("first", "later"))
    with network(tmp_path) as net:
        pods = started_pods(net, manifests, token=token)
        with serving(net, manifests, tmp_path, token=token) as client:
            submit(client, *first)
            wait_until(lambda: are_trained(client, first))
            helm_test(net, manifests, tmp_path)
            submit(client, *later)
        end_all(pods, hook_of_head(manifests))
        with run_dir.looked_into() as store:
            before = read_history(store).steps
            assert store.checkpoints()[0].step == before[-1].step
            assert store.live_owner() is None
        net.start()
        with serving(net, manifests, tmp_path, token=token) as client:
            wait_until(lambda: are_trained(client, [*first, *later]))
    with run_dir.looked_into() as store:
        assert read_history(store).steps[: len(before)] == before
    assert audit(open_journal(run_dir.path)).is_clean


def helm_test(net: Network, manifests: Sequence[Manifest], directory: Path) -> None:
    """Run the program of `helm test`, with the head's address in place of the Services' names."""
    [container] = one(manifests, "Pod", "-test")["spec"]["containers"]
    environ = variables_of(container, manifests)
    check = json.loads(environ["RELEASE_CHECK"])
    for name in ("api", "dashboard", "metrics"):
        check[name] = re.sub(r"//[a-z-]+:", f"//{net.head.address}:", check[name])
    check["arguments"] = config_in(manifests, directory)["applications"][0]["args"]
    variables = {**environ, "RELEASE_CHECK": json.dumps(check)}
    settings = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        [*net.head.entrance, *settings, sys.executable, "-c", *container["args"]],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    checked = ["health", "rollout", "metrics", "pods", "serve"]
    assert done.stdout.splitlines() == [f"ok {name}" for name in checked], done
    assert done.returncode == 0


def hook_of_head(manifests: Sequence[Manifest]) -> list[str]:
    """Return the command that the kubelet runs before it ends the head's pod."""
    [container] = pod_templates(manifests)["head"]["spec"]["containers"]
    hook: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return hook


def end_all(pods: Mapping[str, Sequence[Node]], hook: Sequence[str]) -> None:
    """End all pods at once, as kubelets do: with SIGTERM, for the head after its hook."""
    nodes = [node for group in pods.values() for node in group]
    with ThreadPoolExecutor(max_workers=len(nodes)) as kubelets:
        ends = [
            kubelets.submit(end_pod, node, hook if node.is_head else (), limit_s=2 * DRAIN_S + 60)
            for node in nodes
        ]
        for end in ends:
            end.result()


def end_pod(node: Node, hook: Sequence[str], *, limit_s: float) -> None:
    if hook:
        program = str(Path(sys.executable).with_name(hook[0]))
        done = subprocess.run(
            [*node.entrance, program, *hook[1:]],
            capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and ": has ended\n" in done.stdout, done
    node.end_by_sigterm(limit_s=limit_s)


@contextlib.contextmanager
def serving(
    net: Network, manifests: Sequence[Manifest], directory: Path, *, token: str
) -> Iterator[httpx.Client]:
    """Configure Serve as the operator does; yield a client once the run is ready."""
    where = f"http://{net.head.address}"
    wait_until(lambda: answers(f"{where}:{DASHBOARD}/api/gcs_healthz"))
    put(f"{where}:{DASHBOARD}", config_in(manifests, directory), token=token)
    headers = {"authorization": f"Bearer {secret(manifests, 'api-key', 'api-key')}"}
    with httpx.Client(base_url=f"{where}:{API}", headers=headers, timeout=120) as client:
        wait_until(lambda: answers(f"{where}:{API}/readyz"))
        yield client


def started_pods(
    net: Network,
    manifests: Sequence[Manifest],
    *,
    token: str,
    twice: str = "",
    added: Mapping[str, str] | None = None,
    of_head: Mapping[str, str] | None = None,
) -> dict[str, list[Node]]:
    """Start and return each group's pods: one, or two of the group `twice`.

    added, of_head: variables beside the chart's, for all pods and for the head.
    """
    cluster = cluster_of(manifests)
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    pods: dict[str, list[Node]] = {}
    for name, group in groups.items():
        spec = group["template"]["spec"]
        [container] = spec["containers"]
        [shm] = [each for each in spec["volumes"] if each["name"] == "shm"]
        environ = variables_of(container, manifests)
        # A file replaces the volume of secrets.
        key = net.directory / "api-key"
        key.write_text(secret(manifests, "api-key", "api-key"))
        environ["RAYLOOM_API_KEY_FILE"] = str(key)
        # The volume of the home directory is missing, so that this machine's directory is used.
        del environ["HOME"]
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **(added or {})}
        if name == "head":
            environ |= of_head or {}
        pods[name] = [
            net.add_pod(
                {**group["rayStartParams"], "labels": labels_of(group)},
                environ=environ,
                shm_mib=mib(shm["emptyDir"]["sizeLimit"]),
            )
            for _ in range(2 if name == twice else 1)
        ]
    net.start()
    return pods


def labels_of(group: Manifest) -> str:
    """Return the labels of a group's nodes as the operator passes them to `ray start`."""
    return ",".join(f"{name}={value}" for name, value in group["labels"].items())


def mib(quantity: str) -> int:
    """Convert a quantity in Kubernetes' notation to MiB."""
    factors = {"Mi": 1, "Gi": 1024}
    return int(quantity[:-2]) * factors[quantity[-2:]]


def config_in(manifests: Sequence[Manifest], directory: Path) -> dict[str, Any]:
    """Return the Serve configuration with directories in place of the pods' volumes."""
    config = serve_config_of(manifests)
    [application] = config["applications"]
    for name in ("run_dir", "state_dir"):
        application["args"][name] = str(directory / name)
    return config


def put(dashboard: str, config: Mapping[str, Any], *, token: str) -> None:
    """Send the Serve configuration as the operator does; check that it needs the token."""
    url = f"{dashboard}/api/serve/applications/"
    assert httpx.put(url, json=config, timeout=60).status_code == 401
    headers = {"x-ray-authorization": f"Bearer {token}"}
    done = httpx.put(url, json=config, headers=headers, timeout=60)
    assert done.status_code == 200, done.text


def targets(manifests: Sequence[Manifest], pods: Mapping[str, Sequence[Node]]) -> list[Target]:
    """Return the targets of the PodMonitor: each of its ports in each pod that has the port."""
    monitor = one(manifests, "PodMonitor")["spec"]
    named = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    cluster = cluster_of(manifests)
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    found = []
    for name, nodes in pods.items():
        [container] = groups[name]["template"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for node in nodes:
            labels = {"namespace": NAMESPACE, "pod": node.name, "ray_io_cluster": RUN}
            found += [
                Target(address=f"{node.address}:{ports[port]}", labels=labels)
                for port in named
                if port in ports
            ]
    return found


def submit(client: httpx.Client, *tasks: str) -> None:
    body = {"environment": "guessing", "tasks": [{"id": task} for task in tasks]}
    answer = client.post("/api/v1/rollouts", json=body)
    assert answer.status_code == 202, answer.text


def are_trained(client: httpx.Client, tasks: Sequence[str]) -> bool:
    views = [client.get(f"/api/v1/rollouts/{task}").json() for task in tasks]
    return {view.get("status") for view in views} == {"trained"}


class Load:
    """A client that repeatedly submits tasks and reads their status."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.tasks: list[str] = []
        self.num_answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=LIMIT_S)

    def _run(self) -> None:
        while not self._is_over.is_set() or len(self.tasks) % 16:
            task = f"load-{len(self.tasks)}"
            if len(self.tasks) < 160:
                body = {"environment": "guessing", "tasks": [{"id": task}]}
                self._ask("POST", "/api/v1/rollouts", json=body)
                self.tasks.append(task)
            self._ask("GET", f"/api/v1/rollouts/{self.tasks[-1]}")
            self._is_over.wait(0.25)

    def _ask(self, method: str, path: str, **body: Any) -> None:
        try:
            answer = self._client.request(method, path, **body)
        except httpx.TransportError as error:
            self.failures.append(f"{method} {path}: {error!r}")
            return
        self.num_answered += 1
        if answer.status_code >= 300:
            self.failures.append(f"{method} {path}: {answer.status_code} {answer.text}")


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
