"""A guessing game with hints: the policy must discover a strategy; the best is binary search.

The secret depends only on the task's seed. A hit gives reward 1 and ends the game. If the last
allowed guess misses, the episode is terminated, not truncated. The texts that the policy reads are
short, because each token costs time on a CPU.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le, Lt

from actors.environment.protocol import Action, Message, Observation, Role, StepResult
from actors.environment.task_data import NO_DATA
from actors.environment.tool_calls import visible_text
from actors.limits import STRICT, Fraction
from actors.types import Task

INVITATION = "Guess my number from {low} to {high}. You have {max_guesses} guesses."
REMINDER = "Say one number from {low} to {high}."
HIGHER = "higher"
LOWER = "lower"

# Nine digits are enough for every range; Python refuses to read a number of thousands of digits.
_NUMBER = re.compile(r"(?<![0-9.])-?[0-9]{1,9}(?![0-9]|\.[0-9])")
_DIGIT = re.compile(r"[0-9]+")


def best_win_rate(num_numbers: int, *, max_guesses: int) -> float:
    """Return the chance that best play wins, if all numbers are equally likely.

    The chance is min(1, (2^k - 1) / n), because k guesses with hints can distinguish 2^k - 1
    numbers and no more.
    Example: best_win_rate(7, max_guesses=3) -> 1.0; best_win_rate(10, max_guesses=2) -> 0.3
    """
    return min(1.0, (2**max_guesses - 1) / num_numbers)


def parse_guess(text: str) -> int | None:
    """Return the only whole number in a text; None if it has none, several, or a fraction."""
    shown = visible_text(text)
    if len(_DIGIT.findall(shown)) != 1:
        return None
    match = _NUMBER.search(shown)
    return None if match is None else int(match.group())


Number = Annotated[int, Ge(0), Lt(10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessingOptions:
    """Options of `guessing`: the range of the secret, and the cost of guesses."""

    __pydantic_config__ = STRICT

    low: Number = 1
    """The smallest number."""
    high: Number = 7
    """The largest number."""
    max_guesses: Annotated[int, Ge(1), Le(64)] = 3
    """Number of guesses after which the game is lost."""
    ruled_out_cost: Fraction = 0.0
    """Subtracted from the reward for a guess that the hints exclude."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(
                f"low: got {self.low}, expected at most high, which is {self.high}; lower low, "
                "or raise high"
            )


class GuessingEnvironment:
    """A game: guess a secret number from low to high in max_guesses guesses.

    A text without exactly one number of the range is malformed: it is answered with a reminder and
    costs a guess. Components of the reward: `hit` is 1 if the guess is the secret, otherwise 0.
    `ruled_out` is -ruled_out_cost if the earlier hints exclude the guess; this cost distinguishes
    bad guesses from good ones even in a lost game.
    """

    data_schema = NO_DATA

    def __init__(self, options: GuessingOptions) -> None:
        self._options = options
        self._secret = options.low
        # The range of the numbers that the hints do not exclude.
        self._lowest, self._highest = options.low, options.high
        self._guesses_left = 0

    async def reset(self, task: Task) -> Observation:
        self._secret = random.Random(task.seed).randint(self._options.low, self._options.high)
        self._guesses_left = self._options.max_guesses
        self._lowest, self._highest = self._options.low, self._options.high
        best = best_win_rate(
            self._options.high - self._options.low + 1, max_guesses=self._options.max_guesses
        )
        return Observation(messages=(self._say(INVITATION),), best_return=best)

    async def step(self, action: Action) -> StepResult:
        self._guesses_left -= 1
        guess = parse_guess(action.text)
        is_malformed = guess is None or not self._options.low <= guess <= self._options.high
        is_hit = guess == self._secret
        is_over = is_hit or self._guesses_left <= 0
        components = {"hit": float(is_hit)}
        if self._options.ruled_out_cost:
            components["ruled_out"] = (
                -self._options.ruled_out_cost if self._is_ruled_out(guess) else 0.0
            )
        return StepResult(
            messages=() if is_over else (self._answer(guess, is_malformed=is_malformed),),
            reward=sum(components.values()),
            reward_components=components,
            terminated=is_over,
            is_malformed=is_malformed,
            answer=None if is_malformed else str(guess),
        )

    async def close(self) -> None:
        return None

    def _answer(self, guess: int | None, *, is_malformed: bool) -> Message:
        if guess is None or is_malformed:
            return self._say(REMINDER)
        if self._secret > guess:
            self._lowest = max(self._lowest, guess + 1)
            return self._say(HIGHER)
        self._highest = min(self._highest, guess - 1)
        return self._say(LOWER)

    def _is_ruled_out(self, guess: int | None) -> bool:
        if guess is None or not self._options.low <= guess <= self._options.high:
            return False
        return not self._lowest <= guess <= self._highest

    def _say(self, text: str) -> Message:
        content = text.format(
            low=self._options.low, high=self._options.high, max_guesses=self._options.max_guesses
        )
        return Message(role=Role.USER, content=content)
