"""Tests that an episode keeps its turns and has one outcome whatever its environment does."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import pytest
from worlds.builders.episode_builders import (
    ASSIGNMENT,
    DONE,
    GO_ON,
    HELLO,
    SETTINGS,
    Behaviour,
    FakeEnvironment,
    FakePolicy,
    hang,
    play,
    raising,
    renderer,
    reply,
    returning,
    tokenizer,
)
from worlds.models.chatml import chatml_tokenizer

from actors.environment.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.rendering import ChatRenderer, Extension
from actors.environment.turn_loop import play_episode
from actors.types import Outcome, Task, TokenIds
from actors.user_code import num_abandoned

IMPATIENT = replace(SETTINGS, turn_deadline_s=0.5)


class Deals(FakeEnvironment):
    """An environment that removes the last card from the list of the task."""

    async def reset(self, task: Task) -> Observation:
        self.card = task.data["deck"].pop()
        return HELLO


async def test_each_member_of_a_group_has_its_own_copy_of_the_data() -> None:
    task = replace(ASSIGNMENT.task, data={"deck": [1, 2]})
    members = [Deals(DONE), Deals(DONE)]
    for member in members:
        await play(member, assignment=replace(ASSIGNMENT, task=task))
    assert [member.card for member in members] == [2, 2]
    assert task.data == {"deck": [1, 2]}


ECHO: dict[str, Any] = {"name": "echo", "description": "Say it.", "parameters": {}}


def with_tools(tools: Any) -> Behaviour:
    async def reset() -> Observation:
        return Observation(messages=HELLO.messages, tools=tools)

    return reset


def with_tool(**fields: Any) -> Behaviour:
    async def reset() -> Observation:
        return Observation(messages=HELLO.messages, tools=(ToolSchema(**{**ECHO, **fields}),))

    return reset


def with_schema(**schema: Any) -> Behaviour:
    return with_tool(parameters=schema)


@pytest.mark.parametrize(
    ("on_reset", "words"),
    [
        (
            with_tools(({"type": "function"},)),
            "tools: got a dict, expected ToolSchema",
        ),
        (with_tools(None), "observation: tools: got a NoneType"),
        (with_tool(name=["echo"]), "tool: name: got a list, expected text"),
        (with_tool(description="\ud800"), "tool echo: description: got a lone surrogate"),
        (with_tool(parameters=None), "tool echo: parameters: got a NoneType, expected a mapping"),
        (with_schema(default=b"x"), "tool echo: parameters: got a value that is not JSON"),
        (with_schema(required=5), "tool echo: parameters.required: got 5, expected a list"),
        (with_schema(required=None), "parameters.required: got None"),
        (with_schema(properties={1: {}}), "expected parameters.properties to have one JSON schema"),
        (with_schema(properties={"x": 1}), "expected parameters.properties to have one JSON"),
        (with_schema(properties=[]), "expected parameters.properties to have one JSON schema"),
        (with_schema(properties={"x": {"type": 5}}), "the type of x: got 5"),
    ],
)
async def test_invalid_tools_are_an_environment_error_and_the_environment_is_closed(
    on_reset: Behaviour, words: str
) -> None:
    # `play` checks that the environment was closed.
    trajectory = await play(FakeEnvironment(DONE, on_reset=on_reset))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert words in trajectory.detail


async def test_invalid_results_are_an_environment_error() -> None:
    async def odd(**fields: Any) -> StepResult:
        return StepResult(**fields)

    for fields, words in (
        ({"reward_components": None}, "reward_components: got a NoneType, expected a mapping"),
        ({"messages": None}, "messages: got a NoneType, expected a tuple of Message"),
    ):
        trajectory = await play(FakeEnvironment(partial(odd, **fields)))
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
        assert words in trajectory.detail


async def test_the_environment_is_closed_after_a_defect_of_the_turn_loop() -> None:
    class Defect(ChatRenderer):
        def decode(self, sampled: TokenIds) -> str:
            raise AssertionError("a defect")

    environment = FakeEnvironment(DONE)
    with pytest.raises(AssertionError, match="a defect"):
        await play(environment, chat=Defect(tokenizer()))
    assert environment.num_closed == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("broken"),
        asyncio.CancelledError(),
        SystemExit(3),
        KeyboardInterrupt(),
        StopAsyncIteration(),
        TimeoutError("its own"),
        RecursionError(),
    ],
)
async def test_any_exception_of_a_step_is_an_environment_error(error: BaseException) -> None:
    trajectory = await play(FakeEnvironment(GO_ON, raising(error)))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert len(trajectory.turns) == 2 and trajectory.turns[1].reward == 0.0


async def test_an_exception_without_a_printable_text_is_an_environment_error() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    trajectory = await play(FakeEnvironment(raising(Silent())))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert trajectory.detail == "step: Silent: its text cannot be read"
    halves = await play(FakeEnvironment(raising(ValueError("\ud800"))))
    assert halves.detail == "step: ValueError: ?"


@pytest.mark.parametrize("is_at_reset", [True, False])
async def test_a_lone_surrogate_in_a_message_is_an_environment_error(is_at_reset: bool) -> None:
    async def answer() -> object:
        kind = Observation if is_at_reset else StepResult
        return kind(messages=(Message(role=Role.USER, content="a\ud800"),))

    environment = FakeEnvironment(DONE, on_reset=answer) if is_at_reset else FakeEnvironment(answer)
    trajectory = await play(environment)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "lone surrogate '\\ud800' at character 1" in trajectory.detail


async def test_an_environment_cannot_exit_the_process() -> None:
    async def leave() -> StepResult:
        sys.exit(1)

    assert (await play(FakeEnvironment(leave))).outcome is Outcome.ENVIRONMENT_ERROR


@pytest.mark.parametrize("value", [None, 3, {"reward": 1.0}, HELLO])
async def test_a_step_that_returns_something_else_is_an_environment_error(value: object) -> None:
    trajectory = await play(FakeEnvironment(returning(value)))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR


async def test_messages_of_a_wrong_kind_are_an_environment_error() -> None:
    async def answer_with_a_dict() -> StepResult:
        return StepResult(messages=({"role": "user"},))  # type: ignore[arg-type]

    trajectory = await play(FakeEnvironment(answer_with_a_dict))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR


async def test_an_environment_that_changes_arguments_in_place_does_not_change_the_chat() -> None:
    class Converts(FakeEnvironment):
        async def step(self, action: Action) -> StepResult:
            [call] = action.calls
            assert isinstance(call, ToolCall) and isinstance(call.arguments, dict)
            given.append(call.arguments.pop("where").pop("city"))
            call.arguments["day"] = date.fromisoformat(call.arguments["day"])
            return await super().step(action)

    class Remembering(ChatRenderer):
        def extend(self, *args: Any, history: Sequence[Message], **fields: Any) -> Extension:
            replies.append(history[-1])
            return super().extend(*args, history=history, **fields)

    given: list[str] = []
    replies: list[Message] = []
    arguments = {"where": {"city": "Oslo"}, "day": "2026-11-30"}
    text = f'<tool_call>{{"name": "echo", "arguments": {json.dumps(arguments)}}}</tool_call>'
    environment = Converts(GO_ON, DONE, on_reset=with_tool())
    trajectory = await play(
        environment, FakePolicy(reply(f"{text}<|im_end|>")), chat=Remembering(tokenizer())
    )
    assert trajectory.outcome is Outcome.COMPLETED and given == ["Oslo", "Oslo"]
    assert [call.arguments for each in replies for call in each.tool_calls] == [arguments]


async def test_an_environment_whose_methods_are_not_async_is_an_environment_error() -> None:
    class Blocking(FakeEnvironment):
        def step(self, action: Action) -> StepResult:  # type: ignore[override]
            return DONE

    assert (await play(Blocking(DONE))).outcome is Outcome.ENVIRONMENT_ERROR


async def test_an_environment_without_the_methods_is_an_environment_error() -> None:
    class Bare:
        async def reset(self, task: Task) -> Observation:
            return HELLO

    trajectory = await play(Bare())  # type: ignore[arg-type]
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "'Bare' object has no attribute 'step'" in trajectory.detail


@pytest.mark.parametrize("on_reset", [returning(None), raising(OSError("no container"))])
async def test_a_reset_that_raises_or_returns_nothing_is_an_environment_error(
    on_reset: Behaviour,
) -> None:
    trajectory = await play(FakeEnvironment(DONE, on_reset=on_reset))
    assert (trajectory.outcome, trajectory.turns) == (Outcome.ENVIRONMENT_ERROR, ())


async def test_an_environment_that_cannot_be_made_is_an_environment_error() -> None:
    def fail() -> Environment:
        raise OSError("no more of them")

    trajectory = await play_episode(
        ASSIGNMENT,
        make_environment=fail,
        policy=FakePolicy(),
        renderer=renderer(),
        settings=SETTINGS,
        max_context_tokens=400,
    )
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR


async def test_a_hanging_reset_is_abandoned() -> None:
    trajectory = await play(FakeEnvironment(DONE, on_reset=hang), settings=IMPATIENT)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.WALL_TIMEOUT, ())


async def test_a_hanging_step_is_abandoned_and_its_turn_is_kept() -> None:
    trajectory = await play(FakeEnvironment(GO_ON, hang), settings=IMPATIENT)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.WALL_TIMEOUT, 2)


@pytest.mark.parametrize("on_close", [raising(OSError()), hang])
async def test_a_failing_close_does_not_change_the_outcome(on_close: Behaviour) -> None:
    trajectory = await play(FakeEnvironment(DONE, on_close=on_close))
    assert trajectory.outcome is Outcome.COMPLETED


async def test_an_environment_that_ignores_cancellation_is_abandoned() -> None:
    released = asyncio.Event()

    async def refuse_to_stop() -> StepResult:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return DONE

    before = num_abandoned()
    trajectory = await play(FakeEnvironment(refuse_to_stop), settings=IMPATIENT)
    assert trajectory.outcome is Outcome.WALL_TIMEOUT
    assert num_abandoned() == before + 1
    released.set()
    while num_abandoned() > before:
        await asyncio.sleep(0.01)


class Judge:
    """An environment without a score; scoring again fails num_failures times, then succeeds."""

    def __init__(self, *, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_asked = 0

    async def grade(self) -> StepResult:
        raise RewardError("judge away", rescore=self.grade_again)

    async def grade_again(self) -> StepResult:
        self.num_asked += 1
        if self.num_asked <= self.num_failures:
            raise RewardError("still away", rescore=self.grade_again)
        return DONE


async def test_a_missing_score_is_computed_again_without_repeating_the_action() -> None:
    judge = Judge(num_failures=1)
    environment = FakeEnvironment(judge.grade)
    trajectory = await play(environment)
    assert (trajectory.outcome, trajectory.episode_return) == (Outcome.COMPLETED, 1.0)
    assert (len(environment.actions), judge.num_asked) == (1, 2)


async def test_a_score_that_fails_twice_is_a_reward_error() -> None:
    judge = Judge(num_failures=99)
    trajectory = await play(FakeEnvironment(GO_ON, judge.grade))
    assert trajectory.outcome is Outcome.REWARD_ERROR
    assert (len(trajectory.turns), judge.num_asked) == (2, 2)


async def test_a_missing_score_without_a_second_attempt_is_a_reward_error() -> None:
    trajectory = await play(FakeEnvironment(raising(RewardError("gone"))))
    assert trajectory.outcome is Outcome.REWARD_ERROR


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "None"),
        ("1", "'1'"),
        (10**400, "an int"),
        ((1.0,), "a tuple"),
    ],
)
async def test_a_reward_that_is_not_a_finite_number_is_a_reward_error(
    reward: Any, shown: str
) -> None:
    whole = await play(FakeEnvironment(StepResult(reward=reward, terminated=True)))
    assert whole.outcome is Outcome.REWARD_ERROR
    assert whole.detail == f"reward: got {shown}, expected a finite number"
    parts = StepResult(reward=1.0, reward_components={"x": reward}, terminated=True)
    part = await play(FakeEnvironment(parts))
    assert part.outcome is Outcome.REWARD_ERROR
    assert part.detail == f"reward component x: got {shown}, expected a finite number"


@pytest.mark.parametrize("name", ["terminated", "truncated", "is_malformed", "ended_by_malformed"])
def test_a_flag_that_is_not_a_boolean_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: got a str, expected True or False"):
        StepResult(**{name: "no"})
    assert StepResult(terminated=np.bool_(True)).terminated  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_second_name_that_the_template_hides_is_an_environment_error(method: str) -> None:
    ada, bob = (Message(role=Role.USER, content="guess", name=name) for name in ("Ada", "Bob"))
    begun = Observation(messages=(ada, bob) if method == "reset" else (ada,))
    environment = FakeEnvironment(StepResult(messages=(bob,)), DONE, on_reset=returning(begun))
    trajectory = await play(environment)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert trajectory.detail.startswith(f"{method}: RenderError: got the names 'Ada' and 'Bob' of")


_REFUSES = "{% if loop.index0 %}{{ raise_exception('system must be first') }}{% endif %}"


@pytest.mark.parametrize(
    ("system", "problem"),
    [(None, ""), (_REFUSES, "system must be first"), (" ", "it does not show .* system")],
)
async def test_the_template_decides_about_a_system_message_of_step(
    system: str | None, problem: str
) -> None:
    model = chatml_tokenizer()
    if system is not None:
        model.chat_template = (
            f"{{% for m in messages %}}{{% if m.role == 'system' %}}{system}{{% else %}}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    hint = Message(role=Role.SYSTEM, content="Be brief.")
    policy = FakePolicy()
    trajectory = await play(
        FakeEnvironment(StepResult(messages=(hint, *GO_ON.messages)), DONE),
        policy,
        chat=ChatRenderer(model),
    )
    if not problem:
        assert trajectory.outcome is Outcome.COMPLETED
        assert "Be brief." in renderer().decode(policy.requests[-1].prompt_token_ids)
    else:
        assert trajectory.outcome is Outcome.AGENT_ERROR
        assert re.search(problem, trajectory.detail)


@pytest.mark.parametrize("names", [("Ada", None), (None, "Ada"), ("Ada", "Ada")])
async def test_one_name_of_a_user_is_no_error_if_other_messages_have_none(
    names: tuple[str | None, str | None],
) -> None:
    first, second = (Message(role=Role.USER, content="guess", name=name) for name in names)
    begun = Observation(messages=(first,))
    environment = FakeEnvironment(StepResult(messages=(second,)), DONE, on_reset=returning(begun))
    assert (await play(environment)).outcome is Outcome.COMPLETED


async def test_an_environment_gets_an_integer_and_the_chat_keeps_what_the_policy_wrote() -> None:
    properties = {"n": {"type": "integer"}}
    environment = FakeEnvironment(GO_ON, DONE, on_reset=with_schema(properties=properties))
    wrote = '<tool_call>{"name": "echo", "arguments": {"n": 5.0}}</tool_call><|im_end|>'
    seen: list[Message] = []

    class Watched(ChatRenderer):
        def extend(self, *arguments: Any, history: Sequence[Message], **others: Any) -> Extension:
            seen.extend(history)
            return super().extend(*arguments, history=history, **others)

    chat = Watched(tokenizer(), history="as_rendered")
    policy = FakePolicy(reply(wrote), reply())
    trajectory = await play(
        environment, policy, settings=replace(SETTINGS, max_tokens_per_turn=200), chat=chat
    )
    assert trajectory.outcome is Outcome.COMPLETED
    [call] = environment.actions[0].calls
    assert isinstance(call, ToolCall) and json.dumps(call.arguments) == '{"n": 5}'
    assert json.dumps(seen[-1].tool_calls[0].arguments) == '{"n": 5.0}'
