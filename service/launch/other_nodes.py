"""Check that each node of a cluster sees the files that a run needs.

These are the run's directory, the model's directory, and a task file outside of the working
directory. A Ray task looks for them, at the same paths, on each node on which an actor of the run
may be placed. On a cluster of one node nothing is checked.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.network import is_loopback
from service.config.file import ConfigError
from service.config.preflight import check_metrics_address, companions
from service.config.sections import ServiceSettings
from service.config.tree import Config
from service.launch.cluster import alive_nodes, on_node
from service.launch.placement import HEAD_NODE, ROLES, Node, Role, nodes_of, roles_of
from service.launch.run_dir import RunDir

# Time limit for a node to start a process and check the paths.
ANSWER_LIMIT_S = 120.0
# Number of first bytes of a file that are compared.
_COMPARED_BYTES = 1 << 20
_ALL = frozenset(ROLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPath:
    """A path that must have the same content on other nodes as on the node that starts the run."""

    key: str
    """The setting that names the path, or "run directory"."""
    path: Path
    witness: Path
    """A file at or below the path; equal contents on two nodes show that the path is shared."""
    digest: str
    """Digest of the witness on the node of the command (`digest_of`)."""
    roles: frozenset[Role]
    """Roles of the nodes that need the path."""
    is_written: bool = False
    """Whether the nodes that need the path also write to it."""


def check_other_nodes(
    config: Config, run_dir: RunDir, *, model: str, has_endpoint: bool = False
) -> None:
    """Check that the run can use every node on which one of its actors may be placed.

    Each such node must see the shared paths. A node on which the supervisor may be placed must
    also be able to listen on the address of the metrics.
    Args: model: directory or hub name of the policy's model. has_endpoint: True if the metrics are
    served already, which makes the check of their address unnecessary.
    Raises: ConfigError, which names the node and what is wrong with it.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = alive_nodes()
    if all(node.node_id == here for node in nodes):
        return
    roles = roles_of(nodes)
    with _witness_in(run_dir) as nonce:
        shared = list(_shared_paths(config, run_dir, model=model, nonce=nonce))
        asked: list[tuple[Node, Any]] = []
        for node in nodes:
            own = frozenset(role for role in ROLES if node in nodes_of(role, roles, nodes))
            needed = [each for each in shared if each.roles & own]
            if needed:
                asked.append((node, _task(find_unshared, node).remote(needed)))
            if "rayloom_control" in own and not has_endpoint:
                asked.append((node, _task(_metrics_fault, node).remote(config)))
        for node, answer in asked:
            if (fault := _answer(node, answer)) is not None:
                raise ConfigError(f"node {node.address}: {fault}")


def check_api_place(service: ServiceSettings) -> None:
    """Check that the API will be reachable from this node.

    Only the head node serves the API, by Serve's proxy. If service.host is a loopback address,
    no other node can reach the API.
    Raises: ConfigError if service.host is a loopback address and this node is not the head node.
    """
    here = ray.get_runtime_context().get_node_id()
    [head] = [node for node in alive_nodes() if HEAD_NODE in node.resources]
    if head.node_id != here and is_loopback(service.host):
        raise ConfigError(
            f"service.host is {service.host}: the API listens on the head node, {head.address}, "
            "where only that node itself could reach it; start the command there, or set "
            "service.host to 0.0.0.0 and RAYLOOM_API_KEY to a key"
        )


def find_unshared(needed: Sequence[SharedPath]) -> str | None:
    """Return an error message about the first path that this node cannot use, or None.

    A path's content must be as on the node that starts the run. A path that the run writes to must
    also be writable. The function runs as a Ray task on the node to be checked.
    """
    for shared in needed:
        if digest_of(shared.witness) != shared.digest:
            return (
                f"{shared.key}: {shared.path} differs from this path on the command's node; "
                "expected a path on a file system that all nodes of the run mount at the same "
                "place; move it there"
            )
        if shared.is_written and (reason := _write_fault(shared.path)):
            return (
                f"{shared.key}: {shared.path} cannot be written ({reason}); expected a directory "
                "that this node may write; correct its permissions, or its mount"
            )
    return None


def digest_of(file: Path) -> str:
    """Return a digest of the file's size and first bytes; empty if the file cannot be read."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_COMPARED_BYTES)
        size = file.stat().st_size
    except OSError:
        return ""
    return blake2b(content + str(size).encode(), digest_size=16).hexdigest()


def _shared_paths(
    config: Config, run_dir: RunDir, *, model: str, nonce: Path
) -> Iterator[SharedPath]:
    yield SharedPath(
        key="run directory",
        path=run_dir.path,
        witness=nonce,
        digest=digest_of(nonce),
        roles=frozenset({"rayloom_control", "rayloom_trainer"}),
        is_written=True,
    )
    models = {"model.path" if config.model.path else "the run's own model": (model, _ALL)}
    for key, path in companions(config).items():
        models[key] = (path, frozenset({"rayloom_trainer"}))
    for key, (path, roles) in models.items():
        witness = Path(path).expanduser() / "config.json"
        # A hub's model has no path here, because each node downloads it.
        if witness.is_file():
            yield SharedPath(
                key=key,
                path=witness.parent,
                witness=witness,
                digest=digest_of(witness),
                roles=roles,
            )
    for key, place in config.task_places.items():
        files = [place] if place.is_file() else filter(Path.is_file, sorted(place.rglob("*")))
        # A directory without files has been refused before.
        witness = next(iter(files))
        yield SharedPath(
            key=key,
            path=place,
            witness=witness,
            digest=digest_of(witness),
            roles=frozenset({"rayloom_control"}),
        )


@contextmanager
def _witness_in(run_dir: RunDir) -> Iterator[Path]:
    """Create a file in the run's directory for the `with` block, and yield the file's path.

    A node that does not see the file during the block does not share the run's directory.
    """
    # The name is random, so that a file of an earlier start is not mistaken for this one.
    nonce = run_dir.path / f".seen-{uuid.uuid4().hex}"
    nonce.write_text(nonce.name)
    try:
        yield nonce
    finally:
        with suppress(OSError):
            nonce.unlink()


def _write_fault(directory: Path) -> str:
    own = directory / f".written-{uuid.uuid4().hex}"
    try:
        own.write_bytes(b"")
        own.unlink()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def _metrics_fault(config: Config) -> str | None:
    try:
        check_metrics_address(config)
    except ConfigError as error:
        return str(error)
    return None


def _task(function: Callable[..., str | None], node: Node) -> Any:
    return ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=on_node(node.node_id)
    )


def _answer(node: Node, answer: Any) -> str | None:
    try:
        fault: str | None = ray.get(answer, timeout=ANSWER_LIMIT_S)
    except GetTimeoutError:
        return (
            f"no answer within {ANSWER_LIMIT_S:g} s, expected a node that runs tasks; look at its "
            "raylet's log, or take it out of the cluster"
        )
    except RayTaskError as error:
        return (
            f"it cannot run Rayloom ({str(error.cause).splitlines()[0]}); expected the same "
            "version of it to be installed on every node"
        )
    except RayError as error:
        return (
            f"it was lost during the check ({str(error).splitlines()[0]}); start again without it"
        )
    return fault
