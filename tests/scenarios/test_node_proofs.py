"""Tests of runs on several nodes, which die or are cut off: `make proof PART=nodes`.

There is a head, and two nodes each for engines, the trainer and environments, each in its own
namespaces on one machine (`worlds.servers.nodes`). The command runs on the supervisor's node, which
is the head unless a test says otherwise, in a directory that no other node sees.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from worlds.runs.run_checks import check_audit, check_finished, check_stopped
from worlds.runs.run_driver import ENGINE, STEP_S, Run, running, small_config
from worlds.servers.nodes import Network, Node, network
from worlds.servers.redis_server import redis_server

from service.launch.signals import EXIT_INTERRUPTED

pytestmark = [pytest.mark.proof, pytest.mark.nodes, pytest.mark.timeout(1800)]

# A slow game: a step takes seconds, so that faults happen while the run works.
GAME = """
import asyncio
from actors.environment.builtin.guessing import GuessingEnvironment
from own_pause import PAUSE_S

class SlowGuessing(GuessingEnvironment):
    async def reset(self, task):
        await asyncio.sleep(PAUSE_S)
        return await super().reset(task)
"""
# Titles of processes.
RANKS, ENVIRONMENTS = "ray::TrainerRank", "ray::EnvironmentActor"
# The bandwidth of each node's link.
MBIT = 400
# A limit for a wait, not an expected time: seven nodes share two cores with other processes.
WAIT_S = 600.0
# More than any test has time for: it stops the run once it has seen enough.
MANY_STEPS = 1000
# Ray's own 60 s may be over before a head is back on a busy machine.
HEAD_BACK_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The nodes, by the part of a run that they are for."""

    net: Network
    control: Node
    engines: tuple[Node, Node]
    trainers: tuple[Node, Node]
    environments: tuple[Node, Node]

    @property
    def workers(self) -> list[Node]:
        return [*self.engines, *self.trainers, *self.environments]


@contextlib.contextmanager
def world(directory: Path, *, cpus: int = 2) -> Iterator[World]:
    """Start all nodes, and yield them.

    cpus: the number for each node of ranks or environments. A run has two of each, so that it needs
    one node if cpus is 2, and both nodes if cpus is 1.
    """
    with network(directory) as net:
        control = net.add(cpus=0, resources={"rayloom_control": 1})
        yield powered_on(net, control, cpus=cpus)


@contextlib.contextmanager
def world_whose_head_comes_back(directory: Path) -> Iterator[World]:
    """Start all nodes and one for the supervisor; Redis keeps the state of the head."""
    with network(directory) as net, redis_server(directory, host=net.gateway) as redis:
        settings = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_BACK_S)}
        net.add(cpus=0, environ={**settings, "RAY_REDIS_ADDRESS": redis}, sees_private=False)
        control = net.add(
            cpus=0, resources={"rayloom_control": 1}, environ=settings, sees_private=True
        )
        yield powered_on(net, control, environ=settings)


def powered_on(
    net: Network, control: Node, *, cpus: int = 2, environ: dict[str, str] | None = None
) -> World:
    def pair(role: str, num_cpus: int) -> tuple[Node, Node]:
        resources = {f"rayloom_{role}": 1.0}
        one, other = (
            net.add(cpus=num_cpus, resources=resources, environ=environ) for _ in range(2)
        )
        return one, other

    made = World(
        net=net,
        control=control,
        engines=pair("inference", 1),
        trainers=pair("trainer", cpus),
        environments=pair("environments", cpus),
    )
    for node in made.workers:
        node.limit(MBIT)
    net.start()
    return made


@contextlib.contextmanager
def played(
    cluster: World, shared: Path, model: str, arguments: Sequence[str] = (), **sections: Any
) -> Iterator[Run]:
    """Start a run in the control node's own directory, the only one with the game's module."""
    own = cluster.net.private
    (own / "own_pause.py").write_text("PAUSE_S = 1.0\n")
    (own / "own_game.py").write_text(GAME)
    sections = {
        "run": {"steps": MANY_STEPS, "checkpoint_every": 2, "evaluate_every": MANY_STEPS},
        "rollouts": {"num_actors": 2, "turn_deadline_s": 60, "frozen_after_s": 20},
        "inference": {"num_replicas": 2},
        "tasks": {"environment": "own_game:SlowGuessing", "evaluation_tasks": 0},
        **sections,
    }
    config = small_config(shared, model, **sections)
    line = [*arguments, "--address", f"{cluster.net.head.address}:6379"]
    entrance = cluster.control.entrance
    with running(config, shared / "run", line, entrance=entrance, cwd=own) as run:
        yield run


def stop(run: Run) -> None:
    """Press Ctrl-C; check that the run ends, counts each rollout once and has a clean audit."""
    # The process is `nsenter`: with a signal it would end at once, without the command.
    [command] = psutil.Process(run.process.pid).children()
    command.send_signal(signal.SIGINT)
    assert run.wait(limit_s=WAIT_S) == EXIT_INTERRUPTED, run.output.read_text() + run.log()
    check_stopped(run)


def nodes_with(words: str, cluster: World) -> set[str]:
    """Return the names of the nodes that have a process with such a title."""
    return {node.name for node in cluster.workers if node.processes(words)}


def names(nodes: Sequence[Node]) -> set[str]:
    return {node.name for node in nodes}


def by_use(nodes: tuple[Node, Node], words: str) -> tuple[Node, Node]:
    """Return a node with such processes, then the other node, which may have some too."""
    one, other = nodes
    return (one, other) if one.processes(words) else (other, one)


def test_each_part_runs_on_the_nodes_of_its_role(tmp_path: Path, small_model: str) -> None:
    """Check also that nodes play a game whose directory they do not see, that the two ranks have
    different nodes, and that a run directory that some node does not see is refused."""
    with world(tmp_path, cpus=1) as cluster:
        config = small_config(tmp_path, small_model, inference={"num_replicas": 2})
        entrance, private = cluster.control.entrance, cluster.net.private
        with running(config, private / "run", ["--address", "auto"], entrance=entrance) as run:
            assert run.wait(limit_s=WAIT_S) == 2, run.output.read_text()
            said = " ".join(run.output.read_text().split())
        assert "run directory: " in said
        assert "differs from this path on the command's node" in said
        assert any(f"node {node.address}: " in said for node in cluster.trainers)

        sections = {"run": {"steps": 6, "checkpoint_every": 3}}
        with played(cluster, tmp_path, small_model, **sections) as run:
            run.wait_for_step(2, limit_s=WAIT_S)
            assert nodes_with("ray::ServeReplica", cluster) == names(cluster.engines)
            assert nodes_with(RANKS, cluster) == names(cluster.trainers)
            assert nodes_with(ENVIRONMENTS, cluster) == names(cluster.environments)
            for title in ("Supervisor", "TrajectoryQueue", "MergeActor", "WeightBoard"):
                assert cluster.control.processes(f"ray::{title}"), title
            assert run.wait(limit_s=6 * STEP_S) == 0, run.output.read_text() + run.log()
            check_finished(run, steps=6)
            check_audit(run)


def test_command_that_authenticates_differently_than_the_cluster_is_refused(
    tmp_path: Path, small_model: str
) -> None:
    with network(tmp_path) as net:
        net.add(cpus=6)
        net.start()
        config = small_config(tmp_path, small_model)
        other = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'a' * 32}"]
        entrance = [*net.head.entrance, *other]
        with running(config, tmp_path / "run", ["--address", "auto"], entrance=entrance) as run:
            assert run.wait(limit_s=WAIT_S) == 2
            said = " ".join((tmp_path / "run.out").read_text().split())
        assert "RAY_AUTH_MODE is token here and disabled on the cluster" in said


def test_a_run_survives_the_loss_of_each_node(tmp_path: Path, small_model: str) -> None:
    """Kill an environment node for good; an inference node, which comes back; the trainer's node,
    which another node replaces; and that node, which comes back."""
    with world(tmp_path) as cluster, played(cluster, tmp_path, small_model) as run:
        run.wait_for_step(2, limit_s=WAIT_S)
        playing, _ = by_use(cluster.environments, ENVIRONMENTS)
        playing.kill_raylet()
        run.wait_for_log("environment actor", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)

        returning, other = cluster.engines
        returning.kill_raylet()
        run.wait_for_log("an engine was lost; 1 of 2 ready", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)
        returning.start()
        run.wait_for_log("an engine is back; 2 of 2 ready", limit_s=WAIT_S)
        # Then every turn is played by the engine that came back.
        other.kill_raylet()
        run.advance(3, limit_s=WAIT_S)

        busy, spare = by_use(cluster.trainers, RANKS)
        busy.kill_raylet()
        run.wait_for_log("a new group is at version", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)
        assert nodes_with(RANKS, cluster) == names([spare])
        spare.kill_raylet()
        run.wait_for_log("no node has room for 2 ranks", limit_s=WAIT_S)
        spare.start()
        run.advance(2, limit_s=WAIT_S)
        stop(run)


def test_run_survives_links_that_are_cut_briefly_and_for_good(
    tmp_path: Path, small_model: str
) -> None:
    """Cut the link of a node of each role for ten seconds, then such links for good."""
    with world(tmp_path) as cluster, played(cluster, tmp_path, small_model) as run:
        run.wait_for_step(2, limit_s=WAIT_S)
        playing, _ = by_use(cluster.environments, ENVIRONMENTS)
        busy, _ = by_use(cluster.trainers, RANKS)
        for node in (playing, cluster.engines[0], busy):
            node.cut()
            time.sleep(10)
            node.mend()
            run.advance(2, limit_s=WAIT_S)
        playing, _ = by_use(cluster.environments, ENVIRONMENTS)
        playing.cut()
        run.wait_for_log("environment actor", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)
        cluster.engines[0].cut()
        run.wait_for_log("an engine was lost; 1 of 2 ready", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)
        busy, spare = by_use(cluster.trainers, RANKS)
        busy.cut()
        run.wait_for_log("a new group is at version", limit_s=WAIT_S)
        run.advance(2, limit_s=WAIT_S)
        assert spare.processes(RANKS)
        stop(run)


def test_run_continues_while_the_head_dies_and_comes_back(tmp_path: Path, small_model: str) -> None:
    """Kill the whole head, without which two steps are made, then only its control store. Both come
    back. After each an environment actor is killed, because a new actor needs head and store.
    """
    with (
        world_whose_head_comes_back(tmp_path) as cluster,
        played(cluster, tmp_path, small_model) as run,
    ):
        run.wait_for_step(2, limit_s=WAIT_S)
        engines = [each for node in cluster.engines for each in node.processes(ENGINE)]
        cluster.net.head.kill()
        run.advance(2, limit_s=WAIT_S)
        cluster.net.head.start()
        kill_environment_actor(cluster, run)
        cluster.net.head.restart_control_store()
        kill_environment_actor(cluster, run)
        # Serve's controller died with the head; the next one took the engines over.
        assert len(engines) == 2 and all(each.is_running() for each in engines)
        assert run.history().num_terms == 1
        stop(run)


def kill_environment_actor(cluster: World, run: Run) -> None:
    """Kill the oldest environment actor, and wait until another one replaces it."""

    def actors() -> set[psutil.Process]:
        found = [node.processes(ENVIRONMENTS) for node in cluster.environments]
        return {process for each in found for process in each}

    before = actors()
    killed = min(before, key=psutil.Process.create_time)
    killed.kill()
    deadline = time.monotonic() + WAIT_S
    while len(actors() - {killed}) < len(before):
        assert time.monotonic() < deadline, run.log()
        time.sleep(0.5)
    run.advance(2, limit_s=WAIT_S)
