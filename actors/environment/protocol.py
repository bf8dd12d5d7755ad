"""What an environment is: reset, step, close, and the frozen values that pass between.

An environment holds one episode at a time and never sees token ids: text goes in, messages come
out. Terminated (the game has ended) and truncated (the environment cut it off) are different
things. Built-in environments implement `Environment`; `turn_loop` plays them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol

from actors.types import Task

rollout_id: ContextVar[str] = ContextVar("rollout_id", default="")
"""The rollout that is played where an environment's methods run, such as `g000012.0-3`: for its log
lines, or to name what it starts elsewhere and a dead process could leave behind. Empty in the trial
of an environment before the start."""


class Role(StrEnum):
    """Who speaks in a chat."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat."""

    role: Role
    content: str
    name: str | None = None
    """The tool that answers, where a chat template wants it."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"message: content: got a {type(self.content).__name__}, expected text")
        _check_text(self.content)
        if self.name is not None:
            _check_text(self.name)


def _check_text(text: str) -> None:
    # Neither a tokenizer nor the run's database takes half a character.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"message: got a lone surrogate {text[error.start]!r} at character {error.start}, "
            "expected text that UTF-8 can hold; decode it with errors='replace'"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)
    """The JSON schema of its arguments object."""

    def __post_init__(self) -> None:
        properties = self.parameters.get("properties", {})
        if not all(isinstance(schema, Mapping) for schema in properties.values()):
            raise TypeError(
                f"tool {self.name}: expected parameters.properties to hold one JSON schema for "
                "each argument"
            )

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


class MalformedReason(StrEnum):
    """What was wrong with a tool call."""

    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_ARGUMENT = "missing_argument"
    UNKNOWN_ARGUMENT = "unknown_argument"
    ILL_TYPED_ARGUMENT = "ill_typed_argument"
    UNCLOSED = "unclosed"
    UNOPENED = "unopened"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A well-formed call of a declared tool; its arguments satisfy the tool's schema."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that could not be read."""

    reason: MalformedReason
    message: str
    """One short sentence that the policy may be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One assistant turn."""

    text: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    """In the order of the text; empty where no tools are declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How an episode begins."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    best_return: float | None = None
    """Of best possible play; None where it is not known."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        best = self.best_return
        if best is not None and not (isinstance(best, Real) and math.isfinite(best)):
            raise TypeError("observation: best_return: expected None or a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's answer to one action."""

    messages: tuple[Message, ...] = ()
    """New ones only, of role user or tool."""
    reward: float = 0.0
    """Of this turn."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    terminated: bool = False
    """The task has ended."""
    truncated: bool = False
    """The environment's own limit cut the task off (recorded as `max_turns`)."""
    is_malformed: bool = False
    """The action could not be understood."""
    ended_by_malformed: bool = False
    """That is why the episode ends (recorded as `malformed_tool_call`)."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        if self.terminated and self.truncated:
            raise ValueError(
                "step result: terminated and truncated are both set; expected at most one: an "
                "ended task is terminated, a cut-off one is truncated"
            )
        if self.ended_by_malformed and not (self.is_malformed and self.terminated):
            raise ValueError(
                "step result: ended_by_malformed is set without is_malformed and terminated; "
                "set all three"
            )


class RewardError(Exception):
    """The action was taken, but its score could not be had (a judge is away, a scorer failed).

    rescore: gives the step's result with the score, or raises RewardError again; the action is not
    taken a second time. None: there is nothing to try again.
    """

    def __init__(
        self, message: str, *, rescore: Callable[[], Awaitable[StepResult]] | None = None
    ) -> None:
        super().__init__(message)
        self.rescore = rescore


class Environment(Protocol):
    """One episode at a time; every random choice derives from the task's seed.

    A constructor takes options as keyword arguments and does nothing slow; slow work belongs in
    `reset`. No method may block the event loop: other episodes share it.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task's episode and give its first messages. Any exception retries it."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Take one action. Raises: RewardError when only the score is missing."""
        ...

    async def close(self) -> None:
        """Let go of everything; called once, whatever happened before, also after a time-out."""
        ...


def is_finite_reward(result: StepResult) -> bool:
    """Whether the reward and each of its components is a finite number."""
    parts = (result.reward, *result.reward_components.values())
    return all(isinstance(part, Real) and math.isfinite(part) for part in parts)


def _check_messages(messages: tuple[Message, ...]) -> None:
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"messages: got a {type(message).__name__}, expected Message values")
