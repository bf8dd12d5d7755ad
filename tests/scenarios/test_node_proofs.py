"""Runs over several nodes of one machine: `make proof PART=nodes`. Nodes die, and are cut off.

A head, two nodes for engines, one for the trainer and two for environments, each in namespaces of
its own (`worlds.nodes`). The command runs on the head, in a directory that no other node sees.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worlds.nodes import Network, Node, network
from worlds.run_checks import check_audit, check_finished
from worlds.run_driver import START_S, STEP_S, Run, running, small_config

pytestmark = [pytest.mark.proof, pytest.mark.nodes, pytest.mark.timeout(1800)]

# A game that takes its time: a step takes seconds, so that faults meet a run at work.
GAME = """
import asyncio
from actors.environment.builtin.guessing import GuessingEnvironment
from own_pause import PAUSE_S

class SlowGuessing(GuessingEnvironment):
    async def reset(self, task):
        await asyncio.sleep(PAUSE_S)
        return await super().reset(task)
"""
# Of each node's cable.
MBIT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The nodes by what they are for."""

    net: Network
    engines: tuple[Node, Node]
    trainer: Node
    environments: tuple[Node, Node]

    @property
    def workers(self) -> list[Node]:
        return [*self.engines, self.trainer, *self.environments]


@contextlib.contextmanager
def world(directory: Path) -> Iterator[World]:
    """All nodes, started."""
    with network(directory) as net:
        net.add(cpus=0, resources={"rayloom_control": 1})
        made = World(
            net=net,
            engines=(worker(net, "inference", 1), worker(net, "inference", 1)),
            trainer=worker(net, "trainer", 2),
            environments=(worker(net, "environments", 2), worker(net, "environments", 2)),
        )
        for node in made.workers:
            node.limit(MBIT)
        net.start()
        yield made


def worker(net: Network, role: str, cpus: int) -> Node:
    return net.add(cpus=cpus, resources={f"rayloom_{role}": 1})


@contextlib.contextmanager
def played(
    there: World, shared: Path, model: str, arguments: Sequence[str] = (), **sections: Any
) -> Iterator[Run]:
    """A run from the head's own directory, with a game that lies nowhere else."""
    own = there.net.private
    (own / "own_pause.py").write_text("PAUSE_S = 1.0\n")
    (own / "own_game.py").write_text(GAME)
    sections = {
        "rollouts": {"num_actors": 2, "turn_deadline_s": 60, "frozen_after_s": 20},
        "inference": {"num_replicas": 2},
        "tasks": {"environment": "own_game:SlowGuessing", "evaluation_tasks": 0},
        **sections,
    }
    config = small_config(shared, model, **sections)
    line = [*arguments, "--address", f"{there.net.head.address}:6379"]
    entrance = there.net.head.entrance
    with running(config, shared / "run", line, entrance=entrance, cwd=own) as run:
        yield run


def finished(run: Run, *, steps: int) -> None:
    assert run.wait(limit_s=START_S + steps * STEP_S) == 0, run.output.read_text() + run.log()
    check_finished(run, steps=steps)
    check_audit(run)


def nodes_with(words: str, there: World) -> set[str]:
    """Which nodes have a process of such a title."""
    return {node.name for node in there.workers if node.processes(words)}


def test_each_part_runs_on_the_nodes_of_its_role(tmp_path: Path, small_model: str) -> None:
    """And the user's own game on nodes that do not see the directory that it lies in."""
    with (
        world(tmp_path) as there,
        played(there, tmp_path, small_model, run={"steps": 6, "checkpoint_every": 3}) as run,
    ):
        run.wait_for_step(2, limit_s=START_S)
        names = {name: nodes_with(name, there) for name in ("ray::ServeReplica", "ray::Trainer")}
        assert names["ray::ServeReplica"] == {node.name for node in there.engines}
        assert names["ray::Trainer"] == {there.trainer.name}
        environments = nodes_with("ray::EnvironmentActor", there)
        assert environments == {node.name for node in there.environments}
        for title in ("ray::Supervisor", "ray::TrajectoryQueue", "ray::MergeActor", "ray::Weight"):
            assert there.net.head.processes(title), title
        finished(run, steps=6)


def test_a_run_directory_that_a_node_does_not_see_is_refused(
    tmp_path: Path, small_model: str
) -> None:
    with world(tmp_path) as there:
        config = small_config(tmp_path, small_model, inference={"num_replicas": 2})
        entrance = there.net.head.entrance
        arguments = ["--address", "auto"]
        with running(config, there.net.private / "run", arguments, entrance=entrance) as run:
            assert run.wait(limit_s=START_S) == 2
            said = " ".join((tmp_path / "private" / "run.out").read_text().split())
        assert f"node {there.trainer.address}: run directory:" in said
        assert "is not what it is where the command runs" in said


def test_a_command_that_authenticates_in_another_way_than_the_cluster_is_refused(
    tmp_path: Path, small_model: str
) -> None:
    with network(tmp_path) as net:
        net.add(cpus=6)
        net.start()
        config = small_config(tmp_path, small_model)
        other = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'a' * 32}"]
        entrance = [*net.head.entrance, *other]
        with running(config, tmp_path / "run", ["--address", "auto"], entrance=entrance) as run:
            assert run.wait(limit_s=START_S) == 2
            said = " ".join((tmp_path / "run.out").read_text().split())
        assert "RAY_AUTH_MODE is token here and disabled on the cluster" in said


def test_a_run_survives_the_loss_of_each_node(tmp_path: Path, small_model: str) -> None:
    """kill -9 of an environment node and of an inference node, which stay away, and of the
    trainer's, which comes back."""
    steps = 40
    sections = {"run": {"steps": steps, "checkpoint_every": 2, "evaluate_every": 1000}}
    with world(tmp_path) as there, played(there, tmp_path, small_model, **sections) as run:
        run.wait_for_step(3, limit_s=START_S)
        there.environments[0].kill_raylet()
        run.wait_for_log("environment actor", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        there.engines[0].kill_raylet()
        run.wait_for_log("an engine was lost; 1 of 2 ready", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        there.trainer.kill_raylet()
        there.trainer.start()
        run.wait_for_log("trainer: rank", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        finished(run, steps=steps)


def test_links_that_are_cut_for_a_while_and_for_good_end_nothing(
    tmp_path: Path, small_model: str
) -> None:
    """For ten seconds that of a node of each role, and then an environment node's for good."""
    steps = 40
    sections = {"run": {"steps": steps, "checkpoint_every": 2, "evaluate_every": 1000}}
    with world(tmp_path) as there, played(there, tmp_path, small_model, **sections) as run:
        run.wait_for_step(3, limit_s=START_S)
        for node in (there.environments[0], there.engines[0], there.trainer):
            node.cut()
            time.sleep(10)
            node.mend()
            run.advance(3, limit_s=START_S)
        there.environments[0].cut()
        run.wait_for_log("environment actor", limit_s=START_S)
        run.advance(2, limit_s=START_S)
        finished(run, steps=steps)
