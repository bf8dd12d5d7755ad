"""Measure what each node, rollout and published byte costs the central parts of a cluster.

    $ sudo python -m benchmarks.cluster_scale --nodes 2 4 8 12

Each node is a Ray in its own namespaces (`tests/worlds/servers/nodes.py`; needs root). On each node
one real environment actor plays with a scripted policy, and one reader takes each published version
from the weight board, as an engine does. Queue and board are those of a run. A feed in a separate
process sends the queue the requests that a supervisor sends in a step. There is no model, trainer,
store or merge, so only the central parts are measured. The benchmark prints one JSON line for each
number of nodes: processor seconds of each process for a rollout or a publication, and bytes and
packets at the head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from actors.algorithm import AlgorithmSettings
from actors.environment.actor import EnvironmentActor
from actors.environment.policy import GenerateReply, GenerateRequest
from actors.environment.settings import (
    EnvironmentActorSettings,
    EnvironmentSettings,
    RolloutSettings,
)
from actors.environment.tasks import GeneratedTasks
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.trajectory_queue.actor import start_queue
from actors.trajectory_queue.groups import GroupRequest
from actors.trajectory_queue.settings import QueueSettings, QueueStateSettings
from actors.types import FinishReason, VersionSpan
from actors.weights.actor import start_board
from actors.weights.board import Publication
from actors.weights.buffers import pack_group
from actors.weights.logprob_check import EngineScores
from benchmarks.environment import describe_environment
from service.launch.cluster import alive_nodes, on_node, on_this_node

ROOT = Path(__file__).parents[1]
GROUPS_PER_STEP, GROUP_SIZE = 16, 16
ANSWER = "4<|end|>"
IDLE_S = 10.0
Counts = dict[str, float]


class Scripted:
    """A scripted policy that always gives the same answer at once."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        await asyncio.sleep(0)
        return GenerateReply(
            token_ids=self._ids,
            logprobs=np.full(self._ids.shape, -0.5, dtype=np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=len(self._ids)),),
            cache_salt="v0",
        )


class Reader:
    """A reader that takes every publication from the board, as an engine does."""

    async def run(self, name: str, board: Any) -> None:
        term: int | None = None
        version: int | None = None
        scores = EngineScores(logprobs=np.zeros(16, np.float32))
        while True:
            work = await board.poll.remote(name, term, version, 5.0)
            if isinstance(work, Publication):
                await asyncio.gather(*(group.buffer for group in work.groups))
                term, version = work.term, work.version
                await board.report.remote(name, term, version, scores)


class Feed:
    """A sender of the requests that a supervisor sends to the queue, step after step."""

    def pid(self) -> int:
        return os.getpid()

    async def play(self, queue: Any, *, first_step: int, num_steps: int) -> int:
        """Play the steps and return the number of their rollouts."""
        tasks, num_rollouts = GeneratedTasks("guessing", run_seed=0), 0
        for step in range(first_step, first_step + num_steps):
            slots, _ = await queue.admissible.remote(30.0)
            await queue.admit.remote(
                [
                    GroupRequest(
                        group_number=slot.group_number,
                        task=tasks.task(slot.group_number),
                        num_samples=GROUP_SIZE,
                    )
                    for slot in slots
                ]
            )
            taken = None
            while taken is None:
                taken, _ = await queue.take_step.remote(30.0)
            await queue.finalise.remote(taken.step, dict.fromkeys(taken.rollout_ids))
            await queue.set_loaded_version.remote(step)
            num_rollouts += len(taken.rollout_ids)
        return num_rollouts


def measure(num_steps: int, num_publishes: int, publish_mib: int) -> dict[str, Any]:
    """Return measurements of the running cluster; called on the cluster's head."""
    ray.init("auto", log_to_driver=False, logging_level="error")
    others = [node for node in alive_nodes() if "rayloom_environments" in node.resources]
    algorithm = AlgorithmSettings(groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_lag=0)
    queue = start_queue(
        QueueStateSettings(algorithm=algorithm, queue=QueueSettings()), strategy=on_this_node()
    )
    ray.get(queue.open.remote(0, None))
    board = start_board(strategy=on_this_node())
    feed = ray.remote(Feed).options(num_cpus=0, scheduling_strategy=on_this_node()).remote()
    directory = tempfile.mkdtemp(prefix="scale-")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    policy = partial(Scripted, tokenizer.encode(ANSWER))
    running = []
    for number, node in enumerate(others):
        there = {"num_cpus": 0, "scheduling_strategy": on_node(node.node_id)}
        actor = (
            ray.remote(EnvironmentActor)
            .options(**there, max_concurrency=1000)
            .remote(
                EnvironmentActorSettings(
                    rollouts=RolloutSettings(
                        slots_per_actor=64, max_turns=4, max_tokens_per_turn=8
                    ),
                    environments={
                        "guessing": EnvironmentSettings(environment="guessing", options={})
                    },
                    chat_template=None,
                    groups_per_step=1,
                    max_context_tokens=256,
                ),
                actor_id=f"e{number}",
                tokenizer_path=directory,
                make_policy=policy,
                queue=queue,
            )
        )
        reader = ray.remote(Reader).options(**there).remote()
        running += [actor, reader, actor.run.remote(), reader.run.remote(f"r{number}", board)]
    pids = {
        "queue": ray.get(queue.__ray_call__.remote(_pid)),
        "board": ray.get(board.__ray_call__.remote(_pid)),
        "feed": ray.get(feed.pid.remote()),
        **{name: _find(name) for name in ("gcs_server", "raylet")},
    }
    ray.get(feed.play.remote(queue, first_step=1, num_steps=2))  # warm up

    before, started = _counts(pids), time.monotonic()
    time.sleep(IDLE_S)
    idle = _per(before, _counts(pids), time.monotonic() - started)

    before = _counts(pids)
    num_rollouts = ray.get(feed.play.remote(queue, first_step=3, num_steps=num_steps))
    rollouts = _per(before, _counts(pids), num_rollouts)

    weights = [("w", torch.zeros(publish_mib << 18))]
    before, started = _counts(pids), time.monotonic()
    for version in range(1, num_publishes + 1):
        packed = pack_group(weights)
        group = replace(packed, buffer=ray.put(packed.buffer))
        ray.get(board.publish.remote(1, version, (group,)))
        ray.get(board.wait_published.remote(version, len(others), 120.0))
    publishes = _per(before, _counts(pids), num_publishes)
    return {
        "nodes": len(others),
        "idle_per_s": idle,
        "per_rollout": rollouts,
        "per_publish": {"mib": publish_mib, **publishes},
        "publish_s": round((time.monotonic() - started) / num_publishes, 3),
        **describe_environment("ray"),
    }


def _pid(_: object) -> int:
    return os.getpid()


def _find(name: str) -> int:
    """Return the pid of the process with a name, in the head's own namespace."""
    return next(int(each.pid) for each in psutil.process_iter() if each.name() == name)


def _counts(pids: dict[str, int]) -> Counts:
    found: Counts = {}
    for name, pid in pids.items():
        times = psutil.Process(pid).cpu_times()
        found[f"{name}_cpu_s"] = times.user + times.system
    traffic = psutil.net_io_counters(pernic=True)["eth0"]
    found |= {"bytes_in": traffic.bytes_recv, "bytes_out": traffic.bytes_sent}
    return found | {"packets": traffic.packets_recv + traffic.packets_sent}


def _per(before: Counts, after: Counts, count: float) -> Counts:
    return {name: float(f"{(after[name] - before[name]) / count:.3g}") for name in before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 12])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--publish-mib", type=int, default=16)
    parser.add_argument("--inside", action="store_true", help="used by itself, on the head")
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(measure(asked.steps, asked.publishes, asked.publish_mib)))
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from worlds.servers.nodes import network

    line = [sys.executable, "-m", "benchmarks.cluster_scale", "--inside", "--steps", asked.steps]
    line += ["--publishes", asked.publishes, "--publish-mib", asked.publish_mib]
    for count in asked.nodes:
        with tempfile.TemporaryDirectory() as directory, network(Path(directory)) as net:
            net.add(cpus=0)
            for _ in range(count):
                net.add(cpus=1, resources={"rayloom_environments": 1}, store_mib=96)
            net.start()
            inside = [*net.head.entrance, "env", f"--chdir={ROOT}", *map(str, line)]
            subprocess.run(inside, check=True, env={**os.environ, **net.head.environ})


if __name__ == "__main__":
    main()
