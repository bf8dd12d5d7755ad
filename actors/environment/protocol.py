"""The protocol of an environment: reset, step and close, and the values they take and return.

An environment plays one episode at a time and never sees token ids. Terminated means that the game
has ended; truncated means that the environment cut it off. `turn_loop` plays an environment as this
code does:

    environment = Doubling()
    begun = await environment.reset(Task(task_id="a", environment="my:Doubling", seed=4))
    print(begun.messages[0].content)
    for text in ("10", "20", "40"):
        result = await environment.step(Action(text=text))
        print(result.reward, result.terminated)
    await environment.close()

`Doubling` is the example of `Environment`. It is trained by `tasks: {environment: my:Doubling}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from typing import Any, Literal, Protocol

import numpy as np

from actors.types import Task
from actors.user_code import type_of

rollout_id: ContextVar[str] = ContextVar("rollout_id", default="")
"""The id of the rollout for which an environment's methods are called, such as `g000012.0-3`.

An environment may use it in log lines, or to name external resources that would remain if its
process died. Empty while an environment is tried out before the start of a run."""


CHECKING_FILES = ("<string>", __file__)
"""The files that check the values of this module: the constructors of its dataclasses, and the
module. If a check fails, the fault is in the line that makes the value."""


class Role(StrEnum):
    """The role of a chat message's author."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat.

    Example: Message(role="user", content="What is 17 + 25?")
    """

    role: Role
    content: str
    name: str | None = None
    """Name of the tool that answers, or of the speaker, for chat templates that show it."""
    tool_calls: tuple[ToolCall, ...] = field(default=(), compare=False)
    """The assistant's tool calls; the content does not repeat them."""
    tool_call_id: str | None = None
    """The id of the call that a tool's message answers."""
    reasoning: str | None = None
    """The assistant's thinking before its content, without the markers around it."""
    call_texts: tuple[tuple[str, str, str], ...] = field(default=(), init=False, repr=False)
    """The id, the name and the arguments as JSON text of each call, at the time when the message
    was made. Equality and hash use these: a mapping has no hash, can change, and treats 1 and True,
    or two orders of its keys, as equal."""

    def __post_init__(self) -> None:
        if not isinstance(self.role, Role):
            object.__setattr__(self, "role", _as_role(self.role))
        _check_text(self.content, "message: content")
        if self.name is not None:
            _check_text(self.name, "message: name")
        if self.tool_call_id is not None:
            _check_role(self.role, Role.TOOL, "tool_call_id")
            _check_text(self.tool_call_id, "message: tool_call_id")
        if self.reasoning is not None:
            _check_role(self.role, Role.ASSISTANT, "reasoning")
            _check_text(self.reasoning, "message: reasoning")
        if self.tool_calls != ():
            _check_role(self.role, Role.ASSISTANT, "tool_calls")
            object.__setattr__(self, "call_texts", _call_texts(self.tool_calls))


def _as_role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        raise ValueError(
            f"message: role: got {name!r}, expected one of {', '.join(Role)}"
        ) from None


def _check_text(text: str, what: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what}: got {type_of(text)}, expected text")
    # Neither a tokenizer nor the run's database accepts lone surrogates.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what}: got a lone surrogate {text[error.start]!r} at character {error.start}, "
            "expected text that can be encoded as UTF-8; where this text is read from bytes, use "
            "bytes.decode('utf-8', errors='replace'), otherwise use "
            "text.encode('utf-8', errors='replace').decode('utf-8')"
        ) from None


def text_of_content(content: object) -> str:
    """Return a message's content as text; the content may be None, or a list of OpenAI's parts.

    The texts of the parts are joined by newlines, as vLLM and the sessions join them. None gives an
    empty text.
    Raises: ValueError if the content, or a part of it, is not text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"content: got {type_of(content)}, expected text, or a list of text parts; write it as "
            "text"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            got = f"{type_of(part)} of type {kind!r:.40}" if kind else type_of(part)
            if kind == "text":
                got = f"a text part with the text {text!r:.40}"
            raise ValueError(
                f"content[{index}]: got {got}, expected a text part such as "
                "{'type': 'text', 'text': 'Hi'}, because the policy reads only text; write it as "
                "text, or remove it"
            )
        texts.append(text)
    return "\n".join(texts)


def _check_state_key(key: str | None, what: str) -> None:
    if key is not None and not isinstance(key, str):
        raise TypeError(
            f"{what}: state_key: got {type_of(key)}, expected text or None; write the "
            "state as text, for example by json.dumps with sort_keys"
        )


def _check_role(role: Role, expected: Role, name: str) -> None:
    if role != expected:
        raise ValueError(
            f"message: {name}: got one on a message of role {role}, expected it only on role "
            f"{expected}"
        )


def _call_texts(calls: tuple[ToolCall, ...]) -> tuple[tuple[str, str, str], ...]:
    if not isinstance(calls, tuple):
        raise TypeError(f"message: tool_calls: got {type_of(calls)}, expected a tuple")
    for call in calls:
        if not isinstance(call, ToolCall):
            raise TypeError(f"message: tool_calls: got {type_of(call)}, expected ToolCall values")
        _check_text(call.id, "message: the id of a tool call")
        _check_text(call.name, "message: the name of a tool call")
    what = "message: the arguments of a tool call"
    return tuple((call.id, call.name, _json_text(call.arguments, what)) for call in calls)


def _json_text(tree: Mapping[str, Any], what: str) -> str:
    if not isinstance(tree, Mapping):
        raise TypeError(f"{what}: got {type_of(tree)}, expected a mapping")
    try:
        text = json.dumps(dict(tree), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what}: got a value that is not JSON ({type(error).__name__}), expected "
            "strings, finite numbers, true, false, null, and lists and objects of them"
        ) from error
    _check_text(text, what)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool that the policy may call.

    Example: ToolSchema(name="now", description="Tell the time.", parameters={"type": "object"})
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)
    """The JSON schema of the object with the tool's arguments."""

    def __post_init__(self) -> None:
        _check_text(self.name, "tool: name")
        what = f"tool {self.name}"
        _check_text(self.description, f"{what}: description")
        _json_text(self.parameters, f"{what}: parameters")
        named: dict[str, Any] = {}
        for where in ("patternProperties", "properties"):
            schemas = self.parameters.get(where, {})
            if schemas is None and where == "patternProperties":
                continue  # Clients write null for an absent keyword.
            if not _are_schemas(schemas):
                raise TypeError(
                    f"{what}: expected parameters.{where} to have one JSON schema for each argument"
                )
            named |= schemas
        others = self.parameters.get("additionalProperties")
        if not isinstance(others, Mapping | bool | None):
            raise TypeError(
                f"{what}: parameters.additionalProperties: got {type_of(others)}, expected a JSON "
                "schema, true or false"
            )
        if not _are_names(required := self.parameters.get("required", ())):
            raise TypeError(
                f"{what}: parameters.required: got {required!r}, expected a list of arguments"
            )
        for name, schema in {"other arguments": others, **named}.items():
            kind = schema.get("type", ()) if isinstance(schema, Mapping) else ()
            if not (isinstance(kind, str) or _are_names(kind)):
                raise TypeError(
                    f"{what}: the type of {name}: got {kind!r}, expected the name of a JSON type "
                    "such as 'string', or a list of names"
                )

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


MalformedReason = Literal[
    "invalid_json",
    "not_an_object",
    "unknown_tool",
    "missing_argument",
    "unknown_argument",
    "ill_typed_argument",
    "unclosed",
    "unopened",
    "unreadable",
]
"""The fault of a tool call that the policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A well-formed call of a declared tool; its arguments satisfy the tool's schema.

    Example: ToolCall(name="search", arguments={"query": "ray", "limit": 5})
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The id by which the tool's answer refers to the call; empty if the call has no id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A tool call that cannot be made, because it is unreadable or does not fit the tool."""

    reason: MalformedReason
    message: str
    """One short sentence that the policy may be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One assistant turn, as the environment gets it.

    Example: Action(text="I look it up.", calls=(ToolCall(name="now", arguments={}),))
    """

    text: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    """Calls in the order of the text; empty if no tools are declared."""

    def own_copy(self) -> Action:
        """Return an action whose calls' arguments an environment may change.

        The chat keeps the original.
        """
        calls = (
            replace(each, arguments=deepcopy(each.arguments))
            if isinstance(each, ToolCall)
            else each
            for each in self.calls
        )
        return replace(self, calls=tuple(calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of `reset`: the first messages of an episode, and the tools.

    Example: Observation(messages=(Message(role="user", content="Guess."),), best_return=1.0)
    """

    messages: tuple[Message, ...]
    """One or more messages."""
    tools: tuple[ToolSchema, ...] = ()
    best_return: float | None = None
    """The return of best possible play; None if it is not known."""
    state_key: str | None = None
    """A text that is equal for equal states of the task, for `algorithm.state_credit`. None: the
    state is the observation's tokens."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        if not self.messages:
            raise TypeError(
                "observation: messages: got none, expected one or more, because they are the "
                "policy's first prompt; return one, such as Message(role=Role.USER, content=…)"
            )
        _check_state_key(self.state_key, "observation")
        if not isinstance(self.tools, list | tuple):
            raise TypeError(
                f"observation: tools: got {type_of(self.tools)}, expected a tuple of "
                "ToolSchema values"
            )
        for tool in self.tools:
            if not isinstance(tool, ToolSchema):
                raise TypeError(
                    f"observation: tools: got {type_of(tool)}, expected ToolSchema values"
                )
        object.__setattr__(self, "tools", tuple(self.tools))
        best = self.best_return
        if best is not None and not (isinstance(best, Real) and math.isfinite(best)):
            raise TypeError(
                f"observation: best_return: got {best!r:.40}, expected a finite number, or None if "
                "it is not known"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's answer to one action.

    Example: StepResult(messages=(Message(role="user", content="Higher."),), reward=-0.1)
    """

    messages: tuple[Message, ...] = ()
    """The new messages, none of role assistant. The chat already has the policy's reply."""
    reward: float = 0.0
    """The reward of this turn."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    terminated: bool = False
    """Whether the task has ended."""
    truncated: bool = False
    """Whether the environment's own limit cut the task off (recorded as `max_turns`)."""
    is_malformed: bool = False
    """Whether the action could not be understood."""
    ended_by_malformed: bool = False
    """Whether the episode ends because of malformed actions (recorded as `malformed_tool_call`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers that are not rewarded. Each number's mean over a training step is shown as a
    curve."""
    extra_columns: Mapping[str, str] = field(default_factory=dict)
    """Named texts that are kept with the trajectory, and shown together with it."""
    answer: str | None = None
    """The policy's answer so far, as a text that is equal for equal answers. An evaluation's
    majority vote counts the episode's last answer. None: no new answer."""
    state_key: str | None = None
    """A text that is equal for equal states; this one is for the state after the action. None: the
    state is the observation's tokens."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        if not isinstance(self.answer, str | None):
            raise TypeError(
                f"step result: answer: got {type_of(self.answer)}, expected text or None"
            )
        _check_state_key(self.state_key, "step result")
        if not isinstance(self.reward_components, Mapping):
            raise TypeError(
                f"step result: reward_components: got {type_of(self.reward_components)}, "
                "expected a mapping of names to numbers"
            )
        for what in ("metrics", "extra_columns"):
            if not isinstance(named := getattr(self, what), Mapping):
                raise TypeError(f"step result: {what}: got {type_of(named)}, expected a mapping")
        for name in ("terminated", "truncated", "is_malformed", "ended_by_malformed"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise TypeError(
                    f"step result: {name}: got {type_of(value)}, expected True or False"
                )
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
        # The messages of an ended episode are never shown to the policy.
        if not (self.terminated or self.truncated):
            _check_new_messages(self.messages)


class RewardError(Exception):
    """Raised if an action was taken, but its score is missing, for example because a judge failed.

    rescore: a function that returns the step's result with the score, or raises RewardError again,
    without taking the action a second time. It is None if scoring cannot be retried.

    Example: RewardError("the judge did not answer within 20 s")
    """

    def __init__(
        self, message: str, *, rescore: Callable[[], Awaitable[StepResult]] | None = None
    ) -> None:
        super().__init__(message)
        self.rescore = rescore


class Environment(Protocol):
    """An environment that plays one episode at a time; all randomness comes from the task's seed.

    A constructor takes the options as keyword arguments, or as one argument `options`, a dataclass.
    It must be fast: slow work belongs in `reset`. No method may block the event loop, because other
    episodes share it. The attribute `data_schema` may be a dataclass with the fields of a task's
    data, or a JSON schema (`task_data`); without it any object is accepted. The method
    `first_messages(data)` may return a task's first messages without beginning the task, and the
    attribute `tools` may contain the tools. If an environment has `first_messages`, the run
    measures the prompts of a file or data set of tasks before training, and leaves out each task
    whose prompt is too long.

    Example:
        ```python
        # The policy doubles a number until it is above 20.
        class Doubling:
            async def reset(self, task: Task) -> Observation:
                self.number = 1 + task.seed % 5
                text = f"Double the number: {self.number}"
                return Observation(messages=(Message(role="user", content=text),))

            async def step(self, action: Action) -> StepResult:
                self.number *= 2
                if action.text.strip() != str(self.number):
                    return StepResult(terminated=True)
                if self.number > 20:
                    return StepResult(reward=1.0, terminated=True)
                again = Message(role="user", content="Again.")
                return StepResult(messages=(again,), reward=0.1)

            async def close(self) -> None: ...
        ```
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task's episode and return its first messages.

        If this raises, the rollout ends as `environment_error`, and is played again with a new
        environment as often as `rollouts.outcomes` allows.
        """
        ...

    async def step(self, action: Action) -> StepResult:
        """Take one action and return its result. Raises: RewardError if the score is missing."""
        ...

    async def close(self) -> None:
        """Release all resources. It is called once, also after an error or a time-out."""
        ...


def reward_problem(result: StepResult) -> str | None:
    """Return a sentence that names a reward, component or metric that is not finite; else None."""
    parts = {"reward": result.reward}
    parts |= {f"reward component {name}": part for name, part in result.reward_components.items()}
    parts |= {f"metric {name}": part for name, part in result.metrics.items()}
    for what, part in parts.items():
        if not isinstance(part, Real) or not _is_finite(part):
            shown = f"{part!r:.80}" if isinstance(part, _SHOWN) else type_of(part)
            return f"{what}: got {shown}, expected a finite number"
    return None


# Other values of a user's code are shown by their type: their text may be long, or may raise.
_SHOWN = (float, str, type(None))


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _are_schemas(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(schema, Mapping | bool)
        for name, schema in value.items()
    )


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _check_messages(messages: tuple[Message, ...]) -> None:
    if not isinstance(messages, list | tuple):
        raise TypeError(f"messages: got {type_of(messages)}, expected a tuple of Message")
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"messages: got {type_of(message)}, expected Message values")


def _check_new_messages(messages: tuple[Message, ...]) -> None:
    for message in messages:
        if message.role is Role.ASSISTANT:
            raise ValueError(
                "step result: messages: got a message of role 'assistant', expected only new "
                "messages of role user, tool or system; leave out the earlier messages and the "
                "policy's reply, which the chat already has"
            )
