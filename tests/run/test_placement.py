"""Tests of the placement of a run's parts on nodes, and of the messages if they do not fit."""

from __future__ import annotations

from typing import Any

from service.config.file import parse_config
from service.config.tree import Config
from service.launch.placement import (
    ROLES,
    SHARE,
    Node,
    Role,
    describe_places,
    misfit,
    resources_of,
    roles_of,
)

GPU_RANKS = {"device": "cuda", "gpus_per_rank": 1}


def config_with(**sections: Any) -> Config:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def node(number: int, role: Role | None = None, **resources: float) -> Node:
    of_role = {role: 1.0} if role else {}
    return Node(
        node_id=f"id-{number}", address=f"10.0.0.{number}", resources={**resources, **of_role}
    )


def test_a_single_node_without_roles_requests_no_role_resources() -> None:
    roles = roles_of([node(1, CPU=4)])
    assert [resources_of(role, roles) for role in ROLES if role != "rayloom_control"] == [
        {},
        {},
        {},
    ]
    assert resources_of("rayloom_control", roles) == {"node:__internal_head__": SHARE}


def test_only_roles_that_a_node_offers_are_requested() -> None:
    nodes = [node(1, CPU=4), node(2, "rayloom_inference", CPU=4), node(3, "rayloom_control")]
    roles = roles_of(nodes)
    assert resources_of("rayloom_inference", roles) == {"rayloom_inference": SHARE}
    assert resources_of("rayloom_control", roles) == {"rayloom_control": SHARE}
    assert (
        resources_of("rayloom_trainer", roles) == resources_of("rayloom_environments", roles) == {}
    )
    assert describe_places(roles, nodes) == (
        "places: control on 10.0.0.3; inference on 10.0.0.2; trainer on any node; "
        "environments on any node"
    )


def test_a_role_whose_only_node_is_lost_is_still_requested() -> None:
    before = roles_of([node(1, CPU=4), node(2, "rayloom_trainer", CPU=4)])
    roles = roles_of([node(1, CPU=4)], before=before)
    assert resources_of("rayloom_trainer", roles) == {"rayloom_trainer": SHARE}
    assert "trainer on nodes that are awaited" in describe_places(roles, [node(1, CPU=4)])


def test_engines_do_not_fit_if_only_the_sum_of_gpus_is_enough() -> None:
    engines = {"num_replicas": 3, "gpus_per_replica": 2}
    config = config_with(inference=engines, trainer={"num_ranks": 2})
    # The run requests six GPUs, and the nodes have six in total.
    fault = misfit(config, [node(1, CPU=8, GPU=3), node(2, CPU=8, GPU=3)])
    assert fault is not None
    assert fault.startswith("engine 3 of 3 asks for 1 CPU and 2 GPU, and no node has that left")
    assert "10.0.0.1 has 7 CPU, 1 GPU; 10.0.0.2 has 7 CPU, 1 GPU" in fault
    assert "lower inference.num_replicas, cpus_per_replica or gpus_per_replica" in fault
    three = [node(number, CPU=8, GPU=2) for number in range(3)]
    assert misfit(config, three) is None


def test_a_part_fits_only_on_nodes_that_offer_its_role() -> None:
    config = config_with(trainer={"num_ranks": 2})
    roomy, small = node(1, CPU=64), node(2, "rayloom_trainer", CPU=1)
    fault = misfit(config, [roomy, small])
    assert fault is not None
    assert fault.startswith("trainer rank 2 of 2 asks for 1 CPU and rayloom_trainer")
    assert "10.0.0.1 has 64 CPU, 0 GPU; 10.0.0.2 has 0 CPU, 0 GPU, rayloom_trainer" in fault
    assert misfit(config, [roomy, node(2, "rayloom_trainer", CPU=2)]) is None


def test_large_parts_are_placed_before_small_ones() -> None:
    config = config_with(
        inference={"num_replicas": 1, "gpus_per_replica": 2},
        trainer={"num_ranks": 3, **GPU_RANKS},
    )
    assert misfit(config, [node(1, CPU=8, GPU=2), node(2, CPU=8, GPU=3)]) is None
    assert misfit(config, [node(1, CPU=8, GPU=4)]) is not None


def test_a_cluster_without_nodes_has_no_room() -> None:
    fault = misfit(config_with(), [])
    assert fault is not None and "there is no node" in fault
