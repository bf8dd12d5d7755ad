"""What an environment answers to turns that it cannot understand, of which too many end an episode.

Called by the built-in environments.
"""

from __future__ import annotations

from actors.environment.protocol import Message, StepResult

ERROR = "error: {message}"
"""A tool's answer to a call that failed."""


class MalformedTurns:
    """Counts an episode's malformed turns in a row."""

    def __init__(self, *, at_most: int, penalty: float | None) -> None:
        """at_most: in a row; one more ends the episode. penalty: taken off the reward for each, and
        told as the component `malformed`; None: neither."""
        self._at_most = at_most
        self._penalty = penalty
        self._num_in_a_row = 0

    def begin_anew(self) -> None:
        """An episode has begun, or a turn was understood."""
        self._num_in_a_row = 0

    def result(self, messages: tuple[Message, ...]) -> StepResult:
        """Of one more. messages: what the policy is told, unless the episode ends."""
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
