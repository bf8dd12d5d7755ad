"""Decide which nodes the parts of a run may use, and whether all parts fit. Pure.

A node offers a role by a custom resource of the role's name. A part requests a share of its role's
resource if some node offers it, and otherwise only CPUs and GPUs; so a cluster without roles, or a
laptop, places parts by CPUs and GPUs only. Called by `cluster` before the start and by each term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.config.tree import Config

# Share of a node's unit that a part takes: 1 / SHARE parts have room on the node.
SHARE = 0.001
# Ray's own resource, which only the head node has.
HEAD_NODE = "node:__internal_head__"


class Role(StrEnum):
    """The purpose of a node; the value is the name of the resource that the node offers."""

    CONTROL = "rayloom_control"
    """The supervisor and, on its node, the queue, the merge actor and the weight board."""
    INFERENCE = "rayloom_inference"
    TRAINER = "rayloom_trainer"
    ENVIRONMENTS = "rayloom_environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One living node of the cluster."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """All resources of the node, whether they are taken or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles that nodes offer, and what each part requests in addition to CPUs and GPUs.

    `roles_of` makes it.
    """

    offered: frozenset[Role]

    def asked(self, role: Role) -> dict[str, float]:
        """Return the custom resources that a part requests. If no node offers control, it goes to
        the head.
        """
        if role in self.offered:
            return {role.value: SHARE}
        return {HEAD_NODE: SHARE} if role is Role.CONTROL else {}

    def nodes(self, role: Role, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes on which parts of the role may run."""
        asked = self.asked(role)
        return [node for node in nodes if all(name in node.resources for name in asked)]

    def describe(self, nodes: Sequence[Node]) -> str:
        """Return one line that says where each part runs."""
        where = []
        for role in Role:
            addresses = ", ".join(sorted(node.address for node in self.nodes(role, nodes)))
            where.append(
                f"{role.name.lower()} on "
                + ((addresses or "nodes that are awaited") if self.asked(role) else "any node")
            )
        return "places: " + "; ".join(where)


def roles_of(nodes: Sequence[Node], *, before: frozenset[Role] = frozenset()) -> Roles:
    """Return the roles that the nodes offer.

    before: roles that were offered earlier in the run. Parts of such a role wait if its nodes are
    lost, because other nodes may lack its paths, or have room only for their own parts.
    """
    offered = {role for role in Role for node in nodes if node.resources.get(role.value, 0) > 0}
    return Roles(offered=before | offered)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    name: str
    """Name with the part's number, for a sentence."""
    keys: str
    """Settings that decide how many such parts there are, and how large they are."""
    resources: Mapping[str, float]


def misfit(config: Config, nodes: Sequence[Node]) -> str | None:
    """Put every part on a node, the most demanding first, each on the fullest node that has room.

    Comparing sums would be wrong: two engines of 2 GPUs do not fit on two nodes of 2 and 1 GPUs
    next to a rank. Returns: a sentence on the first part that fits on no node; None if all fit.
    """
    left = {node.node_id: dict(node.resources) for node in nodes}
    parts = sorted(_parts(config, roles_of(nodes)), key=_demand, reverse=True)
    for part in parts:
        room = [free for free in left.values() if _fits(part.resources, free)]
        if not room:
            return (
                f"{part.name} asks for {_format_resources(part.resources)}, and no node has that "
                f"left after the run's other parts: {_left(nodes, left)}; "
                f"lower {part.keys}, or add nodes"
            )
        chosen = min(room, key=lambda free: (free.get("GPU", 0), free.get("CPU", 0)))
        for name, amount in part.resources.items():
            chosen[name] = chosen.get(name, 0) - amount
    return None


def _parts(config: Config, roles: Roles) -> Iterator[_Part]:
    inference, trainer = config.inference, config.trainer
    kinds = (
        (
            "engine",
            Role.INFERENCE,
            inference.num_replicas,
            inference.cpus_per_replica,
            inference.gpus_per_replica,
            "inference.num_replicas, cpus_per_replica or gpus_per_replica",
        ),
        (
            "trainer rank",
            Role.TRAINER,
            trainer.num_ranks,
            1,
            trainer.gpus_per_rank,
            "trainer.num_ranks or gpus_per_rank",
        ),
        (
            "environment actor",
            Role.ENVIRONMENTS,
            config.num_environment_actors,
            1,
            0,
            "rollouts.num_actors",
        ),
    )
    for name, role, count, cpus, gpus, keys in kinds:
        resources = {"CPU": cpus, "GPU": gpus, **roles.asked(role)}
        for number in range(1, count + 1):
            yield _Part(name=f"{name} {number} of {count}", keys=keys, resources=resources)


def _demand(part: _Part) -> tuple[bool, float, float]:
    """Return the order of a part: parts that are bound to a role come first, then the larger
    ones.
    """
    return len(part.resources) > 2, part.resources["GPU"], part.resources["CPU"]


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
    """Return what each node has left of the resources that parts request."""
    sentences = []
    for node in nodes:
        free = left[node.node_id]
        roles = [role.value for role in Role if free.get(role.value, 0) > 0]
        amounts = [f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
        sentences.append(f"{node.address} has {', '.join([*amounts, *roles])}")
    return "; ".join(sentences) or "there is no node"
