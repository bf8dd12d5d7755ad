"""Decide which nodes the parts of a run may use, and whether all parts fit. Pure.

The parts are engines, trainer ranks, environment actors and the supervisor; each belongs to a role.
A node offers a role by a custom Ray resource with the role's name. If any node offers a role, the
role's parts request a small amount of this resource, so that Ray places them on such nodes.
Otherwise they request only CPUs and GPUs. The placement is decided at each start or recovery of the
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from service.config.tree import Config

# Amount of a role's resource that a part requests: a node that offers 1 has room for 1 / SHARE.
SHARE = 0.001
# Ray's own resource, which only the head node has.
HEAD_NODE = "node:__internal_head__"


Role = Literal["rayloom_control", "rayloom_inference", "rayloom_trainer", "rayloom_environments"]
"""The purpose of a node, which is the name of the custom Ray resource that offers it.

rayloom_control: the role of the supervisor; the queue, the merge actor and the weight board use its
node.
"""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """All resources of the node, used or free."""


Roles = frozenset[Role]
"""The roles that nodes of the cluster offer; they determine what parts request."""


def roles_of(nodes: Sequence[Node], *, before: Roles = frozenset()) -> Roles:
    """Return the roles that the cluster's nodes offer, or have offered earlier in the run.

    before: the roles offered earlier. If all nodes of such a role are lost, the role's parts wait
    for new nodes that offer the role. They do not use other nodes, which may lack paths or
    resources.
    """
    return before | {role for role in ROLES for node in nodes if node.resources.get(role, 0) > 0}


def resources_of(role: Role, offered: Roles) -> dict[str, float]:
    """Return the custom Ray resources to request, so that Ray uses the right nodes for a role.

    A role in `offered` needs a small amount of its own resource. Otherwise `rayloom_control` needs
    the head node's resource. Other roles may use any node, and need no custom resource.
    """
    if role in offered:
        return {role: SHARE}
    return {HEAD_NODE: SHARE} if role == "rayloom_control" else {}


def nodes_of(role: Role, offered: Roles, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that have the resources that a part of the role requests."""
    asked = resources_of(role, offered)
    return [node for node in nodes if all(name in node.resources for name in asked)]


def describe_places(offered: Roles, nodes: Sequence[Node]) -> str:
    """Return one line for the log that names, for each role, the nodes that its parts may use."""
    where = []
    for role in ROLES:
        addresses = ", ".join(sorted(node.address for node in nodes_of(role, offered, nodes)))
        is_bound = bool(resources_of(role, offered))
        where.append(
            f"{role.removeprefix('rayloom_')} on "
            + ((addresses or "nodes that are awaited") if is_bound else "any node")
        )
    return "places: " + "; ".join(where)


def misfit(config: Config, nodes: Sequence[Node]) -> str | None:
    """Return None if all parts of the run fit on the nodes, or else an error message.

    The message names the first part that does not fit. Each part must fit on a single node: two
    engines with 2 GPUs each do not fit on two nodes with 3 GPUs and 1 GPU.
    """
    # The most demanding parts are placed first, each on the fullest node that has room for it.
    left = {node.node_id: dict(node.resources) for node in nodes}
    parts = sorted(_parts(config, roles_of(nodes)), key=_demand, reverse=True)
    for name, keys, resources in parts:
        room = [free for free in left.values() if _fits(resources, free)]
        if not room:
            return (
                f"{name} asks for {_format_resources(resources)}, and no node has that "
                f"left after the run's other parts: {_left(nodes, left)}; "
                f"lower {keys}, or add nodes"
            )
        chosen = min(room, key=lambda free: (free.get("GPU", 0), free.get("CPU", 0)))
        for kind, amount in resources.items():
            chosen[kind] = chosen.get(kind, 0) - amount
    return None


# A part's name, the settings that determine its number and size, and the requested resources.
_Part = tuple[str, str, Mapping[str, float]]


def _parts(config: Config, offered: Roles) -> Iterator[_Part]:
    inference, trainer = config.inference, config.trainer
    kinds: tuple[tuple[str, Role, int, float, float, str], ...] = (
        (
            "engine",
            "rayloom_inference",
            inference.num_replicas,
            inference.cpus_per_replica,
            inference.gpus_per_replica,
            "inference.num_replicas, cpus_per_replica or gpus_per_replica",
        ),
        (
            "trainer rank",
            "rayloom_trainer",
            trainer.num_ranks,
            1,
            trainer.gpus_per_rank,
            "trainer.num_ranks or gpus_per_rank",
        ),
        (
            "environment actor",
            "rayloom_environments",
            config.num_environment_actors,
            1,
            0,
            "rollouts.num_actors",
        ),
    )
    for name, role, count, cpus, gpus, keys in kinds:
        resources = {"CPU": cpus, "GPU": gpus, **resources_of(role, offered)}
        for number in range(1, count + 1):
            yield f"{name} {number} of {count}", keys, resources


def _demand(part: _Part) -> tuple[bool, float, float]:
    _, _, resources = part
    # A part that needs a role's resource has fewer nodes to choose from.
    return len(resources) > 2, resources["GPU"], resources["CPU"]


def _fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    # Ray counts in units of 1e-4.
    return all(amount <= free.get(name, 0) + 1e-6 for name, amount in wanted.items() if amount)


def _format_resources(resources: Mapping[str, float]) -> str:
    return " and ".join(
        name if amount == SHARE else f"{amount:g} {name}"
        for name, amount in resources.items()
        if amount
    )


def _left(nodes: Sequence[Node], left: Mapping[str, Mapping[str, float]]) -> str:
    sentences = []
    for node in nodes:
        free = left[node.node_id]
        roles = [role for role in ROLES if free.get(role, 0) > 0]
        amounts = [f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
        sentences.append(f"{node.address} has {', '.join([*amounts, *roles])}")
    return "; ".join(sentences) or "there is no node"
