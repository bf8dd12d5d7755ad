"""A game whose returns are a script: a function of the task and of the group's member alone.

Whatever the policy answers and whatever happens to the run, a group whose members were all played
to their end has the same returns, and so the same advantages, in every run. The chaos runs lay a
copy of this file into their working directory, as a user's own game.
"""

from __future__ import annotations

from actors.environment.protocol import Action, Message, Observation, Role, StepResult, rollout_id
from actors.environment.tasks import derived_seed
from actors.types import Task

NUM_TURNS = 2
NUM_RETURNS = 8


def scripted_return(task_id: str, member: int) -> float:
    """0, 1/8, ..., 7/8."""
    return derived_seed(task_id, member) % NUM_RETURNS / NUM_RETURNS


def member_of(rollout: str) -> int:
    """Its place in the group, which ends its id: `g000012.0-3`; 0 in the trial before the start."""
    return int(rollout.rpartition("-")[2] or 0)


class ScriptedGame:
    """Two turns, the return with the last one."""

    def __init__(self) -> None:
        self._turns_left = NUM_TURNS
        self._return = 0.0

    async def reset(self, task: Task) -> Observation:
        self._return = scripted_return(task.task_id, member_of(rollout_id.get()))
        return Observation(messages=(_say("Say one number from 1 to 7."),))

    async def step(self, action: Action) -> StepResult:
        self._turns_left -= 1
        if self._turns_left > 0:
            return StepResult(messages=(_say("higher"),), reward=0.0)
        return StepResult(messages=(), reward=self._return, terminated=True)

    async def close(self) -> None:
        return None


def _say(text: str) -> Message:
    return Message(role=Role.USER, content=text)
