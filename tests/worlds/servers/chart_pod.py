"""A pod of the rendered chart, run without Kubernetes in an image, on a network of this machine.

The container gets what a container runtime gives it: namespaces of its own, a read-only root file
system, the pod's volumes, user and variables, and no way to gain privileges. Needs root.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from worlds.servers.helm_chart import Manifest, one
from worlds.servers.image_build import Image
from worlds.servers.nodes import Network

# As the kubelet does, the container is started again when it ends. Each start has a higher priority
# than the one before, because Ray gives a node 30 s to start.
_RESTARTS = """
for niceness in 0 -5 -10 -15; do
    # Set the priority of the whole session; a kernel may lack such groups.
    echo $niceness > /proc/self/autogroup || true
    setpriv --pdeathsig KILL unshare --fork --pid --kill-child --mount --uts --ipc bash -c {script}
done
"""
_INSIDE = """
set -e
hostname {name}
ip link set lo up
mount --bind {files} {files}
mount -o remount,bind,ro {files}
mount -t proc proc {files}/proc
mount --rbind /sys {files}/sys
mount --rbind /dev {files}/dev
{mounts}
exec chroot {files} setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs \
    --bounding-set=-all env -i {settings} bash -lc {command}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A running pod with one container."""

    address: str
    log: Path
    user: int
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """Return the container's processes, beginning with its first process."""
        [unshare] = psutil.Process(self.process.pid).children()
        [first] = unshare.children()
        return [first, *first.children(recursive=True)]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `kubectl exec` does."""
        enter = ["nsenter", "--all", "--root", f"--target={self.processes()[0].pid}"]
        line = [*enter, "setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return subprocess.run(
            [*line, *command], capture_output=True, text=True, timeout=60, check=False
        )


@contextlib.contextmanager
def running_pod(
    image: Image,
    template: Manifest,
    manifests: Sequence[Manifest],
    *,
    command: Sequence[str],
    environ: Mapping[str, str],
    net: Network,
) -> Iterator[Pod]:
    """Run a command in the first container of a pod template; kill it at the end of the block.

    manifests: include the template's Secrets and ConfigMaps.
    environ: the variables that the operator adds to those of the template.
    """
    name, _, address = net.plug_in()
    container = template["spec"]["containers"][0]
    user = template["spec"]["securityContext"]["runAsUser"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    places.setdefault("/tmp", {"name": "tmp", "emptyDir": {}})
    hosts = net.directory / f"{name}.hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    mounts = [f"mount --bind {hosts} {image.files}/etc/hosts"]
    for path, volume in sorted(places.items()):
        target = image.files / path.lstrip("/")
        # A container runtime creates the mount point, too.
        target.mkdir(parents=True, exist_ok=True)
        source = net.directory / f"{name}-{volume['name']}"
        mounts.append(f"{_mount(volume, source, manifests)} {target}")
    variables = variables_of(container, manifests)
    settings = {"HOME": image.home(user), **image.environ, **variables, **environ}
    script = _INSIDE.format(
        name=name, files=image.files, mounts="\n".join(mounts), user=user,
        settings=shlex.join(f"{key}={value}" for key, value in settings.items()),
        command=shlex.quote(f"exec {shlex.join(command)}"),
    )  # fmt: skip
    line = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", name, "bash", "-c"]
    line.append(_RESTARTS.format(script=shlex.quote(script)))
    log = net.directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Pod(address=address, log=log, user=user, process=process)
    finally:
        # The other processes end with the first process of their namespace.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def secret(manifests: Sequence[Manifest], name: str, key: str) -> str:
    return base64.b64decode(one(manifests, "Secret", name)["data"][key]).decode()


def variables_of(container: Manifest, manifests: Sequence[Manifest]) -> dict[str, str]:
    """Return the environment variables of a container's processes."""
    return {variable["name"]: _value(variable, manifests) for variable in container["env"]}


def _value(variable: Mapping[str, Any], manifests: Sequence[Manifest]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]["secretKeyRef"]
    return secret(manifests, source["name"], source["key"])


def _mount(volume: Mapping[str, Any], source: Path, manifests: Sequence[Manifest]) -> str:
    """Return a mount command without its last argument, the mount point."""
    memory = volume.get("emptyDir", {})
    if memory.get("medium") == "Memory":
        # The kernel's name for 1Gi is 1g.
        return f"mount -t tmpfs -o mode=1777,size={memory['sizeLimit'].lower()[:-1]} tmpfs"
    source.mkdir()
    source.chmod(0o777)
    if "projected" in volume:
        for each in volume["projected"]["sources"]:
            for item in each["secret"]["items"]:
                text = secret(manifests, each["secret"]["name"], item["key"])
                (source / item["path"]).write_text(text)
    elif "configMap" in volume:
        for file, text in one(manifests, "ConfigMap", volume["configMap"]["name"])["data"].items():
            (source / file).write_text(text)
    else:
        assert {"emptyDir", "persistentVolumeClaim"} & volume.keys(), f"unknown volume: {volume}"
    return f"mount --bind {source}"
