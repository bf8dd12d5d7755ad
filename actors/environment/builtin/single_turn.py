"""One prompt out of the data, one answer, and a user's functions that score it.

A task's data are the columns of its row: `prompt`, a text or the messages of a chat, and whatever
the functions want. The reward is the weighted sum of what they give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from actors.environment.judge import JudgeReward, load_judges
from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
    ToolCall,
)
from actors.environment.reward_functions import (
    BadRewardFunction,
    RewardFunction,
    Score,
    load_functions,
    load_group_functions,
)
from actors.environment.task_data import PROMPT_DATA
from actors.environment.text_patterns import last_of, problem_of
from actors.environment.tool_calls import visible_text
from actors.environment.trainer_arguments import mean_metrics
from actors.environment.user_code import CallTimedOut, describe, root_cause
from actors.environment.workers import WorkerLost
from actors.types import Task

SINGLE_TURN = "single_turn"
"""Its registered name."""


class SingleTurnEnvironment:
    """One task's prompt and answer."""

    data_schema = PROMPT_DATA

    def __init__(
        self,
        reward: str | Sequence[str] | Mapping[str, float] = (),
        system: str | None = None,
        judges: Mapping[str, Any] | None = None,
        answer_pattern: str | None = None,
        group_reward: str | Sequence[str] | Mapping[str, float] = (),
    ) -> None:
        """reward: as `load_functions`. system: a message before every prompt; None: none. judges:
        by name, as `load_judges`. answer_pattern: a regular expression with one group, what of the
        text is the answer that majority votes count; None: all of it. group_reward: as
        `load_group_functions`; reward, judges or it is needed.

        Raises: BadRewardFunction, BadJudge; ValueError for the pattern.
        """
        if answer_pattern is not None and (problem := problem_of(answer_pattern)) is not None:
            raise ValueError(f"answer_pattern: {problem}; correct it")
        self._group_functions = load_group_functions(group_reward) if group_reward else ()
        is_scored = bool(self._group_functions) or self._has_reward(judges)
        functions = load_functions(reward) if reward or not is_scored else ()
        self._functions: tuple[RewardFunction | JudgeReward, ...] = (
            *functions,
            *load_judges(judges or {}),
        )
        names = [each.name for each in (*self._functions, *self._group_functions)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadRewardFunction(
                f"group_reward: {', '.join(twice)} is the name of two functions, expected names "
                "that tell their numbers apart; rename one"
            )
        self._system = system
        self._answer_pattern = answer_pattern
        self._columns: Mapping[str, Any] = {}

    def _has_reward(self, judges: Mapping[str, Any] | None) -> bool:
        """Whether something other than a reward function scores the answer."""
        return bool(judges)

    async def reset(self, task: Task) -> Observation:
        self.check_data(task.data)
        self._columns = task.data
        return Observation(messages=tuple(self.first_messages(task.data)))

    def _check_group(self, columns: Mapping[str, Any]) -> None:
        """Raises: ValueError where the data have not what a group function needs."""
        for function in self._group_functions:
            function.check(columns, extras=frozenset(f"{name}s" for name in columns))

    def first_messages(self, data: Mapping[str, Any]) -> Sequence[Message]:
        """Of a task with these data, without beginning it."""
        prompt = data["prompt"]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = [] if self._system is None else [Message(role=Role.SYSTEM, content=self._system)]
        return _with_one_system([*system, *map(chat_message, chat)])

    async def step(self, action: Action) -> StepResult:
        """Raises: RewardError."""
        try:
            return await self._scored(action.text)
        except RewardError as error:
            # A call that was ended at its limit would take as long again.
            is_final = isinstance(error.__cause__, CallTimedOut)
            rescore = None if is_final else partial(self._scored, action.text)
            raise RewardError(str(error), rescore=rescore) from error

    @property
    def functions(self) -> tuple[RewardFunction | JudgeReward, ...]:
        """What scores the answer to the task that has begun."""
        return (*self._functions, *self._group_functions)

    async def score_by(self, function: RewardFunction | JudgeReward, completion: str) -> Score:
        """Score an answer to the task that has begun by one of its functions.

        A group function gets a group of two such answers.
        Raises: RewardError, and whatever the function raises.
        """
        if isinstance(function, RewardFunction) and function in self._group_functions:
            return (await function.score_group([completion, completion], self._columns))[0]
        messages = [{"role": Role.ASSISTANT.value, "content": completion}]
        extras = {
            name: messages if name == "messages" else value
            for name, value in self._extras().items()
        }
        return await function.score(completion, self._columns, extras=extras)

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Raises: ValueError if the functions, or the prompt, cannot do with a task's data."""
        for function in self._functions:
            function.check(data)
        self._check_group(data)
        if has_calls(data["prompt"]):
            self.first_messages(data)

    def _extras(self) -> Mapping[str, Any]:
        """What reward functions get beside the columns."""
        return {}

    async def _scored(self, completion: str) -> StepResult:
        """Raises: RewardError."""
        scores: _Scores = {}
        for function in self._functions:
            with _as_missing_score(function):
                scores[function] = await function.score(
                    completion, self._columns, extras=self._extras()
                )
        if scores and all(score.value is None for score in scores.values()):
            raise RewardError("none of the reward functions gave a number for this answer")
        return replace(
            self._result(scores),
            terminated=True,
            answer=self._answer_in(visible_text(completion)),
        )

    async def score_group(self, task: Task, completions: Sequence[str]) -> list[StepResult]:
        """Score the answers of a group together; the environment need not have begun the task.

        Returns: for each what the group functions add to the reward of its last turn.
        Raises: RewardError.
        """
        scores: list[_Scores] = [{} for _ in completions]
        for function in self._group_functions:
            with _as_missing_score(function):
                found = await function.score_group(completions, task.data)
            for own, score in zip(scores, found, strict=True):
                own[function] = score
        for own in scores:
            if not self._functions and all(score.value is None for score in own.values()):
                raise RewardError("none of the group functions gave a number for an answer")
        return [self._result(own) for own in scores]

    def _result(self, scores: _Scores) -> StepResult:
        known = {function: score.value or 0.0 for function, score in scores.items()}
        return StepResult(
            reward=sum(function.weight * value for function, value in known.items()),
            reward_components=self._components(scores),
            metrics=mean_metrics(score.metrics for score in scores.values()),
            extra_columns={
                column: text for score in scores.values() for column, text in score.extras.items()
            },
        )

    def _answer_in(self, text: str) -> str | None:
        """None: nothing of it is an answer. Raises: RewardError."""
        if self._answer_pattern is None:
            return text
        return last_of(self._answer_pattern, text, what="answer_pattern")

    def _components(self, scores: _Scores) -> dict[str, float]:
        """An only function's parts as they are; of several each one's value, and its parts."""
        known = {
            function: score.value for function, score in scores.items() if score.value is not None
        }
        if len(self._functions) + len(self._group_functions) == 1:
            return {name: part for each in known for name, part in scores[each].parts.items()}
        found = {function.name: value for function, value in known.items()}
        for function in known:
            parts = scores[function].parts
            found |= {f"{function.name}.{name}": value for name, value in parts.items()}
        return found

    async def close(self) -> None: ...


_Scores = dict[RewardFunction | JudgeReward, Score]


@contextmanager
def _as_missing_score(function: RewardFunction | JudgeReward) -> Iterator[None]:
    """Raise what a user's function raises as a RewardError: the score is missing, not the answer.

    Any type of exception can come.
    """
    try:
        yield
    except (RewardError, WorkerLost):
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"{function.name} raised {describe(root_cause(error))}") from error


def has_calls(prompt: str | Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt has a history with calls, which may not be readable."""
    return not isinstance(prompt, str) and any(
        "tool_calls" in each or "function_call" in each for each in prompt
    )


def chat_message(row: Mapping[str, Any]) -> Message:
    """Return a message of a data set's chat in OpenAI's form, with its calls and names.

    The role `developer` becomes `system`; parts of text are joined.
    Raises: ValueError for a call that cannot be read.
    """
    if row.get("function_call"):
        raise ValueError(
            "prompt: a message has function_call, OpenAI's earlier form of a call, which is not "
            "read; write it as tool_calls"
        )
    role = Role.SYSTEM if row["role"] == "developer" else Role(row["role"])
    content = row.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    calls = row.get("tool_calls") or ()
    if calls and role is not Role.ASSISTANT:
        raise ValueError(
            f"prompt: a message of role {row['role']} has tool_calls, expected them on role "
            "assistant alone; correct the data"
        )
    reasoning = row.get("reasoning_content") or row.get("reasoning")
    is_tool = role is Role.TOOL
    return Message(
        role=role,
        content=content,
        name=row.get("name") or None,
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=row.get("tool_call_id") if is_tool else None,
        reasoning=reasoning if role is Role.ASSISTANT else None,
    )


def _call(row: Mapping[str, Any]) -> ToolCall:
    function = row.get("function", row)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"prompt: the arguments of a call of {function['name']} are no JSON object, expected "
            "an object, or its JSON text; correct the data"
        )
    return ToolCall(name=function["name"], arguments=dict(arguments), id=row.get("id") or "")


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return a chat with its first system messages merged: many templates take only one."""
    first = list(takewhile(lambda each: each.role is Role.SYSTEM, messages))
    if len(first) < 2:
        return list(messages)
    merged = Message(role=Role.SYSTEM, content="\n\n".join(each.content for each in first))
    return [merged, *messages[len(first) :]]
