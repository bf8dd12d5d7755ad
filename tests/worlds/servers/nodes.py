"""A cluster on one machine: each node has a Ray and a network link of its own.

A node has its own network, PID, mount, UTS and IPC namespaces, and its own /tmp/ray and /dev/shm. A
pair of virtual Ethernet devices connects it with a bridge. All nodes share the rest of the file
system, as they would share a network file system. Needs root. Every name contains this process's
id, so the next process can remove the networks of one that was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from worlds.checks.missing_tools import skip_or_fail

ROOT = Path(__file__).parents[3]
PREFIX = "rln"
# The directory that only one node and this machine see.
PRIVATE = "private"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
START_S = 240.0
_RAY = Path(sys.executable).with_name("ray")
_numbers = itertools.count()

# The node ends with its raylet. With `ray start --block` it would end with any of Ray's processes;
# a test uses that option if it is about how the command itself ends. Ray gives a node 30 s to start
# and its agent 15 s, and on a busy machine even the server for Ray's remote clients, which no test
# uses, may fail to start. So the start is tried again, each time with a higher priority.
_FIRST_PROCESS = """
set -e
mkdir -p /tmp/ray
mount -t tmpfs -o size=2g,mode=1777 tmpfs /tmp/ray
mount -t tmpfs -o size={shm_mib}m,mode=1777 tmpfs /dev/shm
{hidden}
ip link set lo up
hostname {name}
for niceness in 0 -5 -10 -15; do
    # Set the priority of the node's whole session; a kernel may lack such groups.
    echo $niceness > /proc/self/autogroup || true
    {ray} start --disable-usage-stats {arguments} && break
    {unless_up}
done
echo 0 > /proc/self/autogroup || true
while pgrep -x raylet > /dev/null; do sleep 0.5; done
"""


def require_nodes() -> None:
    """Skip the test if nodes cannot be made; fail it if CI is set."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    reason = ""
    if os.geteuid() != 0:
        reason = "network namespaces need root"
    elif missing:
        reason = f"{', '.join(missing)} not found (Debian: iproute2, util-linux)"
    if reason:
        skip_or_fail(reason)


def run(*command: object, check: bool = True) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=30, check=False
    )
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass
class Node:
    """One machine of the cluster."""

    name: str
    address: str
    host_link: str
    """The device at the bridge's end of the node's link."""
    log: Path
    is_head: bool
    sees_private: bool
    arguments: Sequence[str]
    environ: Mapping[str, str]
    shm_mib: int
    process: subprocess.Popen[bytes] | None = None
    logged_before: int = 0
    """The number of bytes of the log that earlier starts have written."""
    revived: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes that were restarted on the node; they end with it."""

    def power_on(self) -> None:
        """Start the node; `wait_up` returns once it has joined.

        Call this in the main thread: the node is killed when the thread that started it ends.
        """
        assert self.process is None, "the node is already running"
        self.logged_before = self.log.stat().st_size if self.log.exists() else 0
        script = _FIRST_PROCESS.format(
            name=self.name, ray=_RAY, arguments=" ".join(self.arguments), shm_mib=self.shm_mib,
            # A start with --block that fails exits with 1; with another status it was up before.
            unless_up=("[ $? = 1 ] || exit; " * ("--block" in self.arguments))
            + f"{_RAY} stop --force",
            hidden="" if self.sees_private else f"mount -t tmpfs tmpfs {self.log.parent / PRIVATE}",
        )  # fmt: skip
        line = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.name]
        line += ["unshare", "--fork", "--pid", "--kill-child", "--mount", "--uts", "--ipc"]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [*line, "--mount-proc", "bash", "-c", script],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **self.environ}, start_new_session=True,
            )  # fmt: skip

    def wait_up(self, *, limit_s: float = START_S) -> None:
        assert self.process is not None
        deadline = time.monotonic() + limit_s
        while "Ray runtime started" not in self._new_log():
            assert self.process.poll() is None, f"{self.name} did not start: {self._new_log()}"
            assert time.monotonic() < deadline, f"{self.name} is not up: {self._new_log()}"
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill all processes of the node with SIGKILL, as when a machine loses its power."""
        if self.process is None:
            return
        self.process.kill()
        for process in (self.process, *self.revived):
            process.wait(timeout=20)
        self.process = None
        self.revived.clear()

    def kill_raylet(self) -> None:
        """Kill the node's raylet with SIGKILL; the processes that it started end with it."""
        [raylet] = [each for each in self.processes() if each.name() == "raylet"]
        raylet.kill()
        assert self.process is not None
        self.process.wait(timeout=60)
        self.kill()

    def end_by_sigterm(self, *, limit_s: float) -> None:
        """Send SIGTERM to `ray start --block`, as the kubelet does, and wait until it has ended."""
        [command] = self.processes(r".*/ray start .*--block")
        command.terminate()
        command.wait(timeout=limit_s)
        self.kill()

    def start(self) -> None:
        self.power_on()
        self.wait_up()

    def restart_control_store(self) -> None:
        """Kill the cluster's control store, which this node runs, and start the program again.

        `ray start --head` could only start a whole node.
        """
        [store] = [each for each in self.processes() if each.name() == "gcs_server"]
        line, environ = store.cmdline(), store.environ()
        store.kill()
        with self.log.open("ab") as file:
            again = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._enter(), *line],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environ, start_new_session=True,
            )  # fmt: skip
        self.revived.append(again)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the node's processes whose title a pattern matches; none if the node is dead."""
        found: list[psutil.Process] = []
        if self.process is None:
            return found
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if re.match(title, " ".join(child.cmdline())):
                        found.append(child)
        return found

    @property
    def entrance(self) -> list[str]:
        """The prefix of a command that runs it on this node.

        It sets the cluster's Ray settings, among them the mode of authentication: a driver that
        requires tokens refuses the control store, which then ends the driver's actors as if nobody
        referred to them.
        """
        settings = [f"{key}={value}" for key, value in self.environ.items() if key[:4] == "RAY_"]
        return [*self._enter(), "env", *settings]

    def cut(self) -> None:
        run("ip", "link", "set", self.host_link, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.host_link, "up")

    def limit(self, mbit: int) -> None:
        """Limit the traffic to the node, in megabits per second."""
        rate = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
        run("tc", "qdisc", "replace", "dev", self.host_link, "root", "tbf", *rate)

    def _enter(self) -> list[str]:
        first = str(self._first_process())
        return ["nsenter", "--target", first, "--net", "--pid", "--mount", "--uts", "--ipc"]

    def _first_process(self) -> int:
        """Return the id of the process from which all others on the node descend."""
        assert self.process is not None
        [first] = psutil.Process(self.process.pid).children()
        return first.pid

    def _new_log(self) -> str:
        return self.log.read_bytes()[self.logged_before :].decode(errors="replace")


@dataclass
class Network:
    """A bridge and the nodes on it; `network` makes one."""

    directory: Path
    name: str
    subnet: str
    nodes: list[Node] = field(default_factory=list)
    _host_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2))

    @property
    def gateway(self) -> str:
        """The address of this machine in the network."""
        return f"{self.subnet}.1"

    @property
    def private(self) -> Path:
        """A directory that is empty on all nodes except one, by default the head."""
        return self.directory / PRIVATE

    @property
    def head(self) -> Node:
        [head] = [node for node in self.nodes if node.is_head]
        return head

    def add(
        self,
        *,
        cpus: float,
        resources: Mapping[str, float] | None = None,
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        store_mib: int = 128,
        sees_private: bool | None = None,
    ) -> Node:
        """Add a node; the first one is the head. `Network.start` powers them on.

        sees_private: whether the node sees `private`; None: only the head does.
        """
        arguments = [
            f"--num-cpus={cpus:g}",
            f"--object-store-memory={store_mib * 2**20}",
            f"--resources='{json.dumps(dict(resources or {}))}'",
            *options,
        ]
        if not self.nodes:
            arguments.append("--include-dashboard=false")
        return self._add(
            arguments, environ=environ or {}, shm_mib=store_mib + 256, sees_private=sees_private
        )

    def add_pod(
        self, parameters: Mapping[str, str], *, environ: Mapping[str, str], shm_mib: int
    ) -> Node:
        """Add a node that starts as the operator starts a group's pod.

        parameters: the group's rayStartParams, quoted for a shell; the operator adds the rest.
        """
        arguments = [
            *(f"--{name}={value}" for name, value in parameters.items()),
            "--metrics-export-port=8080", "--dashboard-agent-listen-port=52365", "--block",
        ]  # fmt: skip
        return self._add(arguments, environ=environ, shm_mib=shm_mib, sees_private=None)

    def _add(
        self,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str],
        shm_mib: int,
        sees_private: bool | None,
    ) -> Node:
        is_head = not self.nodes
        name, host_link, address = self.plug_in()
        where = ["--head", "--port=6379"]
        if not is_head:
            where = [f"--address={self.nodes[0].address}:6379"]
        node = Node(
            name=name,
            address=address,
            host_link=host_link,
            log=self.directory / f"{name}.log",
            is_head=is_head,
            sees_private=is_head if sees_private is None else sees_private,
            arguments=[*where, f"--node-ip-address={address}", *arguments],
            environ={
                "RAY_AUTH_MODE": "disabled",
                "RAY_USAGE_STATS_ENABLED": "0",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                "OMP_NUM_THREADS": "1",
                **environ,
            },
            shm_mib=shm_mib,
        )
        self.nodes.append(node)
        return node

    def plug_in(self) -> tuple[str, str, str]:
        """Make a namespace that is connected with the bridge.

        Returns: its name, the device at the bridge's end of the link, and its address.
        """
        number = next(self._host_numbers)
        name, host_link = f"{self.name}n{number}", f"{self.name}h{number}"
        address = f"{self.subnet}.{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", host_link, "type", "veth", "peer", "eth0", "netns", name)
        run("ip", "link", "set", host_link, "master", self.name, "up")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "route", "add", "default", "via", self.gateway)
        return name, host_link, address

    def start(self) -> None:
        """Power all nodes on, the head first."""
        self.head.start()
        others = [node for node in self.nodes if not node.is_head]
        for node in others:
            node.power_on()
        for node in others:
            node.wait_up()


@contextlib.contextmanager
def network(directory: Path) -> Iterator[Network]:
    """Make an empty network; remove it and all its nodes at the end of the block."""
    require_nodes()
    _sweep()
    name = f"{PREFIX}{os.getpid()}x{next(_numbers)}"
    made = Network(directory=directory, name=name, subnet=_free_subnet())
    made.private.mkdir(exist_ok=True)
    try:
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "addr", "add", f"{made.gateway}/24", "dev", name)
        run("ip", "link", "set", name, "up")
        yield made
    finally:
        for node in made.nodes:
            node.kill()
        _remove(name)


def _free_subnet() -> str:
    used = run("ip", "-4", "route")
    numbers = (f"10.{213 + os.getpid() % 32}.{third}" for third in range(256))
    return next(subnet for subnet in numbers if f"{subnet}.0/24" not in used)


def _sweep() -> None:
    """Remove the networks of processes that were killed."""
    names = re.findall(rf"\b({PREFIX}(\d+)x\d+)\b", run("ip", "-brief", "link"))
    for name, pid in set(names):
        if not psutil.pid_exists(int(pid)):
            _remove(name)


def _remove(name: str) -> None:
    """Remove a network with its namespaces and links.

    Deleting a namespace deletes the device at its end of the link, and with it the other one.
    """
    spaces = re.findall(rf"^({name}n\d+)", run("ip", "netns", "list"), flags=re.MULTILINE)
    for space in spaces:
        run("ip", "netns", "delete", space, check=False)
    for link in re.findall(rf"\b({name}h\d+)@", run("ip", "-brief", "link")):
        run("ip", "link", "delete", link, check=False)
    run("ip", "link", "delete", name, check=False)
