"""Parts of one episode for tests: an assignment, a fake policy, a fake environment, and `play`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    ParsedCall,
    ParsedReply,
    PolicyClient,
)
from actors.environment.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
    rollout_id,
)
from actors.environment.rendering import ChatRenderer
from actors.environment.settings import RolloutSettings
from actors.environment.tool_calls import parse_tool_calls
from actors.environment.turn_loop import play_episode
from actors.types import FinishReason, RolloutAssignment, Task, Trajectory, VersionSpan
from worlds.models.chatml import chatml_tokenizer

ASSIGNMENT = RolloutAssignment(
    rollout_id="r1",
    group_id="g1",
    group_number=4,
    attempt=1,
    task=Task(task_id="t1", environment="any", seed=5),
)
SETTINGS = RolloutSettings(
    max_turns=4,
    max_tokens_per_turn=16,
    temperature=1.0,
    turn_deadline_s=5.0,
    episode_deadline_s=10.0,
)
HELLO = Observation(messages=(Message(role=Role.USER, content="hi"),), best_return=2.0)
GO_ON = StepResult(messages=(Message(role=Role.USER, content="lower"),), reward=0.25)
DONE = StepResult(reward=1.0, reward_components={"hit": 1.0}, terminated=True)

# A function that a fake environment calls for its answer. Its type is Any, because some tests
# return a wrong answer.
Behaviour = Callable[[], Awaitable[Any]]

tokenizer = cache(chatml_tokenizer)


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(tokenizer())


def reply(text: str = "4<|im_end|>", **changes: Any) -> GenerateReply:
    """Return a valid reply of the policy with the tokens of a text; changes may make it invalid."""
    ids = np.array(tokenizer().encode(text), dtype=np.int32)
    sound = GenerateReply(
        token_ids=ids,
        logprobs=np.full(ids.shape, -0.5, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=3, start=0, end=len(ids)),) if len(ids) else (),
        cache_salt="v3",
    )
    return replace(sound, **changes)


def parsed_reply(text: str, tools: tuple[ToolSchema, ...]) -> ParsedReply:
    """Parse a text as an engine's tool parser does, without vLLM."""
    return ParsedReply(
        content=text,
        calls=tuple(
            ParsedCall(name=call.name, arguments=json.dumps(call.arguments), id=f"call-{number}")
            if isinstance(call, ToolCall)
            else call
            for number, call in enumerate(parse_tool_calls(text, tools))
        ),
    )


class FakePolicy:
    """A policy that gives the listed replies in order, and repeats the last one; it raises errors.

    It parses its replies, as an engine does, if the request declares tools.
    """

    def __init__(self, *replies: GenerateReply | Exception, delay_s: float = 0.0) -> None:
        self.replies = list(replies or [reply()])
        self.delay_s = delay_s
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        answer = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(answer, Exception):
            raise answer
        if request.tools is None:
            return answer
        text = renderer().decode(answer.token_ids)
        return replace(answer, parsed=parsed_reply(text, request.tools))


class FakeEnvironment:
    """An environment that returns the listed results in order, and repeats the last one.

    A `Behaviour` among the results is called and awaited.
    """

    def __init__(
        self,
        *results: StepResult | Behaviour,
        on_reset: Behaviour | None = None,
        on_close: Behaviour | None = None,
    ) -> None:
        self.results = list(results)
        self.on_reset = on_reset
        self.on_close = on_close
        self.actions: list[Action] = []
        self.num_closed = 0
        self.rollout_id = ""

    async def reset(self, task: Task) -> Observation:
        self.rollout_id = rollout_id.get()
        return HELLO if self.on_reset is None else await self.on_reset()

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        return result if isinstance(result, StepResult) else await result()

    async def close(self) -> None:
        self.num_closed += 1
        if self.on_close is not None:
            await self.on_close()


async def hang() -> Any:
    await asyncio.sleep(3600)
    raise AssertionError("the test waited an hour for a hanging call")


def raising(error: BaseException) -> Behaviour:
    async def fail() -> Any:
        raise error

    return fail


def returning(value: object) -> Behaviour:
    async def answer() -> Any:
        return value

    return answer


async def play(
    environment: Environment,
    policy: PolicyClient | None = None,
    *,
    settings: RolloutSettings = SETTINGS,
    max_context_tokens: int = 400,
    keeps_last_observation: bool = False,
    chat: ChatRenderer | None = None,
    assignment: RolloutAssignment = ASSIGNMENT,
) -> Trajectory:
    """Play the assignment, and check that a fake environment was closed once."""
    trajectory = await play_episode(
        assignment,
        make_environment=lambda: environment,
        policy=policy or FakePolicy(),
        renderer=chat or renderer(),
        settings=settings,
        max_context_tokens=max_context_tokens,
        keeps_last_observation=keeps_last_observation,
    )
    if isinstance(environment, FakeEnvironment):
        assert environment.num_closed == 1
    return trajectory
