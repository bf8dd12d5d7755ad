"""A real Kubernetes API server with its etcd, on loopback: no kubelet, no controllers, no operator.

KUBE_APISERVER and ETCD name the binaries, KUBERAY_CRDS the folder with the operator's schemas.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from worlds.servers.ports import free_port

TOKEN = "a-token-of-the-tests"
START_S = 120.0
CRDS = ("rayservices", "rayjobs", "rayclusters")


def required(name: str) -> str:
    """Return the path that a variable names; skip the test if there is none.

    A real API server is optional.
    """
    found = os.environ.get(name) or (shutil.which("etcd") if name == "ETCD" else None)
    if not found:
        pytest.skip(f"{name} is not set: a real API server is optional")
    return found


@dataclass(frozen=True)
class ApiServer:
    """A running API server, and a client of it."""

    address: str
    client: httpx.Client

    @property
    def options(self) -> list[str]:
        """Options with which helm connects to this server."""
        return [
            "--kube-apiserver", self.address, "--kube-token", TOKEN,
            "--kube-insecure-skip-tls-verify",
        ]  # fmt: skip

    def find(self, path: str) -> dict[str, Any] | None:
        """Return the object at a path; None if there is none."""
        answer = self.client.get(path)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def names(self, path: str) -> set[str]:
        listed = self.find(path)
        assert listed is not None, path
        return {item["metadata"]["name"] for item in listed["items"]}


@contextlib.contextmanager
def api_server(directory: Path) -> Iterator[ApiServer]:
    """Start etcd and the API server, and define the operator's kinds in it."""
    programs = {name: required(name) for name in ("KUBE_APISERVER", "ETCD", "KUBERAY_CRDS")}
    with contextlib.ExitStack() as stack:
        etcd, peer, port = free_port(), free_port(), free_port()
        etcd_options = {
            "data-dir": directory / "etcd",
            "listen-client-urls": f"http://127.0.0.1:{etcd}",
            "advertise-client-urls": f"http://127.0.0.1:{etcd}",
            "listen-peer-urls": f"http://127.0.0.1:{peer}",
        }
        stack.enter_context(_running(directory / "etcd.log", programs["ETCD"], etcd_options))
        key, tokens = directory / "accounts.key", directory / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text(f"{TOKEN},tests,1,system:masters\n")
        options = {
            "etcd-servers": f"http://127.0.0.1:{etcd}",
            "cert-dir": directory,
            "bind-address": "127.0.0.1",
            "secure-port": port,
            "token-auth-file": tokens,
            "authorization-mode": "AlwaysAllow",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-cluster-ip-range": "10.0.0.0/24",
            "disable-admission-plugins": "ServiceAccount",
        }
        log = directory / "apiserver.log"
        stack.enter_context(_running(log, programs["KUBE_APISERVER"], options))
        address = f"https://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {TOKEN}"}
        client = stack.enter_context(
            httpx.Client(base_url=address, verify=False, headers=headers, timeout=60)
        )
        _wait_for(client, "/readyz", log)
        _wait_for(client, "/api/v1/namespaces/default", log)
        for plural in CRDS:
            file = Path(programs["KUBERAY_CRDS"]) / f"ray.io_{plural}.yaml"
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            definition = yaml.load(file.read_text("utf-8"), Loader=loader)
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            client.post(path, json=definition).raise_for_status()
            _wait_for(client, f"/apis/ray.io/v1/namespaces/default/{plural}", log)
        yield ApiServer(address=address, client=client)


def _wait_for(client: httpx.Client, path: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            answer = client.get(path)
            if answer.status_code == 200:
                return
            last = answer.text
        except httpx.TransportError as error:
            last = str(error)
        assert time.monotonic() < deadline, f"{path}: {last}\n{log.read_text()[-2000:]}"
        time.sleep(0.2)


@contextlib.contextmanager
def _running(log: Path, program: str, options: Mapping[str, Any]) -> Iterator[None]:
    command = [program, *(f"--{name}={value}" for name, value in options.items())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)
