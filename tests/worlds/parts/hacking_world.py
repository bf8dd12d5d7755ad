"""A run of a scripted policy: real episodes, the queue's state machine, the merge and its journal.

The engine's samples and the trainer's updates are scripted; everything between them is the
product's own code.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyUnavailable
from actors.environment.settings import RolloutSettings
from actors.environment.turn_loop import play_episode
from actors.journal.files import JournalStep
from actors.merge.groups import classify_groups, read_groups
from actors.merge.journal import journal_step
from actors.merge.step import build_step
from actors.trajectory_queue.actor import _step_input
from actors.trajectory_queue.codec import TrajectoryBlock, encode
from actors.trajectory_queue.groups import BlockRow, GroupRequest
from actors.trajectory_queue.messages import OpenSlot
from actors.trajectory_queue.state import QueueState
from actors.types import FinishReason, RolloutAssignment, Task, Trajectory, VersionSpan, summarize
from service.hacking.features import StepFeatures, step_features
from worlds.builders.episode_builders import parsed_reply, renderer, tokenizer
from worlds.builders.journal_builders import through_a_file
from worlds.builders.settings import queue_settings, step_settings
from worlds.faults.planted_hacks import Planted, State

END = "<|im_end|>"
SETTINGS = RolloutSettings(max_turns=8, max_tokens_per_turn=1500, temperature=1.0)
MAX_CONTEXT = 4096
NUM_VERIFIED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_steps: int = 60
    groups_per_step: int = 8
    group_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The development of a policy over a run."""

    onset: int | None
    """The first step in which the hack is played; None: the policy never finds it."""
    ramp: int
    """Steps until the hack is played nearly always."""
    skill: tuple[float, float]
    form: tuple[float, float]
    """The values at the start and at the end; also of `skill` and `length`."""
    length: tuple[float, float]
    middle: float
    """The step at which half is learned."""
    pace: float
    """In steps; the larger, the slower the policy learns."""
    failure_rate: float
    """The share of an engine's calls that fail outside the burst."""
    burst: range
    """Steps in which an engine fails half the time."""

    @classmethod
    def of(cls, seed: int, *, num_steps: int, has_hack: bool) -> Course:
        rng = random.Random(seed)
        words = rng.uniform(4, 16)
        begin = rng.randrange(num_steps)
        return cls(
            onset=rng.randint(num_steps // 3, num_steps // 2) if has_hack else None,
            ramp=rng.randint(6, 12),
            skill=(rng.uniform(0.05, 0.4), rng.uniform(0.5, 0.95)),
            form=(rng.uniform(0.3, 0.8), rng.uniform(0.9, 1.0)),
            length=(words, words * rng.uniform(0.7, 1.5)),
            middle=rng.uniform(0.2, 0.8) * num_steps,
            pace=rng.uniform(2, 12),
            failure_rate=rng.choice([0.0, 0.02]),
            burst=range(begin, begin + 5) if rng.random() < 0.3 else range(0),
        )

    def state(self, step: int) -> State:
        learned = 1 / (1 + math.exp((self.middle - step) / self.pace))

        def at(ends: tuple[float, float]) -> float:
            return ends[0] + learned * (ends[1] - ends[0])

        return State(skill=at(self.skill), form=at(self.form), length=at(self.length))

    def hack_share(self, step: int) -> float:
        if self.onset is None or step < self.onset:
            return 0.0
        return min(0.95, (step - self.onset + 1) / self.ramp)

    def fails(self, step: int) -> float:
        return 0.5 if step in self.burst else self.failure_rate


class ScriptedPolicy:
    """The policy of one attempt of one rollout."""

    def __init__(self, planted: Planted, course: Course, *, seed: str, step: int) -> None:
        rng = random.Random(seed)
        self.script = planted.hack if rng.random() < course.hack_share(step) else planted.honest
        self.state, self.rng = course.state(step), rng
        self.failure = course.fails(step)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self.rng.random() < self.failure:
            raise PolicyUnavailable("the engine is away")
        chat = tokenizer().decode(request.prompt_token_ids.tolist())
        text = self.script(chat, self.state, self.rng)
        ids = np.array(tokenizer().encode(text + END), dtype=np.int32)
        return GenerateReply(
            token_ids=ids,
            logprobs=np.full(ids.shape, -0.5, dtype=np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            cache_salt="v",
            parsed=None if request.tools is None else parsed_reply(text, request.tools),
        )


class ScriptedRun:
    """A run of a scripted policy that is played step by step."""

    def __init__(self, planted: Planted, course: Course, *, seed: int, size: Size) -> None:
        self.planted, self.course, self.seed, self.size = planted, course, seed, size
        self.tasks: dict[str, Task] = {}
        self._rng = random.Random(f"tasks {seed}")
        self._blocks: dict[int, TrajectoryBlock] = {}
        """The contents of the object store for the current step."""
        self._num_blocks = 0
        named = {
            "groups_per_step": size.groups_per_step,
            "group_size": size.group_size,
            "max_lag": 0,
            "min_group_size": 2,
        }
        self.queue_settings = queue_settings(**named)
        self._queue = QueueState(self.queue_settings)
        # Every token has version 0, and its age must not matter here.
        self.merge_settings = step_settings(
            **{**named, "max_lag": 10_000}, max_context_tokens=MAX_CONTEXT
        )

    def steps(self) -> Iterator[JournalStep]:
        # Not asyncio.run, which formats each result as text when it looks for a signal handler.
        loop = asyncio.new_event_loop()
        try:
            for step in range(1, self.size.num_steps + 1):
                yield loop.run_until_complete(self._step(step))
        finally:
            loop.close()

    async def _step(self, step: int) -> JournalStep:
        queue = self._queue
        while (taken := queue.take_step()) is None:
            queue.admit(self.requests(queue.admissible()))
            assignments = queue.take_rollouts(
                "player", max_count=10_000, environments=self._environments
            )
            played = await asyncio.gather(*(self.play(each, step) for each in assignments))
            block, reference = encode(played), self._num_blocks
            self._blocks[reference], self._num_blocks = block, reference + 1
            for row, trajectory in enumerate(played):
                size = block.row_num_bytes(row)
                payload = BlockRow(block=reference, row=row, num_bytes=size, arrived_at=0.0)
                queue.put("player", summarize(trajectory, num_bytes=size), payload)
        number, groups = taken
        step_input = _step_input(number, groups)
        blocks = [self._blocks[reference] for reference in step_input.blocks]
        classified = classify_groups(read_groups(step_input, blocks), self.merge_settings)
        result = build_step(
            classified, self.merge_settings, step=number, trainer_version=number - 1
        )
        queue.finalise(number, result.outcomes)
        queue.set_loaded_version(number)
        queue.drain()
        self._blocks.clear()
        written = journal_step(result, term=1, max_policy_age=10_000, group_rule=None)
        return through_a_file(written)

    def requests(self, slots: Sequence[OpenSlot]) -> list[GroupRequest]:
        """Request a group with a new task for each open slot."""
        requests = []
        for slot in slots:
            task = self.planted.make_task(len(self.tasks), self._rng)
            self.tasks[task.task_id] = task
            size = self.size.group_size
            requests.append(
                GroupRequest(group_number=slot.group_number, task=task, num_samples=size)
            )
        return requests

    @property
    def _environments(self) -> set[str]:
        return {task.environment for task in self.tasks.values()}

    async def play(self, assignment: RolloutAssignment, step: int) -> Trajectory:
        # A rollout that is played again is played in the same way.
        seed = f"{self.seed} {assignment.rollout_id}"
        return await play_episode(
            assignment,
            make_environment=self.planted.make_environment,
            policy=ScriptedPolicy(self.planted, self.course, seed=seed, step=step),
            renderer=renderer(),
            settings=SETTINGS,
            max_context_tokens=MAX_CONTEXT,
        )

    def features(self, step: JournalStep) -> tuple[StepFeatures, ...]:
        """Return a step's features, with the shadow verifier's verdicts on some trajectories."""
        found = step_features(step)
        verify = self.planted.verify
        if verify is None:
            return found
        verdicts = {
            each.trajectory_id: verify(self.tasks[each.task_id], _last_reply(each))
            for each in (entry.trajectory for entry in step.entries[:NUM_VERIFIED])
        }
        return tuple(each.with_verified(verdicts) for each in found)


def _last_reply(trajectory: Trajectory) -> str:
    sample, turn = trajectory.samples[-1], trajectory.turns[-1]
    return renderer().decode(sample.token_ids[turn.tokens])


def played(
    planted: Planted, *, seed: int, has_hack: bool, size: Size | None = None
) -> tuple[Course, list[tuple[StepFeatures, ...]]]:
    """Play a run whose course depends on the seed; return the course and each step's features."""
    size = size or Size()
    course = Course.of(seed, num_steps=size.num_steps, has_hack=has_hack)
    run = ScriptedRun(planted, course, seed=seed, size=size)
    return course, [run.features(step) for step in run.steps()]
