"""One prompt from the data, one answer, and a user's functions that score it.

A task's data are the columns of its row: `prompt`, a text or the messages of a chat, and the
columns that the functions need. The reward is the weighted sum of their scores.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from actors.environment.fork_server import WorkerLost
from actors.environment.judge import Judge, shared_judge
from actors.environment.judge_options import JudgeOptions
from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
    ToolCall,
    text_of_content,
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
from actors.limits import STRICT
from actors.options import Weighted
from actors.types import Task
from actors.user_code import CallTimedOut, describe, root_cause

SINGLE_TURN = "single_turn"
"""Registered name of this environment."""
_NULLABLE = re.compile(r"\b(None|Optional|Any|object)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnOptions:
    """Options of `single_turn`: the system message, and the functions and judges that score."""

    __pydantic_config__ = STRICT

    reward: Weighted = field(default_factory=dict)
    """Reward functions: a name as FILE.py:NAME, several names, or each name with its weight."""
    system: str | None = None
    """Text of a system message before every prompt; null: no such message."""
    judges: Mapping[str, JudgeOptions] | None = None
    """Models that judge answers: the options of each, by the name of the judge."""
    answer_pattern: str | None = None
    """Regular expression with one group, which matches the answer in the text. A majority vote
    counts the matched answers. null: the whole text is the answer."""
    group_reward: Weighted = field(default_factory=dict)
    """Functions that score the answers of a group together; written in the same form as reward."""

    def __post_init__(self) -> None:
        pattern = self.answer_pattern
        if pattern is not None and (problem := problem_of(pattern)) is not None:
            raise ValueError(f"answer_pattern: {problem}; correct it")


class SingleTurnEnvironment:
    """An environment that shows one prompt and scores the one answer."""

    data_schema = PROMPT_DATA

    def __init__(self, options: SingleTurnOptions) -> None:
        """Load the functions and judges that score the answers.

        Raises: BadRewardFunction if a function cannot be used, if two have the same name, or if
        nothing scores the answers.
        """
        group_reward, judges = options.group_reward, options.judges
        self._group_functions = load_group_functions(group_reward) if group_reward else ()
        is_scored = bool(self._group_functions) or self._has_reward(judges)
        functions = load_functions(options.reward) if options.reward or not is_scored else ()
        self._functions: tuple[RewardFunction | Judge, ...] = (
            *functions,
            *(shared_judge(name, each) for name, each in (judges or {}).items()),
        )
        # Whether an answer has a reward of its own, before group rewards are added.
        self._scores_one = bool(functions) or self._has_reward(judges)
        names = [each.name for each in (*self._functions, *self._group_functions)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadRewardFunction(
                f"group_reward: {', '.join(twice)} is the name of two functions, expected a "
                "different name for each; rename one"
            )
        self._system = options.system
        self._answer_pattern = options.answer_pattern
        self._columns: Mapping[str, Any] = {}

    def _has_reward(self, judges: Mapping[str, JudgeOptions] | None) -> bool:
        """Return whether answers are scored even if no reward function is configured.

        Override this method in a subclass that has other sources of a reward than judges.
        """
        return bool(judges)

    async def reset(self, task: Task) -> Observation:
        self.check_data(task.data)
        self._columns = task.data
        return Observation(messages=tuple(self.first_messages(task.data)))

    def _check_group(self, columns: Mapping[str, Any]) -> None:
        for function in self._group_functions:
            function.check(columns, extras=frozenset(f"{name}s" for name in columns))

    def first_messages(self, data: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first messages of a task with these data, without beginning an episode."""
        prompt = data["prompt"]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = [] if self._system is None else [Message(role=Role.SYSTEM, content=self._system)]
        return _with_one_system([*system, *_chat_messages(chat)])

    async def step(self, action: Action) -> StepResult:
        """Score the answer, which ends the episode. Raises: RewardError if there is no score."""
        try:
            return await self._scored(action.text)
        except RewardError as error:
            # Do not try again: a call that exceeded its time limit would exceed it again.
            is_final = isinstance(error.__cause__, CallTimedOut)
            rescore = None if is_final else partial(self._scored, action.text)
            raise RewardError(str(error), rescore=rescore) from error

    @property
    def functions(self) -> tuple[RewardFunction | Judge, ...]:
        """The functions and judges that score the answer to the current task."""
        return (*self._functions, *self._group_functions)

    @property
    def group_functions(self) -> tuple[RewardFunction, ...]:
        """The functions that score the rollouts of a group together."""
        return self._group_functions

    async def score_by(self, function: RewardFunction | Judge, completion: str) -> Score:
        """Score an answer to the current task by one of this environment's `functions`.

        A group function needs a group, so it is called with two rollouts that both have this
        answer.

        Raises: RewardError if the function returns no score; any exception that it raises itself.
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
        """Check that a task's data have the needed columns and a prompt with readable messages.

        Raises: ValueError if a check fails.
        """
        for function in self._functions:
            function.check(data)
        self._check_group(data)
        check_prompt(data["prompt"])

    @property
    def filled_columns(self) -> frozenset[str]:
        """The columns in which the reward functions expect no nulls.

        These are the required arguments of the functions, except those that may be None.
        """
        return frozenset(
            name
            for function in self.functions
            if isinstance(function, RewardFunction)
            for name, each in inspect.signature(function.function).parameters.items()
            if name in function.required and not _NULLABLE.search(str(each.annotation))
        )

    def _extras(self) -> Mapping[str, Any]:
        """Return the arguments that reward functions get in addition to the columns."""
        return {}

    async def _scored(self, completion: str) -> StepResult:
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

    async def score_group(self, task: Task, completions: Sequence[str]) -> list[StepResult | None]:
        """Score the answers of a group together. A call needs no `reset` before it.

        Returns: for each answer, the reward that the group functions add to its last turn; None for
            an answer that nothing scores.
        Raises: RewardError if a function raises, or if nothing scores any of the answers.
        """
        scores: list[_Scores] = [{} for _ in completions]
        for function in self._group_functions:
            with _as_missing_score(function):
                found = await function.score_group(completions, task.data)
            for own, score in zip(scores, found, strict=True):
                own[function] = score
        is_scored = [
            self._scores_one or any(score.value is not None for score in own.values())
            for own in scores
        ]
        if not any(is_scored):
            raise RewardError("none of the group functions gave a number for any of the answers")
        return [
            self._result(own) if has_score else None
            for own, has_score in zip(scores, is_scored, strict=True)
        ]

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
        """Return what `answer_pattern` finds, or None; without this option, return the whole text.

        Raises: RewardError if the search does not end in time.
        """
        if self._answer_pattern is None:
            return text
        return last_of(self._answer_pattern, text, what="answer_pattern")

    def _components(self, scores: _Scores) -> dict[str, float]:
        """Return the components of the reward.

        With one function, they are the parts of its score. With several, each function has the
        component NAME for its value, and NAME.PART for each part.
        """
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


_Scores = dict[RewardFunction | Judge, Score]


@contextmanager
def _as_missing_score(function: RewardFunction | Judge) -> Iterator[None]:
    """Convert errors of a user's function to RewardError: only the answer's score is missing."""
    try:
        yield
    except (RewardError, WorkerLost):
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"{function.name} raised {describe(root_cause(error))}") from error


_BOUND_TO_ROLES = {
    "function_call": Role.ASSISTANT,
    "tool_calls": Role.ASSISTANT,
    "tool_call_id": Role.TOOL,
    "reasoning_content": Role.ASSISTANT,
    "reasoning": Role.ASSISTANT,
    "thinking": Role.ASSISTANT,
}
_NOT_TEXT = ("refusal", "image", "images", "audio", "audios", "video", "videos")


def check_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> None:
    """Check that the messages of a prompt that satisfies `PROMPT_DATA` can be read.

    Raises: ValueError with the message's number.
    """
    # Only a message without content, or with one of these fields, can have faults that the schema
    # does not find; the conversion of all others would take time.
    if not isinstance(prompt, str) and any(
        each.get("content") is None or any(map(each.get, (*_BOUND_TO_ROLES, *_NOT_TEXT)))
        for each in prompt
    ):
        list(_chat_messages(prompt))


def _chat_messages(prompt: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    for number, row in enumerate(prompt):
        try:
            yield chat_message(row)
        except ValueError as error:
            raise ValueError(f"prompt[{number}]: {error}") from error


def chat_message(row: Mapping[str, Any]) -> Message:
    """Convert a message of a data set, which has OpenAI's form, to a `Message`.

    The role `developer` becomes `system`. Text parts are joined by newlines.
    Raises: ValueError for a call that cannot be read, for a field that only another role may have,
    for content that is not text, such as images, and for a user's or system message without
    content.
    """
    if row.get("function_call"):
        raise ValueError(
            "the message has function_call, OpenAI's earlier form of a call, which is not "
            "read; write it as tool_calls"
        )
    if unread := next((name for name in _NOT_TEXT if row.get(name)), None):
        raise ValueError(
            f"the message has {unread}, which is not read; expected text in content; write "
            f"it as text in content, or remove {unread}"
        )
    role = Role.SYSTEM if row["role"] == "developer" else Role(row["role"])
    content = row.get("content")
    if content is None and role in (Role.SYSTEM, Role.USER):
        raise ValueError(
            f"the content of a message of role {row['role']} is null or missing, expected text; "
            "write the text, or remove the message"
        )
    calls = row.get("tool_calls") or ()
    for name, expected in _BOUND_TO_ROLES.items():
        if row.get(name) and role is not expected:
            raise ValueError(
                f"a message of role {row['role']} has {name}, which only role {expected} "
                f"may have; remove {name}, or correct the role"
            )
    reasoning = row.get("reasoning_content") or row.get("reasoning") or row.get("thinking")
    return Message(
        role=role,
        content=text_of_content(content),
        name=row.get("name") or None,
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=row.get("tool_call_id") or None,
        reasoning=reasoning or None,
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
            f"the arguments of a call of {function['name']} are not a JSON object; "
            "expected an object, or its JSON text; correct the data"
        )
    return ToolCall(name=function["name"], arguments=dict(arguments), id=row.get("id") or "")


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Merge the system messages at the start of a chat, because many templates take only one."""
    first = list(takewhile(lambda each: each.role is Role.SYSTEM, messages))
    # Messages with names are not merged, because their names would be lost.
    if len(first) < 2 or any(each.name not in (None, each.role) for each in first):
        return list(messages)
    merged = Message(role=Role.SYSTEM, content="\n\n".join(each.content for each in first))
    return [merged, *messages[len(first) :]]
