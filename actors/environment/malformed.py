"""Answers to turns that an environment cannot understand; too many in a row end the episode.

Called by the built-in environments.
"""

from __future__ import annotations

from actors.environment.protocol import Message, StepResult

ERROR = "error: {message}"
"""A tool's answer to a call that failed."""


class MalformedTurns:
    """A counter of an episode's malformed turns in a row."""

    def __init__(self, *, at_most: int, penalty: float | None) -> None:
        """Begin to count.

        Args: at_most: malformed turns in a row; one more ends the episode. penalty: subtracted from
        the reward for each, as the component `malformed`; None: no penalty and no component.
        """
        self._at_most = at_most
        self._penalty = penalty
        self._num_in_a_row = 0

    def begin_anew(self) -> None:
        """Reset the count, because an episode has begun or a turn was understood."""
        self._num_in_a_row = 0

    def result(self, messages: tuple[Message, ...]) -> StepResult:
        """Return the result of one more malformed turn.

        Args: messages: what the policy is shown, unless the episode ends.
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
