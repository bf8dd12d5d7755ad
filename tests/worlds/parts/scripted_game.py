"""A game whose returns are scripted: they depend only on the task and on the group's member.

Whatever the policy answers and whatever happens to the run, a group whose members were all played
to their end has the same returns, and so the same advantages, in every run. The chaos runs copy
this file into their working directory, as a user's own game.
"""

from __future__ import annotations

from actors.environment.protocol import Action, Message, Observation, Role, StepResult, rollout_id
from actors.environment.tasks import derived_seed
from actors.types import Task

NUM_TURNS = 2
NUM_RETURNS = 8


def scripted_return(task_id: str, member: int) -> float:
    """Return one of 0, 1/8, ..., 7/8."""
    return derived_seed(task_id, member) % NUM_RETURNS / NUM_RETURNS


def member_of(rollout: str) -> int:
    """Return a rollout's place in its group, which is the end of its id: 3 for `g000012.0-3`.

    In the trial before the start it is 0.
    """
    return int(rollout.rpartition("-")[2] or 0)


class ScriptedGame:
    """A game of two turns, which gives the return in the last one."""

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
