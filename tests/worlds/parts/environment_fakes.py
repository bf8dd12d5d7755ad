"""Fakes for the environment actor's tests, with few imports, because Ray's workers import them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import numpy as np

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyUnavailable
from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.trajectory_queue.codec import TrajectoryBlock, decode
from actors.types import (
    FinishReason,
    RolloutAssignment,
    Task,
    Trajectory,
    TrajectorySummary,
    VersionSpan,
)


class GuessFour:
    """A policy that answers every request with "4", whose tokens are `ids`, after a delay."""

    def __init__(self, ids: list[int], *, delay_s: float) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        self.delay_s = delay_s

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.temperature == 0.25:
            raise PolicyUnavailable("asked to fail")
        await asyncio.sleep(self.delay_s)
        return GenerateReply(
            token_ids=self.ids,
            logprobs=np.full(self.ids.shape, -0.5, dtype=np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=len(self.ids)),),
            cache_salt="v0",
        )


class Endless:
    """A user's own environment, named by its path, whose step never returns."""

    def __init__(self, *, word: str) -> None:
        self.word = word

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message(role=Role.USER, content=self.word),))

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(3600)
        return StepResult()

    async def close(self) -> None:
        return None


class SometimesHanging:
    """An environment of one turn that hangs in `reset` while the file `hangs` exists."""

    def __init__(self, *, hangs: str) -> None:
        self.hangs = Path(hangs)

    async def reset(self, task: Task) -> Observation:
        if self.hangs.exists():
            await asyncio.sleep(3600)
        return Observation(messages=(Message(role=Role.USER, content="Say one number."),))

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(len(action.text) % 2), terminated=True)

    async def close(self) -> None:
        return None


class FakeQueue:
    """A queue that hands out the given rollouts and keeps the trajectories that come back."""

    def __init__(self, assignments: list[RolloutAssignment], *, num_failing_puts: int = 0) -> None:
        self.waiting = assignments
        self.num_failing_puts = num_failing_puts
        self.ended: list[tuple[TrajectorySummary, Trajectory]] = []
        self.block_sizes: list[int] = []
        self.max_held = 0
        self.num_held = 0
        self.num_asked = 0

    async def take_rollouts(
        self, actor_id: str, max_count: int, timeout_s: float, environments: Collection[str]
    ) -> list[RolloutAssignment]:
        self.num_asked += 1
        if not self.waiting:
            await asyncio.sleep(timeout_s)
        taken, self.waiting = self.waiting[:max_count], self.waiting[max_count:]
        self.num_held += len(taken)
        self.max_held = max(self.max_held, self.num_held)
        return taken

    async def put(
        self, actor_id: str, block: TrajectoryBlock, summaries: list[TrajectorySummary]
    ) -> list[bool]:
        if self.num_failing_puts > 0:
            self.num_failing_puts -= 1
            raise ConnectionError("try again")
        self.num_held -= len(summaries)
        self.block_sizes.append(block.num_rows)
        self.ended += [(summary, decode(block, i)) for i, summary in enumerate(summaries)]
        return [summary.task_id != "unwanted" for summary in summaries]

    async def report(self) -> tuple[list[tuple[TrajectorySummary, Trajectory]], list[int], int]:
        return self.ended, self.block_sizes, self.max_held

    async def asked(self) -> int:
        """Return how often rollouts were requested.

        From the second request on, the rollouts of the first one are being played.
        """
        return self.num_asked
