"""A Ray actor that takes rollouts from a real queue and hands in trajectories."""

from __future__ import annotations

import os
from typing import Any

import ray

from actors.trajectory_queue.codec import encode
from actors.types import RolloutAssignment, Trajectory, summarize
from worlds.builders.queue_builders import GAME
from worlds.builders.trajectory_builders import linear_turns, make_trajectory


def play(assignment: RolloutAssignment, *, sampled: int) -> Trajectory:
    member = int(assignment.rollout_id[-1])
    turns = linear_turns(2, sampled=sampled, reward=float(member % 2), seed=member)
    return make_trajectory(
        turns, rollout_id=assignment.rollout_id, attempt=assignment.attempt, best_return=1.0
    )


@ray.remote(num_cpus=0)
class Player:
    """An actor that takes rollouts and returns trajectories, in one block for each `hand_in`."""

    def __init__(self, queue: Any, actor_id: str) -> None:
        self.queue, self.actor_id = queue, actor_id
        self.held: list[RolloutAssignment] = []

    def pid(self) -> int:
        return os.getpid()

    async def take(self, count: int, timeout_s: float) -> list[str]:
        taken = await self.queue.take_rollouts.remote(self.actor_id, count, timeout_s, GAME)
        self.held += taken
        return [assignment.trajectory_id for assignment in taken]

    def own_a_block(self) -> list[Any]:
        return [ray.put(encode([make_trajectory(linear_turns(2))] * 4))]

    async def hand_in(self, count: int, sampled: int) -> list[bool]:
        played, self.held = self.held[:count], self.held[count:]
        trajectories = [play(assignment, sampled=sampled) for assignment in played]
        block = encode(trajectories)
        summaries = [
            summarize(each, num_bytes=block.row_num_bytes(row))
            for row, each in enumerate(trajectories)
        ]
        taken: list[bool] = await self.queue.put.remote(self.actor_id, block, summaries)
        return taken
