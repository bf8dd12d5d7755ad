"""Answers to the tool calls of a turn, and to turns that an environment cannot understand.

The built-in environments use this module. Too many malformed turns in a row end an episode. A call
beyond the episode's budget is not made; its answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from actors.environment.protocol import MalformedCall, Message, Role, StepResult, ToolCall
from actors.environment.settings import rollout_settings
from actors.limits import STRICT, Natural

ERROR = "error: {message}"
"""A tool's answer to a call that failed."""
Penalty = Annotated[float, Ge(0), Lt(10)]


class ToolFailed(Exception):
    """Raised if a call failed; the message is for the policy."""


class BadArguments(ToolFailed):
    """Raised if the arguments of a call do not fit, so that the call is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of environments in which a turn may be malformed."""

    __pydantic_config__ = STRICT

    max_malformed: Natural = 3
    """Largest number of malformed turns in a row; one more ends the episode."""
    malformed_penalty: Penalty = 0.1
    """Subtracted from the reward for each malformed turn, as the component malformed."""


class MalformedTurns:
    """A counter of an episode's malformed turns in a row."""

    def __init__(self, *, at_most: int, penalty: float | None) -> None:
        """Begin to count malformed turns.

        Args: at_most: largest number of malformed turns in a row; one more ends the episode.
        penalty: amount subtracted from the reward for each malformed turn; the result names it as
        the component `malformed`. None: no penalty and no component.
        """
        self._at_most = at_most
        self._penalty = penalty
        self._num_in_a_row = 0

    def begin_anew(self) -> None:
        """Reset the count, because an episode has begun or a turn was understood."""
        self._num_in_a_row = 0

    def malformed_result(self, messages: tuple[Message, ...]) -> StepResult:
        """Return the result of one more malformed turn.

        Args: messages: messages for the policy; left out if the episode ends.
        """
        self._num_in_a_row += 1
        is_over = self._num_in_a_row > self._at_most
        return StepResult(
            messages=() if is_over else messages,
            reward=0.0 if self._penalty is None else -self._penalty,
            reward_components={} if self._penalty is None else {"malformed": -self._penalty},
            terminated=is_over,
            is_malformed=True,
            ended_by_malformed=is_over,
        )


class ToolTurns(MalformedTurns):
    """Answers and counts the tool calls of an episode, and counts its malformed turns in a row."""

    def __init__(
        self,
        call: Callable[[ToolCall], Awaitable[str]],
        *,
        at_most: int,
        penalty: float | None,
        max_calls: int | None = None,
        no_calls_left: str = "no calls are left; answer",
        max_chars: int | None = None,
        name: str | None = None,
    ) -> None:
        """Begin to count the calls and malformed turns of one environment.

        Args:
            call: A function that makes a call and returns its answer; it may raise ToolFailed and
                BadArguments.
            at_most: Largest number of malformed turns in a row; one more ends the episode.
            penalty: Amount subtracted from the reward for each malformed turn; None for none.
            max_calls: Maximum number of calls in an episode; None for any number.
            no_calls_left: The answer to a call beyond `max_calls`.
            max_chars: Length to which an answer is cut; None for no limit.
            name: The tool's name in the answer to a call that cannot be parsed; None for no name.
        """
        super().__init__(at_most=at_most, penalty=penalty)
        self._call = call
        self._max_calls = max_calls
        self._no_calls_left = no_calls_left
        self._max_chars = max_chars
        self._name = name
        self.num_calls = 0
        """Number of calls in the episode so far."""

    def begin_episode(self) -> None:
        """Reset all counts."""
        self.begin_anew()
        self.num_calls = 0

    async def result_of(self, calls: Sequence[ToolCall | MalformedCall]) -> StepResult:
        """Make the calls of a turn that only calls tools, and return the turn's result."""
        messages, is_malformed = await self.answers(calls)
        return self.result(messages, is_malformed=is_malformed)

    def result(self, messages: tuple[Message, ...], *, is_malformed: bool) -> StepResult:
        """Return the result of a turn that only calls tools, and count the turn if it is malformed.

        The arguments are the two values that `answers` returned for the turn.
        """
        if is_malformed:
            return self.malformed_result(messages)
        self.begin_anew()
        return StepResult(messages=messages)

    async def answers(
        self, calls: Sequence[ToolCall | MalformedCall]
    ) -> tuple[tuple[Message, ...], bool]:
        """Return the answers to a turn's calls, and whether the turn is malformed.

        A turn is malformed if one of its calls is malformed, or if it has more than
        `max_calls_per_turn` calls.
        """
        settings = rollout_settings.get()
        taken = calls[: settings.max_calls_per_turn]
        if settings.parallel_calls:
            found = await _together([self._answer(call) for call in taken])
        else:
            # Make the calls in the order in which the policy wrote them.
            found = [await self._answer(call) for call in taken]
        is_malformed = len(taken) < len(calls) or any(is_bad for _, is_bad in found)
        return tuple(message for message, _ in found), is_malformed

    async def _answer(self, call: ToolCall | MalformedCall) -> _Answer:
        if isinstance(call, MalformedCall):
            content = ERROR.format(message=call.message)
            return Message(role=Role.TOOL, content=content, name=self._name), True
        is_malformed = False
        try:
            if self._max_calls is not None and self.num_calls >= self._max_calls:
                raise ToolFailed(self._no_calls_left)
            self.num_calls += 1
            content = await self._call(call)
        except ToolFailed as error:
            is_malformed = isinstance(error, BadArguments)
            content = ERROR.format(message=error)
        content = content[: self._max_chars].encode(errors="replace").decode()
        message = Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)
        return message, is_malformed


_Answer = tuple[Message, bool]


async def _together(answers: Sequence[Awaitable[_Answer]]) -> list[_Answer]:
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
